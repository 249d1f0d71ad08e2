"""Which of the files beside a checkpoint becomes the tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import toy_tokenizers

from hermes.errors import BadInputError
from hermes.tokenizer import open_tokenizer, tokenizer_files

MODEL = toy_tokenizers.sentencepiece_model()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "tokenizer.model").write_bytes(MODEL)
    return tmp_path


def test_tokenizer_json_goes_first(folder: Path) -> None:
    assert open_tokenizer(folder).kind == "sentencepiece"
    (folder / "tokenizer.json").write_text(json.dumps(toy_tokenizers.byte_level_json()))
    assert open_tokenizer(folder).kind == "huggingface"


def test_a_single_file_may_have_any_name(folder: Path) -> None:
    renamed = (folder / "tokenizer.model").rename(folder / "my-spm.bin")
    (folder / "tokenizer_config.json").write_text("{}")
    assert open_tokenizer(renamed).kind == "sentencepiece"
    assert set(tokenizer_files(renamed)) == {"tokenizer.model", "tokenizer_config.json"}


def test_added_tokens_join_a_lone_sentencepiece_model(folder: Path) -> None:
    size = open_tokenizer(folder).vocab_size
    config = {
        "added_tokens_decoder": {
            "1": {"content": "<s>", "special": True},
            str(size): {"content": "<|user|>", "special": True},
            str(size + 1): {"content": "<|end|>", "special": True},
        }
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = open_tokenizer(folder)
    assert tokenizer.vocab_size == size + 2
    assert tokenizer.token_id("<|end|>") == size + 1
    assert tokenizer.encode("hello<|end|>")[-1] == size + 1


@pytest.mark.parametrize(
    ("added", "word"), [({"<x>": 5000}, "continue"), ({"<other>": 1}, "<other>")]
)
def test_added_tokens_that_do_not_fit(folder: Path, added: dict[str, int], word: str) -> None:
    (folder / "added_tokens.json").write_text(json.dumps(added))
    with pytest.raises(BadInputError, match=word):
        open_tokenizer(folder)


def test_tokens_that_only_the_companions_list(folder: Path) -> None:
    """transformers adds them when it loads the files, so training had them."""
    from transformers import PreTrainedTokenizerFast

    settings = toy_tokenizers.byte_level_json()
    size = len(settings["model"]["vocab"])
    (folder / "tokenizer.json").write_text(json.dumps(settings))
    entry = {"content": "<|tool|>", "special": True, "normalized": False}
    entry |= {"lstrip": False, "rstrip": False, "single_word": False}
    config = {"added_tokens_decoder": {str(size): entry}, "tokenizer_class": "TokenizersBackend"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    ours, oracle = open_tokenizer(folder), PreTrainedTokenizerFast.from_pretrained(str(folder))
    assert ours.vocab_size == size + 1
    assert ours.encode("a<|tool|>b") == oracle.encode("a<|tool|>b", add_special_tokens=False)
    assert size in ours.encode("a<|tool|>b")
    config["added_tokens_decoder"] = {str(size + 7): entry}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(BadInputError, match="tool"):
        open_tokenizer(folder)


def test_nothing_usable(tmp_path: Path) -> None:
    (tmp_path / "vocab.json").write_text("{}")
    with pytest.raises(BadInputError, match="no tokenizer"):
        open_tokenizer(tmp_path)
    with pytest.raises(BadInputError, match="no such"):
        open_tokenizer(tmp_path / "absent")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match=r"gone\.json"):
        open_tokenizer({"tokenizer.json": tmp_path / "gone.json"})


def test_opening_needs_neither_torch_nor_transformers(folder: Path) -> None:
    import subprocess
    import sys

    code = (
        "import sys; from pathlib import Path; from hermes.tokenizer import open_tokenizer; "
        f"open_tokenizer(Path({str(folder)!r})).encode('x'); "
        "print([m for m in ('torch', 'transformers', 'google.protobuf') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout.strip() == "[]", result.stderr
