"""What the script puts beside llama.cpp: whole rows, files of another type, told mixes of types."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import gguf
import numpy
import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "bench_llama_cpp.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bench_llama_cpp", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_untold_tokens_share_the_rest_as_the_reference_does(script: ModuleType) -> None:
    row = numpy.log(numpy.array([0.5, 0.0, 0.3, 0.0], dtype=numpy.float32) + 1e-38)
    row[[1, 3]] = -numpy.inf
    reference = numpy.log(numpy.array([0.4, 0.1, 0.2, 0.3], dtype=numpy.float32)) + 7
    found = numpy.exp(script.completed(row, reference))
    assert found == pytest.approx([0.5, 0.05, 0.3, 0.15], rel=1e-5)


def test_matrices_of_the_type_tables_in_q8_0(script: ModuleType, tmp_path: Path) -> None:
    source = tmp_path / "source.gguf"
    values = numpy.random.default_rng(5).normal(size=(96, 64)).astype(numpy.float32)
    writer = gguf.GGUFWriter(source, "llama")
    writer.add_block_count(1)
    for name in ("token_embd.weight", "blk.0.attn_q.weight"):
        writer.add_tensor(name, values)
    writer.add_tensor("output_norm.weight", values[0])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert script.mix(source) == "F32 0.0"
    made = script.requantized(source, "Q4_0", tmp_path / "made.gguf")
    found = {tensor.name: tensor for tensor in gguf.GGUFReader(made).tensors}
    blocks = values.size // 32
    assert int(found["token_embd.weight"].n_bytes) == blocks * (32 + 2)
    assert int(found["blk.0.attn_q.weight"].n_bytes) == blocks * (16 + 2)
    assert script.mix(made) == "Q8_0 0.0, Q4_0 0.0, F32 0.0"


@pytest.mark.parametrize("ending", ["echo no such type >&2; exit 1", "exit 0"])
def test_a_quantizer_without_a_file_is_an_error(
    script: ModuleType, ending: str, tmp_path: Path
) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{ending}\n", encoding="utf-8")
    python.chmod(0o755)
    with pytest.raises(SystemExit, match="made no Q4_K_M"):
        script.quantized(python, tmp_path / "in.gguf", "Q4_K_M", tmp_path / "out.gguf")
