"""Choose and open the tokenizer that lies beside a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from hermes.errors import BadInputError
from hermes.tokenizer.huggingface import HuggingFaceTokenizer, added_token, read_tokenizer_json
from hermes.tokenizer.interface import Tokenizer
from hermes.tokenizer.llama_json import as_tokenizer_json, has_json_form
from hermes.tokenizer.proto import CONTROL, Piece
from hermes.tokenizer.sentencepiece import SentencePieceTokenizer

JSON_NAME = "tokenizer.json"
MODEL_NAMES = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "spm.model")
COMPANIONS = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
)


def tokenizer_files(path: Path) -> dict[str, Path]:
    """Files of a tokenizer by their usual names: those in a folder, or a file and its companions.

    A single file may have any name: JSON counts as tokenizer.json, everything else as
    tokenizer.model.
    """
    if path.is_dir():
        names = (JSON_NAME, *MODEL_NAMES, *COMPANIONS)
        return {name: path / name for name in names if (path / name).is_file()}
    if not path.is_file():
        raise BadInputError(f"{path}: no such tokenizer file or folder")
    found = {name: path.parent / name for name in COMPANIONS if (path.parent / name).is_file()}
    found[JSON_NAME if path.suffix == ".json" else MODEL_NAMES[0]] = path
    return found


def open_tokenizer(files: Mapping[str, Path] | Path) -> Tokenizer:
    """The tokenizer among these files; tokenizer.json goes before a SentencePiece model.

    Both hold the same vocabulary where both exist, but only tokenizer.json has the tokens that
    were added later (chat markers). Added tokens listed beside a lone SentencePiece model become
    user-defined symbols of it. Where there is a chat template too, the model becomes a
    tokenizer.json whose special tokens count in text.

    Raises:
        BadInputError: nothing usable among the files, or a damaged file.
        UnsupportedModelError: a tokenizer.json the runtime cannot load.
    """
    if isinstance(files, Path):
        files = tokenizer_files(files)
    if JSON_NAME in files:
        path = files[JSON_NAME]
        return _completed(read_tokenizer_json(_read(path), str(path)), files)
    for name in MODEL_NAMES:
        if name in files:
            path = files[name]
            tokenizer = SentencePieceTokenizer(_read(path), str(path))
            return _for_chat(_with_added_tokens(tokenizer, files), files)
    raise BadInputError(
        f"no tokenizer among: {', '.join(sorted(files)) or 'no files'}",
        expected=f"{JSON_NAME} or a SentencePiece model ({', '.join(MODEL_NAMES)})",
        todo="name the file with --tokenizer, or write a tokenizer.json with save_pretrained",
    )


def read_json_object(path: Path) -> dict[str, object]:
    """A JSON object from a small settings file."""
    try:
        values = json.loads(_read(path).decode("utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise BadInputError(f"{path}: not readable as JSON: {error}") from error
    if not isinstance(values, dict):
        raise BadInputError(f"{path}: holds a {type(values).__name__}", expected="an object")
    return values


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise BadInputError(f"{path}: not readable: {error.strerror or error}") from error


def added_tokens(files: Mapping[str, Path]) -> dict[str, int]:
    """Tokens listed in added_tokens.json and tokenizer_config.json, with their ids."""
    found: dict[str, int] = {}
    if "added_tokens.json" in files:
        for text, token_id in read_json_object(files["added_tokens.json"]).items():
            if isinstance(token_id, int):
                found[text] = token_id
    if "tokenizer_config.json" in files:
        table = read_json_object(files["tokenizer_config.json"]).get("added_tokens_decoder")
        for key, entry in table.items() if isinstance(table, dict) else ():
            content = entry.get("content") if isinstance(entry, dict) else None
            if isinstance(content, str) and str(key).isdigit():
                found[content] = int(key)
    return found


def _completed(tokenizer: HuggingFaceTokenizer, files: Mapping[str, Path]) -> HuggingFaceTokenizer:
    """The tokenizer with the tokens that only its companions list, as transformers adds them."""
    listed = added_tokens(files)
    missing = sorted((i, text) for text, i in listed.items() if tokenizer.token_id(text) is None)
    if missing:
        section = tokenizer.settings.get("added_tokens")
        present = list(section) if isinstance(section, list) else []
        new = [added_token(i, Piece(text, 0.0, CONTROL)) for i, text in missing]
        settings = {**tokenizer.settings, "added_tokens": [*present, *new]}
        data = json.dumps(settings, ensure_ascii=False, separators=(",", ":")).encode("utf-8")
        tokenizer = read_tokenizer_json(data, tokenizer.origin)
    problems = [
        f"{text!r} is {i} beside the file, {tokenizer.token_id(text)} inside it"
        for text, i in listed.items()
        if tokenizer.token_id(text) != i
    ]
    if problems:
        raise BadInputError(
            f"{tokenizer.origin}: its companions list other ids",
            problems=problems,
            todo="write all tokenizer files again together, with save_pretrained",
        )
    return tokenizer


def _with_added_tokens(
    tokenizer: SentencePieceTokenizer, files: Mapping[str, Path]
) -> SentencePieceTokenizer:
    size = tokenizer.vocab_size
    added = sorted((token_id, text) for text, token_id in added_tokens(files).items())
    problems = [
        f"{text!r} is {token_id} beside the model, {tokenizer.piece(token_id)!r} inside it"
        for token_id, text in added
        if token_id < size and tokenizer.piece(token_id) != text
    ]
    new = [(token_id, text) for token_id, text in added if token_id >= size]
    wanted = list(range(size, size + len(new)))
    if [token_id for token_id, _ in new] != wanted:
        problems.append(
            f"added ids {[token_id for token_id, _ in new]} do not continue the model's {size} ids"
        )
    if problems:
        raise BadInputError(
            f"{tokenizer.origin}: the added tokens do not fit the SentencePiece model",
            problems=problems,
            todo="write a tokenizer.json with save_pretrained and use that",
        )
    return tokenizer.extended([text for _, text in new]) if new else tokenizer


def _for_chat(tokenizer: SentencePieceTokenizer, files: Mapping[str, Path]) -> Tokenizer:
    """For a model with a chat template, a form whose special tokens count in text."""
    settings: dict[str, object] = {}
    if "tokenizer_config.json" in files:
        settings = read_json_object(files["tokenizer_config.json"])
    if "chat_template.jinja" not in files and settings.get("chat_template") is None:
        return tokenizer
    if not has_json_form(tokenizer):
        return tokenizer
    # transformers' Llama tokenizer: only `"legacy": false` limits the prefix to the first text.
    return as_tokenizer_json(tokenizer, prefix_everywhere=settings.get("legacy") is not False)
