"""`hermes import` and `hermes export-hf`: complete, convertible, all or nothing."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
import toy_tokenizers
from safetensors.torch import load_file
from small_checkpoints import small_model, write_checkpoint
from tiny_llama import tiny_config, tiny_weights

import converters.exchange
from converters.source import Source, SourceOptions, open_source
from hermes.cli import app, run_command
from hermes.errors import ResourceError

Patch = pytest.MonkeyPatch


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A Hugging Face folder with two enders, one of them in generation_config only."""
    folder = write_checkpoint(tmp_path / "hf", *small_model(eos_token_id=[2, 5]))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 7}))
    return folder


@pytest.fixture
def llama_cpp_file(tmp_path: Path) -> Path:
    """A GGUF file with a byte-level tokenizer, a chat template and a separate end of turn."""
    config = tiny_config(tie_word_embeddings=False, vocab_size=512)
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "qwen2")
    writer.add_block_count(2)
    writer.add_context_length(64)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(96)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_rope_freq_base(1e4)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(512)
    settings = toy_tokenizers.byte_level_json()
    described = toy_tokenizers.gguf_metadata(settings, "gpt-2")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(described["tokenizer.ggml.tokens"])
    writer.add_token_types(described["tokenizer.ggml.token_type"])
    writer.add_token_merges(described["tokenizer.ggml.merges"])
    writer.add_eos_token_id(2)
    writer.add_eot_token_id(1)
    writer.add_bos_token_id(0)
    writer.add_add_bos_token(False)
    writer.add_chat_template(
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] }}"
        "{{ '<|im_end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    names = {
        "model.embed_tokens": "token_embd",
        "model.layers.": "blk.",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "model.norm": "output_norm",
        "lm_head": "output",
    }
    weights = tiny_weights(config)
    for layer in range(2):
        for part, rows in (("q", 64), ("k", 32), ("v", 32)):
            weights[f"model.layers.{layer}.self_attn.{part}_proj.bias"] = torch.randn(rows)
    for name, value in weights.items():
        for old, new in names.items():
            name = name.replace(old, new)
        writer.add_tensor(name, value.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def prompt_of(source: Source) -> tuple[Any, ...]:
    contract = source.contract
    return (
        contract.start_token_id,
        contract.stop_token_ids,
        contract.chat_template,
        source.tokenizer.data,
    )


def same_model(first: Path, second: Path) -> bool:
    """Everything that a conversion takes from a checkpoint."""
    one, two = open_source(SourceOptions(first)), open_source(SourceOptions(second))
    assert list(one.mapped.weights) == list(two.mapped.weights)
    return prompt_of(one) == prompt_of(two) and all(
        torch.equal(tensor.read(), two.mapped.weights[name].read())
        for name, tensor in one.mapped.weights.items()
    )


def test_there_and_back(folder: Path, tmp_path: Path) -> None:
    own = tmp_path / "own" / "checkpoint.safetensors"
    own.parent.mkdir()
    assert run_command(app, ["import", str(folder), "-o", str(own)]) == 0
    assert same_model(folder, own)
    assert open_source(SourceOptions(own)).contract.stop_token_ids == (2, 5, 7)
    back = tmp_path / "back"
    assert run_command(app, ["export-hf", str(own), "-o", str(back)]) == 0
    assert same_model(folder, back)
    name = "model.safetensors"
    assert load_file(back / name).keys() == load_file(folder / name).keys()
    for key, value in load_file(folder / name).items():
        assert torch.equal(load_file(back / name)[key], value)
    leftovers = [path for path in tmp_path.rglob("*") if "partial" in path.name]
    assert leftovers == []


def test_a_gguf_file_takes_its_tokenizer_along(llama_cpp_file: Path, tmp_path: Path) -> None:
    own, back = tmp_path / "own" / "c.safetensors", tmp_path / "back"
    own.parent.mkdir()
    assert run_command(app, ["import", str(llama_cpp_file), "-o", str(own)]) == 0
    assert same_model(llama_cpp_file, own)
    assert run_command(app, ["export-hf", str(llama_cpp_file), "-o", str(back)]) == 0
    assert same_model(llama_cpp_file, back)
    assert open_source(SourceOptions(back)).contract.stop_token_ids == (1, 2)
    settings = json.loads((back / "tokenizer_config.json").read_text())
    assert settings["eos_token"] == "<|im_end|>"
    assert "im_start" in settings["chat_template"]


def test_transformers_opens_the_folder_of_a_gguf_file(llama_cpp_file: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    back = tmp_path / "back"
    assert run_command(app, ["export-hf", str(llama_cpp_file), "-o", str(back)]) == 0
    theirs = transformers.AutoTokenizer.from_pretrained(back)
    ours = open_source(SourceOptions(back))
    for text in ("the cat sat", "<|im_start|>user\nhi<|im_end|>", " caf\u00e9"):
        assert theirs(text)["input_ids"] == ours.tokenizer.encode(text)
    model = transformers.AutoModelForCausalLM.from_pretrained(back, dtype=torch.float32)
    assert model.config.model_type == "qwen2"


def test_larger_vocabulary_and_the_report(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = tmp_path / "own" / "c.safetensors"
    own.parent.mkdir()
    options = ["--vocab-size", "256", "--init-std", "0.1", "--seed", "3", "--json"]
    assert run_command(app, ["import", str(folder), "-o", str(own), *options]) == 0
    facts = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert facts["vocabulary"] == 256
    # Two tables of 256 rows and 64 columns on top of two layers.
    assert facts["parameters"] - facts["parameters_without_embeddings"] == 2 * 256 * 64
    assert len(open_source(SourceOptions(own)).suppressed) == 128


def _weights_fail(monkeypatch: Patch) -> None:
    write = converters.exchange.write_hermes_checkpoint

    def full(model: Any, target: Path) -> None:
        write(model, target)
        raise ResourceError("the disk is full")

    monkeypatch.setattr(converters.exchange, "write_hermes_checkpoint", full)


def _start_token_is_lost(monkeypatch: Patch) -> None:
    copied = converters.exchange.copied_files

    def forgetful(*arguments: Any) -> dict[str, bytes]:
        return copied(*arguments) | {"tokenizer_config.json": b'{"add_bos_token": false}'}

    monkeypatch.setattr(converters.exchange, "copied_files", forgetful)


@pytest.mark.parametrize(
    ("plant", "code"), [(_weights_fail, 5), (_start_token_is_lost, 6)], ids=["disk", "start token"]
)
def test_a_failed_import_leaves_everything_as_it_was(
    plant: Callable[[Patch], None],
    code: int,
    folder: Path,
    tmp_path: Path,
    monkeypatch: Patch,
) -> None:
    own = tmp_path / "own" / "c.safetensors"
    own.parent.mkdir()
    (own.parent / "tokenizer.model").write_bytes(b"old tokenizer")
    own.write_bytes(b"old weights")
    plant(monkeypatch)
    assert run_command(app, ["import", str(folder), "-o", str(own), "--force"]) == code
    assert sorted(os.listdir(own.parent)) == ["c.safetensors", "tokenizer.model"]
    assert own.read_bytes() == b"old weights"
    assert (own.parent / "tokenizer.model").read_bytes() == b"old tokenizer"


def test_files_of_another_model_are_kept(folder: Path, tmp_path: Path) -> None:
    own = tmp_path / "own" / "c.safetensors"
    own.parent.mkdir()
    other = own.parent / "tokenizer.model"
    other.write_bytes(b"another")
    command = ["import", str(folder), "-o", str(own)]
    assert run_command(app, command) == 8
    assert os.listdir(own.parent) == ["tokenizer.model"]
    assert run_command(app, [*command, "--force"]) == 0
    # A template that this model lacks would become part of it.
    (own.parent / "chat_template.jinja").write_text("{{ messages }}")
    assert run_command(app, [*command, "--force"]) == 8


def test_into_the_folder_of_the_source_itself(folder: Path) -> None:
    generation = folder / "generation_config.json"
    generation.write_text('{"eos_token_id": [2, 5, 7]}')
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert run_command(app, ["import", str(folder), "-o", str(folder / "c.safetensors")]) == 0
    after = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert after.pop("c.safetensors")
    assert after == before


def test_folders_are_replaced_only_if_they_hold_a_model(folder: Path, tmp_path: Path) -> None:
    target = tmp_path / "out"
    target.mkdir()
    command = ["export-hf", str(folder), "-o", str(target)]
    assert run_command(app, command) == 0
    assert run_command(app, command) == 8
    (target / "config.json").write_text("{}")
    assert run_command(app, [*command, "--force"]) == 0
    assert json.loads((target / "config.json").read_text())["model_type"] == "llama"
    (target / "sub").mkdir()
    assert run_command(app, [*command, "--force"]) == 8
    home = tmp_path / "home"
    home.mkdir()
    (home / "diary.txt").write_text("mine")
    assert run_command(app, ["export-hf", str(folder), "-o", str(home), "--force"]) == 8
    assert (home / "diary.txt").read_text() == "mine"


def test_a_failed_export_leaves_nothing(folder: Path, tmp_path: Path) -> None:
    source = tmp_path / "own" / "c.safetensors"
    source.parent.mkdir()
    assert run_command(app, ["import", str(folder), "-o", str(source)]) == 0
    config = tmp_path / "c.json"
    config.write_text(json.dumps({"rope_amplitude": 1.5}))
    place = tmp_path / "place"
    place.mkdir()
    command = ["export-hf", str(source), "-o", str(place / "out"), "--config", str(config)]
    assert run_command(app, command) == 4
    assert os.listdir(place) == []


def test_a_checkpoint_without_a_tokenizer_is_imported(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("tokenizer.model", "tokenizer_config.json"):
        (folder / name).unlink()
    own = tmp_path / "own" / "c.safetensors"
    own.parent.mkdir()
    assert run_command(app, ["import", str(folder), "-o", str(own)]) == 0
    assert "no tokenizer lies beside" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["-o", "model.pt"], 2),
        (["-o", "c.safetensors", "--vocab-size", "100"], 2),
        (["-o", "c.safetensors", "--init-std", "-1"], 2),
        (["-o", "c.safetensors", "--layout", "unheard"], 2),
        (["-o", "no/such/folder/c.safetensors"], 8),
    ],
)
def test_usage(
    arguments: list[str], code: int, folder: Path, tmp_path: Path, monkeypatch: Patch
) -> None:
    place = tmp_path / "place"
    place.mkdir()
    monkeypatch.chdir(place)
    assert run_command(app, ["import", str(folder), *arguments]) == code
    assert os.listdir(place) == []
