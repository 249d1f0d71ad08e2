"""Start and stop tokens from everything that lies beside a model."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import chat_templates
import pytest
import toy_tokenizers

from hermes.config import HermesConfig
from hermes.errors import BadInputError, UnsupportedModelError
from hermes.tokenizer import prompt_contract, suppressed_tokens, tokenizer_from_gguf
from hermes.tokenizer.huggingface import HuggingFaceTokenizer, read_tokenizer_json
from hermes.tokenizer.sentencepiece import SentencePieceTokenizer

CONFIG = HermesConfig(vocab_size=512, bos_token_id=None, eos_token_id=None)


@dataclass
class Sources:
    """What a checkpoint says about prompts."""

    config: dict[str, object] | None = None
    generation_config: dict[str, object] | None = None
    tokenizer_files: dict[str, Path] = field(default_factory=dict)
    gguf_metadata: dict[str, object] | None = None


def sources(folder: Path, tokenizer_config: dict[str, object] | None, **rest: Any) -> Sources:
    found = Sources(**rest)
    if tokenizer_config is not None:
        path = folder / "tokenizer_config.json"
        path.write_text(json.dumps(tokenizer_config))
        found.tokenizer_files["tokenizer_config.json"] = path
    return found


def json_tokenizer(first: str | None = None) -> HuggingFaceTokenizer:
    settings = toy_tokenizers.byte_level_json()
    if first is not None:
        pieces = [
            {"SpecialToken": {"id": first, "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ]
        ids = {"id": first, "ids": [settings["model"]["vocab"][first]], "tokens": [first]}
        settings["post_processor"] = {
            "type": "TemplateProcessing",
            "single": pieces,
            "pair": [*pieces, {"Sequence": {"id": "B", "type_id": 0}}],
            "special_tokens": {first: ids},
        }
    return read_tokenizer_json(json.dumps(settings).encode(), "toy")


PLAIN = json_tokenizer()
MODEL = SentencePieceTokenizer(toy_tokenizers.sentencepiece_model(), "toy.model")
EOS = {"eos_token": "<|im_end|>"}


@pytest.mark.parametrize(
    ("generation", "stops"),
    [
        ({"eos_token_id": [1, 2]}, (1, 2)),
        ({"eos_token_id": 1}, (1, 2)),
        ({"eos_token_id": None}, (2,)),
        ({}, (2,)),
        (None, (2,)),
    ],
)
def test_b33_union_of_the_enders(
    tmp_path: Path, generation: dict[str, object] | None, stops: tuple[int, ...]
) -> None:
    """The tokenizer's end token is 2, as in the case."""
    found = sources(tmp_path, EOS, generation_config=generation)
    contract = prompt_contract(PLAIN, found, CONFIG)
    assert contract.stop_token_ids == stops
    assert contract.stop_sources[2][-1] == "tokenizer"


def test_b33_id_outside_the_table_is_refused(tmp_path: Path) -> None:
    found = sources(tmp_path, EOS, generation_config={"eos_token_id": [1, 999]})
    with pytest.raises(BadInputError, match="999") as caught:
        prompt_contract(PLAIN, found, CONFIG)
    assert "generation_config.json" in str(caught.value)


def test_every_source_of_an_ender_counts(tmp_path: Path) -> None:
    """generation_config, config, tokenizer and what the template prints after an answer."""
    tokenizer_config = {"eos_token": "<|endoftext|>", "chat_template": chat_templates.CHATML}
    found = sources(
        tmp_path,
        tokenizer_config,
        config={"eos_token_id": [5]},
        generation_config={"eos_token_id": 6},
    )
    contract = prompt_contract(PLAIN, found, HermesConfig(vocab_size=512, eos_token_id=7))
    assert contract.stop_token_ids == (0, 2, 5, 6, 7)
    assert contract.stop_sources == {
        0: ["tokenizer"],
        2: ["chat template"],
        5: ["config"],
        6: ["generation_config.json"],
        7: ["config"],
    }


@pytest.mark.parametrize("value", [True, "2", [[1]], -1, [None], 2.0, 511])
def test_values_that_are_no_token(tmp_path: Path, value: object) -> None:
    found = sources(tmp_path, EOS, generation_config={"eos_token_id": value})
    with pytest.raises(BadInputError, match="stop tokens"):
        prompt_contract(PLAIN, found, CONFIG)


def test_no_ender_at_all(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match="no stop token"):
        prompt_contract(PLAIN, sources(tmp_path, None), CONFIG)


def test_ender_the_tokenizer_does_not_know(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match="</nowhere>"):
        prompt_contract(PLAIN, sources(tmp_path, {"eos_token": "</nowhere>"}), CONFIG)


def test_sentencepiece_names_its_own_end(tmp_path: Path) -> None:
    contract = prompt_contract(MODEL, sources(tmp_path, None), CONFIG)
    assert contract.stop_token_ids == (2,)
    assert contract.start_token_id == 1


@pytest.mark.parametrize(
    ("first", "tokenizer_config", "start"),
    [
        (None, {}, None),
        (None, {"add_bos_token": False, "bos_token": "<|im_start|>"}, None),
        (None, {"add_bos_token": True, "bos_token": "<|im_start|>"}, 1),
        (None, {"bos_token": "<|im_start|>"}, None),
        ("<|endoftext|>", {}, 0),
        ("<|endoftext|>", {"add_bos_token": True, "bos_token": "<|endoftext|>"}, 0),
    ],
)
def test_start_token(
    tmp_path: Path, first: str | None, tokenizer_config: dict[str, object], start: int | None
) -> None:
    found = sources(tmp_path, {**EOS, **tokenizer_config})
    assert prompt_contract(json_tokenizer(first), found, CONFIG).start_token_id == start


@pytest.mark.parametrize(
    ("first", "tokenizer_config", "rest"),
    [
        ("<|endoftext|>", {"add_bos_token": False}, {}),
        ("<|endoftext|>", {"add_bos_token": True, "bos_token": "<|im_start|>"}, {}),
        (None, {"add_bos_token": True}, {}),
        (
            None,
            {"add_bos_token": True, "bos_token": "<|im_start|>"},
            {"generation_config": {"add_bos_token": False}},
        ),
    ],
)
def test_contradicting_start_tokens_are_refused(
    tmp_path: Path, first: str | None, tokenizer_config: dict[str, object], rest: dict[str, object]
) -> None:
    found = sources(tmp_path, {**EOS, **tokenizer_config}, **rest)
    with pytest.raises(BadInputError):
        prompt_contract(json_tokenizer(first), found, CONFIG)


def test_explicit_flag_overrules_the_sentencepiece_convention(tmp_path: Path) -> None:
    found = sources(tmp_path, None, generation_config={"add_bos_token": False})
    assert prompt_contract(MODEL, found, CONFIG).start_token_id is None


def test_sentencepiece_without_begin_symbol_is_fed_without_one(tmp_path: Path) -> None:
    model = SentencePieceTokenizer(
        toy_tokenizers.sentencepiece_model(bos_id=-1, eos_id=1), "toy.model"
    )
    found = sources(tmp_path, None, config={"bos_token_id": 1})
    assert prompt_contract(model, found, CONFIG).start_token_id is None


def test_template_that_prints_the_start_token_itself(tmp_path: Path) -> None:
    """The doubled start token: garbage even from the float model."""
    template = "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}"
    tokenizer_config = {**EOS, "bos_token": "<|endoftext|>", "chat_template": template}
    found = sources(tmp_path, tokenizer_config)
    contract = prompt_contract(json_tokenizer("<|endoftext|>"), found, CONFIG)
    assert contract.start_token_id is None
    assert any("itself" in note for note in contract.notes)
    assert contract.chat_template is not None
    without = {**tokenizer_config, "chat_template": "{{ messages[0].content }}"}
    found = sources(tmp_path, without)
    assert prompt_contract(json_tokenizer("<|endoftext|>"), found, CONFIG).start_token_id == 0


def test_template_whose_special_tokens_are_never_matched(tmp_path: Path) -> None:
    """SentencePiece control symbols are text for the library: `</s>` would become letters."""
    template = "{{ messages[0].content }}</s>"
    with pytest.raises(UnsupportedModelError, match="</s>"):
        prompt_contract(MODEL, sources(tmp_path, {"chat_template": template}), CONFIG)


def gguf(pre: str = "smollm", **changes: object) -> dict[str, object]:
    metadata = toy_tokenizers.gguf_metadata(toy_tokenizers.byte_level_json(), pre)
    metadata["tokenizer.chat_template"] = chat_templates.CHATML
    return {**metadata, **{f"tokenizer.ggml.{key}": value for key, value in changes.items()}}


def test_gguf_chat_model_that_begins_with_im_start() -> None:
    """SmolLM2's shape: bos is <|im_start|>, which the template prints; it must not be doubled."""
    for flag in ({}, {"add_bos_token": True}):
        metadata = gguf(**flag)
        tokenizer = tokenizer_from_gguf(metadata)
        contract = prompt_contract(tokenizer, Sources(gguf_metadata=metadata), CONFIG)
        assert contract.start_token_id is None
        assert contract.stop_token_ids == (2,)
        assert contract.original_template == chat_templates.CHATML


def test_gguf_end_of_turn_tokens() -> None:
    metadata = gguf(eos_token_id=0, eot_token_id=2, eom_token_id=1)
    tokenizer = tokenizer_from_gguf(metadata)
    contract = prompt_contract(tokenizer, Sources(gguf_metadata=metadata), CONFIG)
    assert contract.stop_token_ids == (0, 1, 2)


def test_gguf_llama3_convention() -> None:
    metadata = gguf("llama-bpe", bos_token_id=0)
    del metadata["tokenizer.ggml.add_bos_token"], metadata["tokenizer.chat_template"]
    tokenizer = tokenizer_from_gguf(metadata)
    contract = prompt_contract(tokenizer, Sources(gguf_metadata=metadata), CONFIG)
    assert contract.start_token_id == 0


def test_b26_rows_without_a_token_are_suppressed() -> None:
    size = PLAIN.vocab_size
    assert suppressed_tokens(PLAIN, HermesConfig(vocab_size=size)) == ()
    padded = HermesConfig(vocab_size=size + 28)
    assert suppressed_tokens(PLAIN, padded) == tuple(range(size, size + 28))


def test_b26_an_added_token_keeps_its_row() -> None:
    settings = toy_tokenizers.byte_level_json()
    settings["model"]["vocab"]["<added>"] = 420
    added = {**settings["added_tokens"][0], "id": 420, "content": "<added>"}
    settings["added_tokens"].append(added)
    tokenizer = read_tokenizer_json(json.dumps(settings).encode(), "toy")
    assert tokenizer.token_id("<added>") == 420
    assert suppressed_tokens(tokenizer, HermesConfig(vocab_size=448)) == tuple(range(421, 448))


def test_tokenizer_larger_than_the_table(tmp_path: Path) -> None:
    size = PLAIN.vocab_size
    config = HermesConfig(vocab_size=size - 2)
    with pytest.raises(BadInputError) as caught:
        prompt_contract(PLAIN, sources(tmp_path, EOS), config)
    message = str(caught.value)
    assert str(size - 1) in message
    assert str(size - 2) in message
    assert PLAIN.piece(size - 1) in message
