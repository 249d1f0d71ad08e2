"""Finished stages are taken over by `--resume`, and only where they would come out the same."""

from __future__ import annotations

import errno
import fcntl
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from small_checkpoints import write_checkpoint
from tiny_llama import tiny_config, tiny_weights

import converters.graph
import converters.pipeline
from converters.bundle import read_bundle
from converters.pipeline import ConvertOptions, convert
from converters.source import SourceOptions
from converters.work import clean, work_folder, work_root
from hermes.errors import BadInputError, ResourceError
from hermes.progress import Progress, silent
from hermes.report.check import Report

RECIPE = """
rewrites = ["fold_norm_gains", "rotate_residual"]
[export]
context = 32
prefill = [4]
[[quantization]]
tensors = "*"
"""


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One cache for the module, so that its graph is traced once."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def home(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    return cache


@pytest.fixture
def options(home: Path, tmp_path: Path) -> ConvertOptions:
    clean()  # what another test has bound is the same content
    return small_conversion(tmp_path)


@pytest.fixture(scope="module")
def undisturbed(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The bundle of a run that nothing happened to; the same weights lie in every test's folder."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("XDG_CACHE_HOME", str(cache))
        options = small_conversion(tmp_path_factory.mktemp("undisturbed"))
        convert(options)
    return bytes_of(options)


def small_conversion(folder: Path, seed: int = 0, **changes: Any) -> ConvertOptions:
    (folder / "small.toml").write_text(RECIPE)
    config = tiny_config(num_hidden_layers=1)
    checkpoint = write_checkpoint(folder / "checkpoint", config, tiny_weights(config, seed=seed))
    return ConvertOptions(
        source=SourceOptions(checkpoint),
        target=folder / "small.litertlm",
        recipe=str(folder / "small.toml"),
        verify=False,
        force=True,
        **{"resume": True, **changes},
    )


def run_until(options: ConvertOptions, stage: str, done: int) -> None:
    """Convert in a process that kills itself without a farewell."""

    def watch(step: Progress) -> None:
        if step.stage == stage and step.done >= done:
            os.kill(os.getpid(), signal.SIGKILL)

    process = multiprocessing.get_context("fork").Process(target=convert, args=(options, watch))
    process.start()
    process.join(300)
    assert process.exitcode == -signal.SIGKILL


def refuse(*_: Any, **__: Any) -> Any:
    raise AssertionError("this stage was finished before")


def bytes_of(options: ConvertOptions) -> bytes:
    return options.target.read_bytes()


@pytest.mark.parametrize(
    ("stage", "done"),
    [
        ("opening the checkpoint", 0),
        ("making the graph", 0),
        ("writing the weights", 1),
        ("writing the weights", 4),
        ("writing the bundle", 0),
    ],
)
def test_killed_and_resumed_gives_the_same_bytes(
    options: ConvertOptions, undisturbed: bytes, tmp_path: Path, stage: str, done: int
) -> None:
    run_until(options, stage, done)
    assert not options.target.exists()
    report = convert(options)
    assert report.facts["graph"]["made"] == "kept"
    assert bytes_of(options) == undisturbed
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "checkpoint", "small.litertlm", "small.litertlm.card.json", "small.toml",
    ]  # fmt: skip


def test_a_killed_tracer_is_traced_again(
    options: ConvertOptions,
    undisturbed: bytes,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The graph is made in a cache that holds none, killed while the tracer runs, and resumed."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))

    def die(*_: Any, **__: Any) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)

    with monkeypatch.context() as patched:
        patched.setattr(converters.graph, "measure_in_child", die)
        run_until(options, "never", 0)
    assert convert(options).facts["graph"]["made"] == "traced"
    assert bytes_of(options) == undisturbed


def test_a_finished_model_is_not_bound_again(
    options: ConvertOptions, undisturbed: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    convert(options)
    first = bytes_of(options)
    assert first == undisturbed
    monkeypatch.setattr(converters.graph, "measure_in_child", refuse)
    monkeypatch.setattr(converters.pipeline, "bind_weights", refuse)
    convert(options)
    assert bytes_of(options) == first
    template = options.source.checkpoint / "chat_template.jinja"
    template.write_text("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    convert(options)
    assert bytes_of(options) != first


def kept_model() -> Path:
    (model,) = work_root().glob("*/model.tflite")
    return model


def test_the_bundle_is_stored_once(options: ConvertOptions) -> None:
    convert(options)
    assert options.target.samefile(kept_model())
    size = options.target.stat().st_size
    # What the folder alone holds is its mark.
    assert clean() < 2000 < size
    assert options.target.stat().st_size == size


def test_a_published_bundle_is_never_written_again(
    options: ConvertOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next bundle of the same model, with another template, goes into a file of its own."""
    convert(options)
    first = bytes_of(options)
    template = options.source.checkpoint / "chat_template.jinja"
    # So long that the model begins elsewhere.
    template.write_text(
        "{% for m in messages %}{{ m['content'] }}{% endfor %}" + "{# long #}" * 9000
    )
    monkeypatch.setattr(converters.pipeline, "bind_weights", refuse)
    other = replace(options, target=tmp_path / "other.litertlm")
    convert(other)
    assert bytes_of(options) == first
    models = [section_of(path) for path in (options.target, other.target)]
    assert models[0] == models[1]
    assert not other.target.samefile(options.target)


def section_of(path: Path) -> bytes:
    section = read_bundle(path).section("TFLiteModel")
    return path.read_bytes()[section.offset : section.offset + section.size]


def test_a_bundle_that_was_changed_in_place_is_not_taken_over(
    options: ConvertOptions, undisturbed: bytes
) -> None:
    """The kept model is the same file: its hash tells."""
    convert(options)
    with options.target.open("r+b") as file:
        file.seek(-100, os.SEEK_END)
        file.write(b"\xff")
    convert(options)
    assert bytes_of(options) == undisturbed


def test_a_disk_that_is_full_halfway_leaves_nothing(
    options: ConvertOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, left = os.pwrite, 3

    def full(*arguments: Any) -> int:
        nonlocal left
        left -= 1
        if left < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(*arguments)

    options.target.write_bytes(b"the old bundle")
    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(ResourceError, match="No space left"):
        convert(options)
    assert [path.name for path in options.target.parent.glob("*.litertlm")] == ["small.litertlm"]
    assert [path.name for path in options.target.parent.glob(".*")] == []
    assert bytes_of(options) == b"the old bundle"


def test_a_cache_on_another_disk_gets_a_copy(
    options: ConvertOptions, undisturbed: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    def elsewhere(*_: Any) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    # `publish` moves by a link too, and falls back likewise.
    monkeypatch.setattr(os, "link", elsewhere)
    convert(options)
    assert bytes_of(options) == undisturbed
    assert not options.target.samefile(kept_model())
    monkeypatch.setattr(converters.pipeline, "bind_weights", refuse)
    convert(options)
    assert bytes_of(options) == undisturbed


def other_weights(options: ConvertOptions) -> None:
    config = tiny_config(num_hidden_layers=1)
    write_checkpoint(options.source.checkpoint, config, tiny_weights(config, seed=5))


def other_weights_unseen(options: ConvertOptions) -> None:
    """The file has the size and the times of the old one."""
    path = options.source.checkpoint / "model.safetensors"
    before = path.stat()
    other_weights(options)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_size == before.st_size


def other_rule(options: ConvertOptions) -> None:
    Path(options.recipe).write_text(RECIPE + 'granularity = "tensor"\n')


@pytest.mark.parametrize("change", [other_weights, other_weights_unseen, other_rule])
def test_what_would_differ_is_bound_again(
    options: ConvertOptions,
    change: Callable[[ConvertOptions], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    convert(options)
    change(options)
    with monkeypatch.context() as patched:
        patched.setattr(converters.pipeline, "bind_weights", refuse)
        with pytest.raises(AssertionError, match="finished before"):
            convert(options)
    resumed = convert(options)
    again = bytes_of(options)
    clean()
    assert resumed.facts["graph"]["made"] == "kept"
    convert(options)
    assert bytes_of(options) == again


def test_a_copy_of_the_checkpoint_is_the_same_checkpoint(
    options: ConvertOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    convert(options)
    first = bytes_of(options)
    elsewhere = shutil.copytree(options.source.checkpoint, tmp_path / "copy")
    monkeypatch.setattr(converters.pipeline, "bind_weights", refuse)
    convert(replace(options, source=SourceOptions(elsewhere)))
    assert bytes_of(options) == first


def test_a_checkpoint_that_changes_while_it_is_read_is_refused(options: ConvertOptions) -> None:
    def disturb(step: Progress) -> None:
        if step.stage == "writing the weights":
            other_weights(options)

    with pytest.raises(BadInputError, match="changed while they were read") as caught:
        convert(options, disturb)
    assert "model.safetensors" in str(caught.value)
    assert not options.target.exists()


@pytest.mark.parametrize("damage", ["cut", "a bit", "no mark", "half a mark"])
def test_a_damaged_stage_is_made_again(
    options: ConvertOptions, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    convert(options)
    first = bytes_of(options)
    (folder,) = [path for path in work_root().iterdir() if (path / "model.json").exists()]
    if damage == "cut":
        (folder / "model.tflite").write_bytes((folder / "model.tflite").read_bytes()[:-64])
    elif damage == "a bit":
        data = bytearray((folder / "model.tflite").read_bytes())
        data[-100] ^= 1
        (folder / "model.tflite").write_bytes(data)
    elif damage == "no mark":
        (folder / "model.json").unlink()
    else:
        (folder / "model.json").write_text((folder / "model.json").read_text()[:-20])
    convert(options)
    assert bytes_of(options) == first


def test_without_resume_nothing_is_taken_over(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = small_conversion(tmp_path, resume=False)
    convert(options)
    monkeypatch.setattr(converters.pipeline, "bind_weights", refuse)
    with pytest.raises(AssertionError, match="finished before"):
        convert(options)


def test_a_busy_folder_is_left_alone(home: Path) -> None:
    clean()
    with work_folder("a-key") as first, work_folder("a-key") as second:
        assert first.path != second.path
        first.model.write_bytes(b"half")
        assert clean() == 0
        assert first.model.exists()
        assert second.path.is_dir()
    assert not second.path.exists()
    with work_folder("a-key") as third:
        assert third.path == first.path
        with (third.path / "lock").open("rb") as lock, pytest.raises(OSError, match="unavailable"):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_leftovers_go_and_a_finished_model_stays(home: Path) -> None:
    with work_folder("leftovers") as work:
        bundle = work.path / "bundle"
        bundle.write_bytes(b"before the model")
        work.finish_model((), bundle, offset=7)
        (work.path / "float32.tflite").write_bytes(b"left")
        (work.path / "folder").mkdir()
    with work_folder("leftovers") as work:
        assert sorted(path.name for path in work.path.iterdir()) == [
            "lock", "model.json", "model.tflite",
        ]  # fmt: skip
        finished = work.finished_model()
        assert finished is not None
        assert finished.weights == ()
    assert clean(graphs=True) > 0
    assert not list(work_root().iterdir())


def test_the_prediction_stands_beside_the_measurement(options: ConvertOptions) -> None:
    report: Report = convert(options, silent)
    cost = report.facts["cost"]
    assert set(cost["peak_memory"]) == {"predicted", "measured"}
    assert cost["bundle_bytes"]["measured"] == options.target.stat().st_size
    assert set(cost["kv_bytes"]) == {"predicted"}


def test_inspecting_a_bundle_imports_no_torch(options: ConvertOptions) -> None:
    convert(options)
    code = (
        "import sys; from hermes.cli import app, run_command; "
        f"assert run_command(app, ['inspect', {str(options.target)!r}, '--json']) == 0; "
        "assert not {'torch', 'transformers', 'litert_torch'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
