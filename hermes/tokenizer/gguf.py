"""A tokenizer rebuilt from the metadata of a .gguf file.

The metadata keys are those of the GGUF specification (ggml-org/ggml, docs/gguf.md); what a
pre-tokenizer name means is defined by llama.cpp's vocabulary loader.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from hermes.errors import BadInputError, HermesError, UnsupportedModelError
from hermes.tokenizer.huggingface import MATCHED, added_token, read_tokenizer_json
from hermes.tokenizer.interface import Tokenizer
from hermes.tokenizer.llama_json import as_tokenizer_json, has_json_form
from hermes.tokenizer.proto import (
    BYTE,
    CONTROL,
    NORMAL,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    Piece,
    encode_bpe_model,
)
from hermes.tokenizer.sentencepiece import SentencePieceTokenizer

_ORIGIN = "tokenizer of the .gguf file"
_KINDS = (NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE)

_Json = dict[str, object]

_BYTE_LEVEL_GPT2: _Json = {
    "type": "ByteLevel",
    "add_prefix_space": False,
    "trim_offsets": True,
    "use_regex": True,
}
_BYTE_LEVEL_ONLY: _Json = {**_BYTE_LEVEL_GPT2, "use_regex": False}


def _split(pattern: str) -> _Json:
    return {
        "type": "Split",
        "pattern": {"Regex": pattern},
        "behavior": "Isolated",
        "invert": False,
    }


_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS_TO_SPACES = (
    r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DIGITS_ALONE: list[_Json] = [{"type": "Digits", "individual_digits": True}, _BYTE_LEVEL_GPT2]
_LLAMA3: list[_Json] = [_split(_CONTRACTIONS + _WORDS_TO_SPACES % "{1,3}"), _BYTE_LEVEL_ONLY]
_QWEN2: list[_Json] = [_split(_CONTRACTIONS + _WORDS_TO_SPACES % ""), _BYTE_LEVEL_ONLY]

# llama.cpp's rule for files that name no pre-tokenizer: punctuation, then GPT-2 words, then digits
# in threes.
_DEFAULT: list[_Json] = [
    _split(r"[\p{P}\$\+<=>\^~\|]+"),
    _split(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"),
    _split(r"\p{N}+"),
    _split(r"[0-9][0-9][0-9]"),
    _BYTE_LEVEL_ONLY,
]

_PRE_TOKENIZERS: dict[str, list[_Json]] = {
    "default": _DEFAULT,
    "gpt-2": [_BYTE_LEVEL_GPT2],
    "gpt2": [_BYTE_LEVEL_GPT2],
    "smollm": _DIGITS_ALONE,
    "starcoder": _DIGITS_ALONE,
    "refact": _DIGITS_ALONE,
    "codeshell": _DIGITS_ALONE,
    "command-r": _DIGITS_ALONE,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama-bpe": _LLAMA3,
    "qwen2": _QWEN2,
}
# Llama 3 takes a whole word that is in the vocabulary without asking the merges.
_WHOLE_WORDS_FIRST = {"llama3", "llama-v3", "llama-bpe"}
# Qwen2's own tokenizer composes characters first; llama.cpp leaves that out.
_COMPOSED = {"qwen2"}


def tokenizer_from_gguf(metadata: Mapping[str, object]) -> Tokenizer:
    """The tokenizer that the metadata `tokenizer.ggml.*` describes.

    Args:
        metadata: GGUF keys to Python values (lists for arrays).

    Raises:
        BadInputError: keys missing or contradicting each other; all of them in one message.
        UnsupportedModelError: another tokenizer family, or an unknown pre-tokenizer.
    """
    model = metadata.get("tokenizer.ggml.model")
    pieces = _read_pieces(metadata)
    if model == "gpt2":
        return _byte_level_bpe(metadata, pieces)
    if model == "llama":
        return _sentencepiece(metadata, pieces)
    raise UnsupportedModelError(
        f"{_ORIGIN}: tokenizer.ggml.model is {model!r}",
        expected="gpt2 (byte-level BPE) or llama (SentencePiece)",
        todo="give the original tokenizer file with --tokenizer",
    )


def _read_pieces(metadata: Mapping[str, object]) -> list[Piece]:
    tokens = metadata.get("tokenizer.ggml.tokens")
    problems = []
    if not isinstance(tokens, Sequence) or isinstance(tokens, (str, bytes)) or not tokens:
        raise BadInputError(
            f"{_ORIGIN}: tokenizer.ggml.tokens is missing or empty",
            expected="a list of token spellings",
            todo="give the original tokenizer file with --tokenizer",
        )
    columns: list[Sequence[object]] = []
    for key, default in (("token_type", NORMAL), ("scores", 0.0)):
        column = metadata.get(f"tokenizer.ggml.{key}")
        if column is None:
            column = [default] * len(tokens)
        if not isinstance(column, Sequence) or len(column) != len(tokens):
            length = len(column) if isinstance(column, Sequence) else type(column).__name__
            problems.append(f"tokenizer.ggml.{key} has {length} entries, tokens {len(tokens)}")
            column = [default] * len(tokens)
        columns.append(column)
    pieces = []
    for index, (text, kind, score) in enumerate(zip(tokens, *columns, strict=True)):
        if not isinstance(text, str):
            problems.append(f"token {index} is a {type(text).__name__}, not text")
        elif kind not in _KINDS:
            problems.append(f"token {index} ({text!r}) has type {kind!r}, known are {_KINDS}")
        elif not isinstance(score, (int, float)):
            problems.append(f"token {index} ({text!r}) has score {score!r}")
        else:
            pieces.append(Piece(text, float(score), int(kind)))
    _refuse(problems)
    return pieces


def _refuse(problems: list[str]) -> None:
    if problems:
        raise BadInputError(
            f"{_ORIGIN}: damaged metadata ({len(problems)} problem(s))",
            problems=problems[:20],
            todo="convert the model to GGUF again, or give the original tokenizer file",
        )


def _byte_level_bpe(metadata: Mapping[str, object], pieces: list[Piece]) -> Tokenizer:
    name = str(metadata.get("tokenizer.ggml.pre") or "default")
    if name not in _PRE_TOKENIZERS:
        raise UnsupportedModelError(
            f"{_ORIGIN}: unknown pre-tokenizer tokenizer.ggml.pre = {name!r}",
            expected=f"one of {', '.join(sorted(_PRE_TOKENIZERS))}",
            todo="give the original tokenizer.json with --tokenizer",
        )
    merges = _read_merges(metadata, {piece.text for piece in pieces})
    # Converters fill a padded table up with unused tokens; those are not the tokenizer's.
    while pieces and pieces[-1].kind == UNUSED:
        pieces = pieces[:-1]
    texts = [piece.text for piece in pieces]
    if len(set(texts)) != len(texts):
        seen: set[str] = set()
        doubled = [text for text in texts if text in seen or seen.add(text)]  # type: ignore[func-returns-value]
        _refuse([f"token {text!r} appears twice" for text in doubled])
    settings = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [added_token(i, p) for i, p in enumerate(pieces) if p.kind in MATCHED],
        "normalizer": {"type": "NFC"} if name in _COMPOSED else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": _PRE_TOKENIZERS[name]},
        "post_processor": None,
        "decoder": _BYTE_LEVEL_GPT2,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": name in _WHOLE_WORDS_FIRST,
            "vocab": {text: index for index, text in enumerate(texts)},
            "merges": merges,
        },
    }
    data = json.dumps(settings, ensure_ascii=False, separators=(",", ":"))
    return read_tokenizer_json(data.encode("utf-8", "surrogatepass"), _ORIGIN)


def _read_merges(metadata: Mapping[str, object], known: set[str]) -> list[list[str]]:
    merges = metadata.get("tokenizer.ggml.merges")
    if not isinstance(merges, Sequence) or isinstance(merges, (str, bytes)):
        raise BadInputError(
            f"{_ORIGIN}: tokenizer.ggml.merges is missing",
            expected="the merge list of a byte-level BPE",
            todo="give the original tokenizer.json with --tokenizer",
        )
    pairs, problems = [], []
    for index, merge in enumerate(merges):
        # Spaces are spelled as U+0120 inside pieces, so the first space separates.
        pair = merge.split(" ", 1) if isinstance(merge, str) else []
        missing = [part for part in (*pair, "".join(pair)) if part not in known]
        if len(pair) != 2 or missing:
            problems.append(f"merge {index} is {merge!r}; not in the vocabulary: {missing}")
        else:
            pairs.append(pair)
    _refuse(problems)
    return pairs


def _sentencepiece(metadata: Mapping[str, object], pieces: list[Piece]) -> Tokenizer:
    special: dict[str, int] = {}
    keys = {"unk": "unknown", "bos": "bos", "eos": "eos", "pad": "padding"}
    for name, key in keys.items():
        value = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if isinstance(value, int) and 0 <= value < len(pieces):
            special[name] = value
    unknown = [index for index, piece in enumerate(pieces) if piece.kind == UNKNOWN]
    if len(unknown) != 1:
        # The library demands exactly one; converters of other projects leave the kind out.
        unknown = [special["unk"]] if "unk" in special else unknown
        if len(unknown) != 1:
            _refuse([f"{len(unknown)} tokens are of the kind unknown; SentencePiece needs one"])
        pieces = [
            Piece(piece.text, piece.score, UNKNOWN if index == unknown[0] else piece.kind)
            for index, piece in enumerate(pieces)
        ]
    special["unk"] = unknown[0]
    data = encode_bpe_model(
        pieces,
        special_ids=special,
        add_dummy_prefix=metadata.get("tokenizer.ggml.add_space_prefix", True) is not False,
        remove_extra_whitespaces=metadata.get("tokenizer.ggml.remove_extra_whitespaces") is True,
    )
    try:
        tokenizer = SentencePieceTokenizer(data, _ORIGIN)
    except HermesError as error:
        raise BadInputError(
            f"{_ORIGIN}: the SentencePiece model rebuilt from it does not load",
            problems=[error.found],
            todo="give the original tokenizer.model with --tokenizer",
        ) from error
    if "tokenizer.chat_template" in metadata and has_json_form(tokenizer):
        # llama.cpp puts the space before the text behind every special token too.
        return as_tokenizer_json(tokenizer, prefix_everywhere=True)
    return tokenizer
