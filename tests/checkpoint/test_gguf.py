"""GGUF files written by llama.cpp's own package, read back by ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from mapped_logits import logits_of, mapped
from tiny_llama import (
    PROMPT_IDS,
    largest_gap,
    reference_logits,
    tiny_config,
    tiny_weights,
)

from hermes.checkpoint import open_checkpoint
from hermes.errors import BadInputError, HermesError, UnsupportedModelError

CONFIG = tiny_config(tie_word_embeddings=False)
NAMES = [
    ("model.embed_tokens", "token_embd"),
    ("model.layers.", "blk."),
    ("self_attn.q_proj", "attn_q"),
    ("self_attn.k_proj", "attn_k"),
    ("self_attn.v_proj", "attn_v"),
    ("self_attn.o_proj", "attn_output"),
    ("input_layernorm", "attn_norm"),
    ("post_attention_layernorm", "ffn_norm"),
    ("mlp.gate_proj", "ffn_gate"),
    ("mlp.up_proj", "ffn_up"),
    ("mlp.down_proj", "ffn_down"),
    ("model.norm", "output_norm"),
    ("lm_head", "output"),
]


def llama_cpp_order(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """llama.cpp's documented reordering of Llama's query and key rows."""
    split = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return split.swapaxes(1, 2).reshape(rows.shape)


def write_gguf(
    path: Path,
    weights: dict[str, torch.Tensor],
    config: dict[str, Any],
    kind: Kind = Kind.F32,
    architecture: str = "llama",
    extra: dict[str, torch.Tensor] | None = None,
) -> None:
    """A model as llama.cpp's converter would write it."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_eos_token_id(2)
    writer.add_token_list([f"t{i}" for i in range(config["vocab_size"])])
    for name, value in weights.items():
        permuted = architecture in ("llama", "smollm3")
        if permuted and "q_proj" in name:
            value = llama_cpp_order(value, config["num_attention_heads"])
        elif permuted and "k_proj" in name:
            value = llama_cpp_order(value, config["num_key_value_heads"])
        for old, new in NAMES:
            name = name.replace(old, new)
        used = Kind.F32 if value.ndim == 1 else kind
        data = gguf.quants.quantize(value.numpy(), used)
        writer.add_tensor(name, data, raw_dtype=used)
    for name, value in (extra or {}).items():
        writer.add_tensor(name, value.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_llama_rows_are_put_back(tmp_path: Path) -> None:
    weights = tiny_weights(CONFIG)
    write_gguf(tmp_path / "model.gguf", weights, CONFIG)
    model = mapped(tmp_path / "model.gguf")
    assert model.layout == "gguf-llama"
    assert model.config.rms_norm_eps == 1e-5
    for name in ("q_proj", "k_proj"):
        stored = model.weights[f"layers.1.self_attn.{name}.weight"].read()
        assert torch.equal(stored, weights[f"model.layers.1.self_attn.{name}.weight"])
    assert largest_gap(logits_of(model), reference_logits(weights, CONFIG, PROMPT_IDS)) < 1e-4


def test_qwen_rows_stay(tmp_path: Path) -> None:
    weights = tiny_weights(CONFIG)
    write_gguf(tmp_path / "model.gguf", weights, CONFIG, architecture="qwen2")
    model = mapped(tmp_path / "model.gguf")
    assert model.layout == "gguf-qwen"
    assert largest_gap(logits_of(model), reference_logits(weights, CONFIG, PROMPT_IDS)) < 1e-4


def test_smollm3_layers_without_rotation(tmp_path: Path) -> None:
    config = CONFIG | {"num_hidden_layers": 4}
    weights = tiny_weights(config)
    write_gguf(tmp_path / "model.gguf", weights, config, architecture="smollm3")
    model = mapped(tmp_path / "model.gguf")
    assert model.config.no_rope_layers == (3,)
    wanted = reference_logits(weights, config, PROMPT_IDS, no_rope_layers=(3,))
    assert largest_gap(logits_of(model), wanted) < 1e-4


@pytest.mark.parametrize("kind", [Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q5_1, Kind.Q4_1, Kind.Q4_0])
def test_every_kind_equals_the_package(tmp_path: Path, kind: Kind) -> None:
    weights = tiny_weights(CONFIG)
    write_gguf(tmp_path / "model.gguf", weights, CONFIG, kind)
    opened = open_checkpoint(tmp_path / "model.gguf").tensors
    assert opened["blk.0.ffn_up.weight"].dtype in (kind.name, "float16", "bfloat16")
    for tensor in gguf.GGUFReader(tmp_path / "model.gguf").tensors:
        wanted = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        found = opened[tensor.name].read().float()
        assert torch.equal(found, torch.from_numpy(numpy.array(wanted)).reshape(found.shape))
        if found.ndim == 2:
            assert torch.equal(opened[tensor.name].read(5, 9).float(), found[5:9])


READABLE = [kind for kind in Kind if kind in gguf.quants._type_traits]


@pytest.mark.parametrize("kind", READABLE, ids=lambda kind: kind.name)
def test_rows_of_every_dequantizable_kind(tmp_path: Path, kind: Kind) -> None:
    """Random blocks, since the package cannot quantize to most kinds; rows equal the whole."""
    block, size = gguf.GGML_QUANT_SIZES[kind]
    columns = 2 * max(block, 64)
    random = numpy.random.default_rng(kind.value)
    data = random.integers(0, 256, (6, columns // block * size), dtype=numpy.uint8)
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_tensor("a", data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    tensor = open_checkpoint(tmp_path / "model.gguf").tensors["a"]
    wanted = torch.from_numpy(gguf.quants.dequantize(data, kind))
    assert tensor.shape == (6, columns) == tuple(wanted.shape)
    assert torch.equal(tensor.read().float().nan_to_num(), wanted.nan_to_num())
    assert torch.equal(tensor.read(2, 5).float().nan_to_num(), wanted[2:5].nan_to_num())


def test_a_tied_model_has_no_output(tmp_path: Path) -> None:
    config = tiny_config()
    weights = tiny_weights(config)
    write_gguf(tmp_path / "model.gguf", weights, config)
    model = mapped(tmp_path / "model.gguf")
    assert model.config.tie_embeddings
    assert largest_gap(logits_of(model), reference_logits(weights, config, PROMPT_IDS)) < 1e-4


def test_llama3_factors_are_asked_about_and_checked(tmp_path: Path) -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    from tiny_llama import rope_frequencies

    factors = (rope_frequencies(CONFIG) / rope_frequencies(CONFIG, scaling)).float()
    weights = tiny_weights(CONFIG)
    path = tmp_path / "model.gguf"
    write_gguf(path, weights, CONFIG, extra={"rope_freqs.weight": factors})
    with pytest.raises(BadInputError, match=r"rope_freqs\.weight scales"):
        mapped(path)
    with pytest.raises(BadInputError, match=r"rope_freqs\.weight scales"):
        mapped(path, {"rope_scaling": scaling | {"factor": 4.0}})
    model = mapped(path, {"rope_scaling": scaling})
    wanted = reference_logits(weights, CONFIG, PROMPT_IDS, scaling=scaling)
    assert largest_gap(logits_of(model), wanted) < 1e-4


@pytest.mark.parametrize("architecture", ["gemma2", "mistral3", "phi3", "hermes"])
def test_another_architecture_is_refused_by_name(tmp_path: Path, architecture: str) -> None:
    write_gguf(tmp_path / "model.gguf", tiny_weights(CONFIG), CONFIG, architecture=architecture)
    with pytest.raises(UnsupportedModelError, match=architecture):
        mapped(tmp_path / "model.gguf")


def test_metadata_is_kept_for_the_tokenizer(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", tiny_weights(CONFIG), CONFIG)
    metadata = open_checkpoint(tmp_path / "model.gguf").gguf_metadata
    assert metadata is not None
    assert metadata["tokenizer.ggml.tokens"] == [f"t{i}" for i in range(128)]
    assert metadata["tokenizer.ggml.eos_token_id"] == 2


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, tiny_weights(CONFIG), CONFIG)
    data = path.read_bytes()
    for share in (0.0001, 0.001, 0.01, 0.5, 0.99):
        path.write_bytes(data[: int(len(data) * share)])
        with pytest.raises(BadInputError):
            open_checkpoint(path)
    random = numpy.random.default_rng(0)
    survived = 0
    for _ in range(300):
        broken = bytearray(data)
        for position in random.integers(0, 4000, size=4):
            broken[position] = random.integers(0, 256)
        path.write_bytes(broken)
        try:
            mapped(path)
            survived += 1
        except HermesError:
            pass
    assert survived < 300


@pytest.mark.parametrize(
    ("head", "message"),
    [
        (b"GGUF\x00\x00\x00\x03", "big-endian"),
        (b"GGUF\x01\x00\x00\x00", "version 1"),
        (b"GGUF\x03\x00\x00\x00" + b"\xff" * 16, "a count of"),
        (b"GGUF\x03\x00\x00\x00" + (1).to_bytes(8, "little") * 2 + b"\xff" * 8, "a count of"),
    ],
)
def test_damaged_heads(tmp_path: Path, head: bytes, message: str) -> None:
    (tmp_path / "model.gguf").write_bytes(head + bytes(64))
    with pytest.raises(BadInputError, match=message):
        open_checkpoint(tmp_path / "model.gguf")
