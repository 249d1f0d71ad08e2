"""Tokenizers rebuilt from GGUF metadata, against BPE and SentencePiece themselves."""

from __future__ import annotations

from typing import Any

import pytest
import sentencepiece
import toy_tokenizers
from reference_bpe import ReferenceBpe
from tokenizers import pre_tokenizers

from hermes.errors import BadInputError, UnsupportedModelError
from hermes.tokenizer import tokenizer_from_gguf

TEXTS = toy_tokenizers.random_texts(400)
DIGITS = pre_tokenizers.Sequence(
    [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
)
# The published patterns of the Llama 3 and Qwen2 tokenizers.
_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _TAIL
QWEN2 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _TAIL

BPE = toy_tokenizers.byte_level_json()
BPE_DIGITS = toy_tokenizers.byte_level_json(pre_tokenizer=DIGITS)


def reference(metadata: dict[str, Any], **options: Any) -> ReferenceBpe:
    tokens = metadata["tokenizer.ggml.tokens"]
    merges = metadata["tokenizer.ggml.merges"]
    return ReferenceBpe(tokens, merges, toy_tokenizers.SPECIAL, **options)


@pytest.mark.parametrize(
    ("pre", "settings", "options"),
    [
        ("gpt-2", BPE, {}),
        ("smollm", BPE_DIGITS, {"digits_alone": True}),
        ("starcoder", BPE_DIGITS, {"digits_alone": True}),
        ("llama-bpe", BPE, {"words": LLAMA3, "whole_words": True}),
        ("llama3", BPE, {"words": LLAMA3, "whole_words": True}),
    ],
)
def test_ids_equal_bpe_from_its_definition(
    pre: str, settings: dict[str, Any], options: dict[str, Any]
) -> None:
    metadata = toy_tokenizers.gguf_metadata(settings, pre)
    ours, oracle = tokenizer_from_gguf(metadata), reference(metadata, **options)
    for text in TEXTS:
        ids = ours.encode(text)
        assert ids == oracle.encode(text), text
        assert ours.decode(ids) == text


def test_qwen2_composes_characters_first() -> None:
    import unicodedata

    metadata = toy_tokenizers.gguf_metadata(BPE, "qwen2")
    ours, oracle = tokenizer_from_gguf(metadata), reference(metadata, words=QWEN2)
    for text in TEXTS:
        assert ours.encode(text) == oracle.encode(unicodedata.normalize("NFC", text)), text
    assert ours.encode("e\u0301") == ours.encode("\u00e9")


def test_default_pre_tokenizer_splits_punctuation_words_and_digits() -> None:
    metadata = toy_tokenizers.gguf_metadata(BPE, "default")
    del metadata["tokenizer.ggml.pre"]
    ours = tokenizer_from_gguf(metadata)
    # With every merge allowed inside a word only, a split shows as a token border.
    cuts = {"1234567": ["123", "456", "7"], "it's": ["it", "'", "s"], "a+b": ["a", "+", "b"]}
    for text, parts in cuts.items():
        assert ours.encode(text) == [i for part in parts for i in ours.encode(part)]
    for text in TEXTS:
        assert ours.decode(ours.encode(text)) == text


def test_wrong_pre_tokenizer_shows() -> None:
    """The comparison above can fail: digits split alone are not GPT-2's."""
    metadata = toy_tokenizers.gguf_metadata(BPE_DIGITS, "gpt-2")
    ours, oracle = tokenizer_from_gguf(metadata), reference(metadata, digits_alone=True)
    assert any(ours.encode(text) != oracle.encode(text) for text in TEXTS)


def test_unknown_pre_tokenizer_is_refused_by_name() -> None:
    metadata = toy_tokenizers.gguf_metadata(BPE, "martian")
    with pytest.raises(UnsupportedModelError, match="martian") as caught:
        tokenizer_from_gguf(metadata)
    assert "smollm" in str(caught.value)


def test_unused_tokens_of_a_padded_table_are_left_out() -> None:
    metadata = toy_tokenizers.gguf_metadata(BPE, "gpt-2")
    size = len(metadata["tokenizer.ggml.tokens"])
    metadata["tokenizer.ggml.tokens"] += [f"[PAD{size + i}]" for i in range(5)]
    metadata["tokenizer.ggml.token_type"] += [5] * 5
    assert tokenizer_from_gguf(metadata).vocab_size == size


def test_user_defined_tokens_match_in_text_and_stay_visible() -> None:
    metadata = toy_tokenizers.gguf_metadata(BPE, "gpt-2")
    metadata["tokenizer.ggml.tokens"].append("<tool call>")
    metadata["tokenizer.ggml.token_type"].append(4)
    ours = tokenizer_from_gguf(metadata)
    last = len(metadata["tokenizer.ggml.tokens"]) - 1
    assert ours.encode("x<tool call>")[-1] == last
    assert ours.decode([last]) == "<tool call>"


def damage(key: str, value: object) -> dict[str, Any]:
    metadata = toy_tokenizers.gguf_metadata(BPE, "gpt-2")
    if value is None:
        del metadata[f"tokenizer.ggml.{key}"]
    else:
        metadata[f"tokenizer.ggml.{key}"] = value
    return metadata


@pytest.mark.parametrize(
    ("metadata", "word"),
    [
        (damage("tokens", None), "tokens"),
        (damage("tokens", []), "tokens"),
        (damage("tokens", ["a", 3]), "token_type"),
        (damage("token_type", [1, 2]), "token_type"),
        (damage("merges", None), "merges"),
        (damage("merges", ["t h", "nonsense"]), "nonsense"),
        (damage("merges", ["\u0416 \u0416"]), "vocabulary"),
        (damage("scores", [0.0]), "scores"),
    ],
)
def test_damaged_metadata_is_refused(metadata: dict[str, Any], word: str) -> None:
    with pytest.raises(BadInputError, match=word):
        tokenizer_from_gguf(metadata)


def test_all_problems_come_at_once() -> None:
    metadata = damage("token_type", [99] * len(BPE["model"]["vocab"]))
    metadata["tokenizer.ggml.tokens"][5] = metadata["tokenizer.ggml.tokens"][6]
    with pytest.raises(BadInputError) as caught:
        tokenizer_from_gguf(metadata)
    assert len(caught.value.problems) > 5


def test_duplicate_token_is_refused() -> None:
    metadata = toy_tokenizers.gguf_metadata(BPE, "gpt-2")
    metadata["tokenizer.ggml.tokens"][5] = metadata["tokenizer.ggml.tokens"][6]
    with pytest.raises(BadInputError, match=r"twice|vocabulary"):
        tokenizer_from_gguf(metadata)


def test_other_families_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="rwkv"):
        tokenizer_from_gguf(damage("model", "rwkv"))


def sentencepiece_metadata(model: bytes) -> dict[str, Any]:
    """What a converter writes for a SentencePiece model, read with the library."""
    library = sentencepiece.SentencePieceProcessor(model_proto=model)
    ids = range(library.get_piece_size())
    kinds = [
        2
        if library.is_unknown(i)
        else 3
        if library.is_control(i)
        else 6
        if library.is_byte(i)
        else 4
        if library.id_to_piece(i) == "<turn>"
        else 1
        for i in ids
    ]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [library.id_to_piece(i) for i in ids],
        "tokenizer.ggml.scores": [library.get_score(i) for i in ids],
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_rebuilt_with_scores_and_kinds(prefix: bool) -> None:
    model = toy_tokenizers.sentencepiece_model(
        add_dummy_prefix=prefix, user_defined_symbols=["<turn>"]
    )
    library = sentencepiece.SentencePieceProcessor(model_proto=model)
    metadata = sentencepiece_metadata(model)
    metadata["tokenizer.ggml.add_space_prefix"] = prefix
    ours = tokenizer_from_gguf(metadata)
    assert ours.kind == "sentencepiece"
    assert (ours.begin_id, ours.end_id) == (1, 2)
    for text in [*TEXTS, "<turn>hello", "caf\u00e9 \U0001f60a"]:
        assert ours.encode(text) == library.encode(text), text
        assert ours.decode(ours.encode(text)) == library.decode(library.encode(text))


def test_sentencepiece_without_unknown_token_is_refused() -> None:
    metadata = sentencepiece_metadata(toy_tokenizers.sentencepiece_model())
    metadata["tokenizer.ggml.token_type"][0] = 1
    del metadata["tokenizer.ggml.unknown_token_id"]
    with pytest.raises(BadInputError, match="unknown"):
        tokenizer_from_gguf(metadata)


def test_sentencepiece_chat_model_matches_its_special_tokens() -> None:
    metadata = sentencepiece_metadata(toy_tokenizers.sentencepiece_model())
    plain = tokenizer_from_gguf(metadata)
    chat = tokenizer_from_gguf({**metadata, "tokenizer.chat_template": "{{ messages }}"})
    assert (plain.kind, chat.kind) == ("sentencepiece", "huggingface")
    assert plain.encode("hello world") == chat.encode("hello world")
    assert chat.encode("hello</s>")[-1] == 2
    assert 2 not in plain.encode("hello</s>")
