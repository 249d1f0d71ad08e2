"""The runtime's stream holds incomplete UTF-8 back, and following it needs no whole characters."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from table_model import write_table_model
from toy_tokenizers import byte_level_json

from converters.bundle import BundleSpec, write_bundle
from hermes.runners.child import run_in_child
from hermes.runners.flatbuffer import FlatbufferRunner
from hermes.runners.litert_lm import LiteRtLmRunner
from hermes.tokenizer import PromptContract
from hermes.tokenizer.huggingface import read_tokenizer_json
from hermes.verify.runtime import RuntimeData, check_runtime

TOKENIZER = read_tokenizer_json(json.dumps(byte_level_json()).encode(), "toy")
ANSWER = "\u00e9\u4e2d\U0001f60a."


def byte_tokens(text: str) -> list[int]:
    """One token per byte, so that every character but the last comes in pieces."""
    alphabet = byte_alphabet()
    ids = [TOKENIZER.token_id(alphabet[byte]) for byte in text.encode()]
    assert None not in ids
    return [token for token in ids if token is not None]


def byte_alphabet() -> dict[int, str]:
    """GPT-2's printable stand-ins for bytes: printable ones stand for themselves."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in kept]
    return {byte: chr(byte) for byte in kept} | {
        byte: chr(256 + index) for index, byte in enumerate(others)
    }


def write(folder: Path) -> tuple[Path, Path, str]:
    """A model that answers the prompt's last byte with `ANSWER`, and then stops."""
    chain = [*byte_tokens("a"), *byte_tokens(ANSWER)]
    stop = TOKENIZER.vocab_size - 1
    table = np.zeros((400, 400), np.float32)
    for token, following in zip(chain, [*chain[1:], stop], strict=True):
        table[token, following] = 10
    model = write_table_model(folder / "table.tflite", table)
    target = folder / "bytes.litertlm"
    write_bundle(BundleSpec(model, TOKENIZER, PromptContract(None, (stop,)), 64), target)
    return model, target, "a"


def test_no_chunk_ends_inside_a_character(tmp_path: Path) -> None:
    _, bundle, prompt = write(tmp_path)
    chunks = run_in_child("runtime_probe:stream", str(bundle), prompt)
    assert "".join(chunks) == ANSWER
    assert all("\ufffd" not in chunk for chunk in chunks)
    assert len([chunk for chunk in chunks if chunk]) == len(ANSWER)


def test_rung_7_follows_bytes(tmp_path: Path) -> None:
    model, bundle, prompt = write(tmp_path)
    data = RuntimeData((prompt,), None, 12, None, (TOKENIZER.vocab_size - 1,))
    with LiteRtLmRunner(bundle) as runtime, FlatbufferRunner(model) as runner:
        result = check_runtime(runtime, runner, data, 1e-3)
    assert all(check.passed for check in result.checks)
    assert result.transcript[0].answer.text == ANSWER
