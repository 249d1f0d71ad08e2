"""Nothing beside the bundle decides a verdict, and a native crash is exit 7 with its signal."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
from table_model import successor_table, write_table_model
from tiny_bundle import write_bundle

from converters.bundle import read_bundle
from converters.flatbuffer import pack_model, read_model
from hermes.errors import NativeToolError
from hermes.recipe import Limits
from hermes.runners.child import run_in_child
from hermes.runners.flatbuffer import FlatbufferRunner
from hermes.runners.litert_lm import LiteRtLmRunner
from hermes.verify.ladder import climb
from hermes.verify.ladder_input import LadderInput
from hermes.verify.runtime import RuntimeData

PROMPT = "the cat sat"


def turned(flatbuffer: Path, target: Path) -> Path:
    """The same file with its largest constants negated: equal size, another model."""
    model = read_model(flatbuffer)
    largest = max(len(b.data) for b in model.buffers if b.data is not None)
    for buffer in model.buffers:
        if buffer.data is not None and len(buffer.data) == largest:
            values = -np.frombuffer(bytes(buffer.data), np.float32)
            buffer.data = np.frombuffer(values.tobytes(), np.uint8)
    target.write_bytes(pack_model(model))
    return target


def test_a_stale_weight_cache_changes_nothing(tiny_flatbuffer: Path, tmp_path: Path) -> None:
    """FACTS: the cache's key is name, time and size; another model of equal ones gets it too."""
    other = turned(tiny_flatbuffer, tmp_path / "other.tflite")
    first = write_bundle(turned(other, tmp_path / "first.tflite"), tmp_path / "first.litertlm")
    second = write_bundle(other, tmp_path / "second.litertlm")
    bundle = tmp_path / "model.litertlm"
    bundle.write_bytes(first.read_bytes())
    os.utime(bundle, (1_700_000_000, 1_700_000_000))
    said = run_in_child("stale_cache:answer_with_weight_cache", str(bundle), PROMPT, 8)
    caches = {path.name: path.read_bytes() for path in tmp_path.glob("*.xnnpack_cache")}
    assert caches
    bundle.write_bytes(second.read_bytes())
    os.utime(bundle, (1_700_000_000, 1_700_000_000))
    assert bundle.stat().st_size == first.stat().st_size
    with LiteRtLmRunner(second) as runner:
        wanted = runner.generate(PROMPT, 8).text
    assert wanted != said
    data = RuntimeData((PROMPT,), None, 8, None, (2,))
    with LiteRtLmRunner(bundle) as runner:
        assert runner.generate(PROMPT, 8).text == wanted
    right = LadderInput(
        Limits(),
        flatbuffer=lambda: FlatbufferRunner(other),
        runtime=lambda: LiteRtLmRunner(bundle),
        runtime_data=data,
    )
    assert climb(right).report.passed
    # Nothing was written or replaced beside the model either.
    assert caches == {path.name: path.read_bytes() for path in tmp_path.glob("*.xnnpack_cache")}


def foreign_tokenizer(target: Path, folder: Path) -> Path:
    """A bundle whose tokenizer.json has a model type that the runtime does not know."""
    from litert_lm_builder import litertlm_builder as builder
    from litert_lm_builder.runtime.proto import llm_metadata_pb2

    metadata = llm_metadata_pb2.LlmMetadata(max_num_tokens=64)
    metadata.llm_model_type.generic_model.SetInParent()
    metadata.stop_tokens.add().token_ids.ids.append(2)
    (folder / "metadata.pb").write_bytes(metadata.SerializeToString())
    tokenizer = {"version": "1.0", "added_tokens": [], "model": {"type": "Unheard", "vocab": {}}}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    model = write_table_model(folder / "table.tflite", successor_table(128))
    writer = builder.LitertLmFileBuilder()
    writer.add_system_metadata(builder.Metadata("Authors", "test", builder.DType.STRING))
    writer.add_llm_metadata(str(folder / "metadata.pb"))
    writer.add_hf_tokenizer(str(folder / "tokenizer.json"))
    writer.add_tflite_model(str(model), builder.TfLiteModelType.PREFILL_DECODE)
    with target.open("wb") as stream:
        writer.build(stream)
    return target


def broken_header(target: Path, folder: Path) -> Path:
    """A root offset of the header that points outside of it."""
    model = write_table_model(folder / "table.tflite", successor_table(128))
    data = bytearray(write_bundle(model, folder / "right.litertlm").read_bytes())
    data[32:36] = b"\x00\x00\x10\x00"
    target.write_bytes(data)
    return target


@pytest.mark.parametrize("make", [foreign_tokenizer, broken_header])
def test_a_bundle_that_crashes_the_runtime_is_exit_7(make: type[object], tmp_path: Path) -> None:
    bundle = make(tmp_path / "crash.litertlm", tmp_path)  # type: ignore[call-arg]
    given = LadderInput(
        Limits(),
        flatbuffer=lambda: FlatbufferRunner(tmp_path / "table.tflite"),
        runtime=lambda: LiteRtLmRunner(bundle),
        runtime_data=RuntimeData((PROMPT,), None, 4, None, (2,)),
    )
    outcome = climb(given)
    error = outcome.error()
    assert isinstance(error, NativeToolError)
    assert error.exit_code == 7
    assert "died with SIG" in str(error)
    assert outcome.report.first_red is not None
    assert outcome.report.first_red.rung == 7
    assert "died with SIG" in outcome.report.first_red.detail


def test_our_own_reader_accepts_what_only_the_runtime_cannot_load(tmp_path: Path) -> None:
    bundle = foreign_tokenizer(tmp_path / "crash.litertlm", tmp_path)
    assert read_bundle(bundle).prompt.stop_token_ids == (2,)
