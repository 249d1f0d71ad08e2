"""A bundle that kills the native runtime ends the command with 7 and the signal's name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from planted_faults import World, build_world

from hermes.cli import app, run_command


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return build_world(tmp_path_factory.mktemp("world"))


def with_unheard_tokenizer(world: World, target: Path) -> Path:
    """The right model with a tokenizer.json of a model type that the runtime does not know."""
    from litert_lm_builder import litertlm_builder as builder
    from litert_lm_builder.runtime.proto import llm_metadata_pb2

    folder = target.parent
    metadata = llm_metadata_pb2.LlmMetadata(max_num_tokens=64)
    metadata.llm_model_type.generic_model.SetInParent()
    metadata.stop_tokens.add().token_ids.ids.append(2)
    (folder / "metadata.pb").write_bytes(metadata.SerializeToString())
    tokenizer = {"version": "1.0", "added_tokens": [], "model": {"type": "Unheard", "vocab": {}}}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    writer = builder.LitertLmFileBuilder()
    writer.add_system_metadata(builder.Metadata("Authors", "test", builder.DType.STRING))
    writer.add_llm_metadata(str(folder / "metadata.pb"))
    writer.add_hf_tokenizer(str(folder / "tokenizer.json"))
    writer.add_tflite_model(str(world.model), builder.TfLiteModelType.PREFILL_DECODE)
    with target.open("wb") as stream:
        writer.build(stream)
    return target


def test_exit_code_7_and_the_signal(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle = with_unheard_tokenizer(world, tmp_path / "crash.litertlm")
    checkpoint = str(world.source.checkpoint.path)
    report = tmp_path / "report"
    arguments = [str(bundle), "--against", checkpoint, "--report", str(report)]
    assert (
        run_command(app, ["verify", *arguments, "--recipe", str(world.folder / "small.toml")]) == 7
    )
    captured = capsys.readouterr()
    assert "LiteRT-LM runtime died with SIG" in captured.err
    assert "Traceback" not in captured.err
    # The other rungs ran, and the report says which one died.
    values = json.loads((report / "report.json").read_text())
    assert values["first_red_rung"] == 6
    assert {check["rung"] for check in values["checks"]} == {0, 5, 6, 7}
    assert "died with SIG" in (report / "report.html").read_text()
