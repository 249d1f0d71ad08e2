"""A SentencePiece model as tokenizer.json, against SentencePiece and transformers' Llama."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import sentencepiece
import toy_tokenizers

from hermes.checkpoint.source import Checkpoint
from hermes.config import HermesConfig
from hermes.tokenizer import open_tokenizer, prompt_contract
from hermes.tokenizer.huggingface import HuggingFaceTokenizer
from hermes.tokenizer.llama_json import as_tokenizer_json, has_json_form
from hermes.tokenizer.sentencepiece import SentencePieceTokenizer

MODEL = toy_tokenizers.sentencepiece_model(vocab_size=400)
TEMPLATE = "{% for m in messages %}{{ '<s>[' + m.role + '] ' + m.content + ' </s>' }}{% endfor %}"
TEXTS = toy_tokenizers.random_texts(400, seed=3)
CHATS = ["<s>[user] hello world </s><s>[user] a", "hello</s> the cat", "</s></s>x", "a<s>  b</s>"]


@pytest.mark.parametrize("prefix", [True, False])
@pytest.mark.parametrize("everywhere", [True, False])
def test_plain_text_has_sentencepieces_ids(prefix: bool, everywhere: bool) -> None:
    model = toy_tokenizers.sentencepiece_model(vocab_size=400, add_dummy_prefix=prefix)
    library = sentencepiece.SentencePieceProcessor(model_proto=model)
    ours = as_tokenizer_json(SentencePieceTokenizer(model, "toy"), prefix_everywhere=everywhere)
    assert ours.vocab_size == library.get_piece_size()
    assert (ours.begin_id, ours.end_id) == (1, 2)
    for text in TEXTS:
        if prefix and not everywhere and text.startswith(" "):
            # transformers' newer form adds no second space there, SentencePiece does.
            continue
        assert ours.encode(text) == library.encode(text), text
        assert ours.decode(ours.encode(text)) == library.decode(library.encode(text))


def test_chat_text_has_llama_cpps_ids() -> None:
    """Special tokens first, then every text between them by the SentencePiece library itself."""
    library = sentencepiece.SentencePieceProcessor(model_proto=MODEL)
    ours = as_tokenizer_json(SentencePieceTokenizer(MODEL, "toy"), prefix_everywhere=True)
    for text in [*CHATS, *TEXTS[:100]]:
        ids: list[int] = []
        for part in re.split(r"(</?s>)", text):
            special = {"<s>": [1], "</s>": [2]}
            ids.extend(special.get(part) or (library.encode(part) if part else []))
        assert ours.encode(text) == ids, text


def test_chat_text_has_transformers_ids() -> None:
    from transformers import LlamaTokenizer

    tokenizer = SentencePieceTokenizer(MODEL, "toy")
    ours = as_tokenizer_json(tokenizer, prefix_everywhere=False)
    merges = [tuple(pair) for pair in json.loads(ours.data)["model"]["merges"]]
    vocabulary = {piece.text: index for index, piece in enumerate(tokenizer.pieces)}
    oracle = LlamaTokenizer(vocab=vocabulary, merges=merges, legacy=False)
    for text in [*CHATS, *TEXTS[:100]]:
        assert ours.encode(text) == oracle.encode(text, add_special_tokens=False), text


def test_prefix_after_special_tokens_is_the_difference() -> None:
    tokenizer = SentencePieceTokenizer(MODEL, "toy")
    everywhere = as_tokenizer_json(tokenizer, prefix_everywhere=True)
    first = as_tokenizer_json(tokenizer, prefix_everywhere=False)
    assert everywhere.encode("</s>hello") != first.encode("</s>hello")
    assert 2 not in tokenizer.encode("</s>hello")


@pytest.mark.parametrize(
    ("options", "possible"),
    [
        ({}, True),
        ({"model_type": "unigram"}, False),
        ({"normalization_rule_name": "nmt_nfkc"}, False),
        ({"remove_extra_whitespaces": True}, False),
    ],
)
def test_which_models_have_an_equal_form(options: dict[str, object], possible: bool) -> None:
    model = toy_tokenizers.sentencepiece_model(**options)
    assert has_json_form(SentencePieceTokenizer(model, "toy")) == possible


def test_chat_model_with_only_a_sentencepiece_file(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(MODEL)
    assert open_tokenizer(tmp_path).kind == "sentencepiece"
    settings = {"chat_template": TEMPLATE, "bos_token": "<s>", "eos_token": "</s>"}
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps(settings))
    tokenizer = open_tokenizer(tmp_path)
    assert isinstance(tokenizer, HuggingFaceTokenizer)
    checkpoint = Checkpoint(tmp_path, {}, tokenizer_files={"tokenizer_config.json": config})
    table = HermesConfig(vocab_size=512, bos_token_id=None, eos_token_id=None)
    contract = prompt_contract(tokenizer, checkpoint, table)
    assert contract.stop_token_ids == (2,)
    assert contract.start_token_id is None
    config.write_text(json.dumps({**settings, "chat_template": TEMPLATE.replace("<s>", "")}))
    assert prompt_contract(tokenizer, checkpoint, table).start_token_id == 1
