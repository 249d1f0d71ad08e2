"""Small tokenizers trained on the spot."""

from __future__ import annotations

import io
import json
import random
from typing import Any

CORPUS = [
    "the cat sat on the mat",
    "hello world, don't you'll see 1234 and 56",
    "Bonjour, \u00e7a va?",
    "a  b   c\n\nd\te",
] * 20
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def byte_level_json(vocab_size: int = 400, pre_tokenizer: Any = None) -> dict[str, Any]:
    """A tokenizer.json with byte-level BPE; ids 0 to 2 are SPECIAL."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizer or pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL,
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    settings: dict[str, Any] = json.loads(tokenizer.to_str())
    return settings


def gguf_metadata(settings: dict[str, Any], pre: str) -> dict[str, Any]:
    """What a converter writes into a .gguf for this tokenizer.json."""
    vocabulary = settings["model"]["vocab"]
    tokens = sorted(vocabulary, key=lambda text: vocabulary[text])
    special = {token["content"] for token in settings["added_tokens"]}
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if text in special else 1 for text in tokens],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in settings["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
    }


def sentencepiece_model(vocab_size: int = 320, **options: Any) -> bytes:
    """A SentencePiece BPE model with byte fallback, `<s>` = 1 and `</s>` = 2."""
    import sentencepiece

    model = io.BytesIO()
    settings = {
        "model_type": "bpe",
        "byte_fallback": True,
        "character_coverage": 1.0,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "hard_vocab_limit": False,
        "minloglevel": 2,
        **options,
    }
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS), model_writer=model, vocab_size=vocab_size, **settings
    )
    return model.getvalue()


def random_texts(count: int, seed: int = 0) -> list[str]:
    """Text of words, digits, accents, emoji, CJK, combining marks and runs of white space."""
    pool = [chr(code) for code in (*range(32, 127), *range(160, 0x180))]
    pool += [*("\u4e2d\u6587\u0301\u200d\u2028\u3000\u00bd\u0661\U0001f60a"), "\n", "\t", "\r\n"]
    pool += (
        [" "] * 40 + list("0123456789") * 2 + ["the ", "cat", "hello", "'ll", "'s"] * 4 + SPECIAL
    )
    choose = random.Random(seed)
    return ["".join(choose.choices(pool, k=choose.randint(1, 40))) for _ in range(count)]
