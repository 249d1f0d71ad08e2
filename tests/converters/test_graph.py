"""Graphs are kept by everything that decides them, and by nothing else."""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import fields, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from tiny_llama import hermes_config, tiny_config

import converters.graph
import converters.kept
from converters.graph import Reasons, graph_folder, graph_key, make_graph, obtain_graph
from hermes.config import HermesConfig, RopeScaling
from hermes.errors import NativeToolError
from hermes.recipe import ExportShapes, GraphOptions

ROOT = Path(__file__).resolve().parents[2]
CONFIG = hermes_config(tiny_config(num_hidden_layers=1))
SHAPES = ExportShapes(16, (4,))
OPTIONS = GraphOptions()
KEY = graph_key(CONFIG, SHAPES, OPTIONS)

ARCHITECTURE: dict[str, Any] = {
    "vocab_size": 130,
    "hidden_size": 68,
    "intermediate_size": 100,
    "num_layers": 2,
    "num_heads": 8,
    "num_kv_heads": 1,
    "head_dim": 18,
    "rope_theta": 5e5,
    "rms_norm_eps": 1e-6,
    "tie_embeddings": False,
    "attention_bias": True,
    "output_bias": True,
    "mlp_bias": True,
    "qk_norm": True,
    "rope_scaling": RopeScaling("linear", 2.0),
    "rope_amplitude": 1.1,
    "no_rope_layers": (0,),
}
WITHOUT_EFFECT = {"max_seq_len": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def test_every_field_of_the_config_is_covered_here() -> None:
    assert {f.name for f in fields(HermesConfig)} == {*ARCHITECTURE, *WITHOUT_EFFECT}


@pytest.mark.parametrize("field", ARCHITECTURE)
def test_the_key_follows_the_architecture(field: str) -> None:
    assert graph_key(replace(CONFIG, **{field: ARCHITECTURE[field]}), SHAPES, OPTIONS) != KEY


@pytest.mark.parametrize("field", WITHOUT_EFFECT)
def test_the_key_ignores_what_is_not_in_the_graph(field: str) -> None:
    assert graph_key(replace(CONFIG, **{field: WITHOUT_EFFECT[field]}), SHAPES, OPTIONS) == KEY


def test_the_key_follows_shapes_and_options() -> None:
    keys = {KEY}
    for shapes in (ExportShapes(32, (4,)), ExportShapes(16, (8,)), ExportShapes(16, (4, 1))):
        keys.add(graph_key(CONFIG, shapes, OPTIONS))
    for option in fields(GraphOptions):
        changed = replace(OPTIONS, **{option.name: not getattr(OPTIONS, option.name)})
        keys.add(graph_key(CONFIG, SHAPES, changed))
    assert len(keys) == 4 + len(fields(GraphOptions))


@pytest.mark.parametrize("package", ["torch", "litert-torch", "litert-converter", "ai-edge-litert"])
def test_the_key_follows_the_versions(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: "99" if name == package else real(name))
    assert graph_key(CONFIG, SHAPES, OPTIONS) != KEY


def test_the_key_follows_the_source_text(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Path.read_bytes
    keys = {KEY}
    for name in converters.graph._SOURCES:

        def edited(path: Path, name: str = name) -> bytes:
            return real(path) + (b"#" if path == ROOT / name else b"")

        with monkeypatch.context() as patch:
            patch.setattr(Path, "read_bytes", edited)
            keys.add(graph_key(CONFIG, SHAPES, OPTIONS))
    assert len(keys) == 1 + len(converters.graph._SOURCES)


def test_every_source_that_shapes_the_graph_is_in_the_key() -> None:
    """What the tracer and the stamper import of ours, transitively.

    Left out are modules of plain values (they are in the key themselves) and of errors.
    """
    values_only = {"hermes/config.py", "hermes/recipe.py", "hermes/errors.py", "hermes/__init__.py"}
    todo, seen = ["converters/direct.py", "converters/skeleton.py", "converters/stamp.py"], set()
    while todo:
        name = todo.pop()
        if name in seen or name in values_only or name == "converters/__init__.py":
            continue
        seen.add(name)
        for node in ast.walk(ast.parse((ROOT / name).read_text())):
            modules = []
            if isinstance(node, ast.ImportFrom) and node.module:
                modules = [node.module]
            elif isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            paths = [f"{module.replace('.', '/')}.py" for module in modules]
            todo.extend(path for path in paths if (ROOT / path).is_file())
    assert seen <= set(converters.graph._SOURCES)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert graph_folder() == tmp_path / "cache" / "hermes" / "graphs"
    return graph_folder()


def work_folder(tmp_path: Path, name: str) -> Path:
    (tmp_path / name).mkdir()
    return tmp_path / name


def no_child(*_: Any, **__: Any) -> Any:
    raise AssertionError("a child was started")


def test_a_kept_graph_is_used_again(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    first = obtain_graph(
        CONFIG, SHAPES, OPTIONS, work_folder(tmp_path, "one"), on_line=lines.append
    )
    assert first.made == "traced"
    assert "1 layers are not more than" in first.reason
    assert first.seconds > 0
    assert first.peak_memory > 100 * 2**20
    assert lines
    assert [path.name for path in cache.iterdir()] == [f"{KEY}.tflite"]
    # Traced again, here instead of in a child, it has the same bytes.
    again = tmp_path / "again.tflite"
    make_graph(CONFIG, SHAPES, OPTIONS, again)
    assert again.read_bytes() == first.path.read_bytes()

    monkeypatch.setattr(converters.graph, "measure_in_child", no_child)
    renamed = replace(CONFIG, max_seq_len=99, eos_token_id=7)
    second = obtain_graph(renamed, SHAPES, OPTIONS, work_folder(tmp_path, "two"))
    assert second.made == "kept"
    assert second.path.parent == tmp_path / "two"
    assert second.path.read_bytes() == first.path.read_bytes()
    for changed in (
        lambda: obtain_graph(replace(CONFIG, rope_theta=5.0), SHAPES, OPTIONS, tmp_path),
        lambda: obtain_graph(CONFIG, SHAPES, OPTIONS, tmp_path, keep=False),
    ):
        with pytest.raises(AssertionError, match="a child was started"):
            changed()


def stand_in(monkeypatch: pytest.MonkeyPatch, target: str, timeout: float = 60.0) -> None:
    """Let the real child mechanism run another function."""
    real: Callable[..., Any] = converters.graph.measure_in_child

    def redirected(_: str, *args: Any, **kwargs: Any) -> Any:
        return real(target, *args, **(kwargs | {"timeout": timeout}))

    monkeypatch.setattr(converters.graph, "measure_in_child", redirected)


@pytest.mark.parametrize(
    ("target", "timeout", "words"),
    [
        ("doomed_graph:abort", 60.0, ["SIGABRT", "check failed: !pass.failed()"]),
        ("doomed_graph:refuse_to_lower", 60.0, ["RuntimeError", "stablehlo.sort"]),
        ("doomed_graph:hang", 1.0, ["no answer within 1 s"]),
    ],
)
def test_a_converter_that_dies_is_reported(
    cache: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    target: str,
    timeout: float,
    words: list[str],
) -> None:
    stand_in(monkeypatch, target, timeout)
    with pytest.raises(NativeToolError) as caught:
        obtain_graph(CONFIG, SHAPES, OPTIONS, tmp_path)
    assert caught.value.exit_code == 7
    for word in ["litert-torch converter", *words]:
        assert word in str(caught.value)
    assert not cache.exists() or not list(cache.iterdir())


class Run:
    """What a child would have answered, without the seconds of a real trace."""

    value, seconds, peak_memory = Reasons("too few layers"), 1.5, 10**9


def write_graph(_: str, config: Any, shapes: Any, options: Any, target: Path, **__: Any) -> Run:
    target.write_bytes(b"graph of " + repr(config).encode())
    return Run()


@pytest.mark.parametrize("obstacle", ["file", "closed", "full"])
def test_a_cache_that_cannot_be_used_is_no_obstacle(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, obstacle: str
) -> None:
    monkeypatch.setattr(converters.graph, "measure_in_child", write_graph)
    if obstacle == "file":
        cache.parent.parent.mkdir(parents=True)
        cache.parent.write_text("a file where the folder should be")
    elif obstacle == "closed":
        # Not even its name can be replaced, as in a folder of another user.
        (cache / f"{KEY}.tflite").mkdir(parents=True)
        (cache / f"{KEY}.tflite" / "occupied").touch()
    else:

        def full(_: int) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(converters.kept.os, "fsync", full)
    work = work_folder(tmp_path, "work")
    graph = obtain_graph(CONFIG, SHAPES, OPTIONS, work)
    assert graph.made == "traced"
    assert graph.path.read_bytes().startswith(b"graph of")
    monkeypatch.undo()
    assert not [p for p in cache.glob("*") if p.is_file()], "a temporary file was left"


def test_a_kept_graph_that_cannot_be_read_is_made_again(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(converters.graph, "measure_in_child", write_graph)
    obtain_graph(CONFIG, SHAPES, OPTIONS, work_folder(tmp_path, "one"))

    opened = Path.open

    def unreadable(path: Path, *arguments: Any, **named: Any) -> Any:
        if path.parent == cache:
            raise PermissionError(13, "Permission denied", str(path))
        return opened(path, *arguments, **named)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", unreadable)
        graph = obtain_graph(CONFIG, SHAPES, OPTIONS, work_folder(tmp_path, "two"))
    assert graph.made == "traced"
    assert graph.path.read_bytes().startswith(b"graph of")


@pytest.mark.parametrize("damage", ["cut", "a bit", "empty", "another's"])
def test_a_kept_graph_that_was_damaged_is_made_again(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    monkeypatch.setattr(converters.graph, "measure_in_child", write_graph)
    first = obtain_graph(CONFIG, SHAPES, OPTIONS, work_folder(tmp_path, "one"))
    kept = cache / f"{KEY}.tflite"
    data = bytearray(kept.read_bytes())
    if damage == "cut":
        kept.write_bytes(data[:-1])
    elif damage == "a bit":
        data[-3] ^= 4
        kept.write_bytes(data)
    else:
        kept.write_bytes(b"" if damage == "empty" else first.path.read_bytes())
    again = obtain_graph(CONFIG, SHAPES, OPTIONS, work_folder(tmp_path, "two"))
    assert again.made == "traced"
    assert again.path.read_bytes() == first.path.read_bytes()
    monkeypatch.setattr(converters.graph, "measure_in_child", no_child)
    third = obtain_graph(CONFIG, SHAPES, OPTIONS, work_folder(tmp_path, "three"))
    assert third.made == "kept"
    assert third.path.read_bytes() == first.path.read_bytes()
