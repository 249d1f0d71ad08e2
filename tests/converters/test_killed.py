"""Killed while the ladder is climbed or while the file is put into place, and resumed."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from small_checkpoints import small_model, write_checkpoint, write_recipe

import converters.pipeline
import converters.publish
from converters.pipeline import ConvertOptions, convert
from converters.source import SourceOptions
from hermes.progress import Progress, silent


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ConvertOptions]:
    """A conversion with all its checks, in a cache of its own."""
    folder = tmp_path_factory.mktemp("killed")
    (folder / "out").mkdir()
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        yield ConvertOptions(
            source=SourceOptions(write_checkpoint(folder / "checkpoint", *small_model())),
            target=folder / "out" / "small.litertlm",
            recipe=str(write_recipe(folder / "small.toml")),
        )


@pytest.fixture(scope="module")
def undisturbed(options: ConvertOptions) -> bytes:
    """The bundle of a run that nothing happened to."""
    target = options.target.with_name("undisturbed.litertlm")
    convert(replace(options, target=target, resume=False))
    data = target.read_bytes()
    for file in target.parent.iterdir():
        file.unlink()
    return data


def die(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def killed(options: ConvertOptions, moment: str) -> None:
    """Convert in a process that kills itself without a farewell at that moment."""

    def watch(step: Progress) -> None:
        if moment.startswith("rung") and step.stage.startswith(moment):
            die()

    def run() -> None:
        if not moment.startswith("rung"):
            # The child's own copy: it was forked.
            module = converters.pipeline if hasattr(converters.pipeline, moment) else None
            setattr(module or converters.publish, moment, die)
        convert(options, watch)

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    process.join(300)
    assert process.exitcode == -signal.SIGKILL


@pytest.mark.parametrize("moment", ["rung 3", "rung 6", "seal", "_flush", "_move"])
def test_resumed_gives_the_same_bytes(
    options: ConvertOptions,
    undisturbed: bytes,
    moment: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options = replace(options, verify=moment.startswith("rung"), resume=True)
    killed(options, moment)
    assert not options.target.exists()

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("the weights were bound before")

    monkeypatch.setattr(converters.pipeline, "bind_weights", refuse)
    convert(replace(options, verify=True), silent)
    assert options.target.read_bytes() == undisturbed
    card = f"{options.target.name}.card.json"
    assert sorted(path.name for path in options.target.parent.iterdir()) == [
        options.target.name, card,
    ]  # fmt: skip
    for file in Path(options.target.parent).iterdir():
        file.unlink()


def test_killed_between_the_bundle_and_its_card(
    options: ConvertOptions, undisturbed: bytes
) -> None:
    """The bundle is in place; the run is repeated with --force and completes the card."""
    options = replace(options, verify=False, resume=True)
    killed(options, "write_card")
    assert options.target.exists()
    convert(replace(options, verify=True, force=True))
    assert options.target.read_bytes() == undisturbed
    assert options.target.with_name(f"{options.target.name}.card.json").exists()
