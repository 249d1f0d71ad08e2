"""One traced flatbuffer and one bundle for all runner tests."""

from __future__ import annotations

from pathlib import Path

import pytest
from static_llama import write_flatbuffer
from tiny_bundle import write_bundle
from tiny_llama import tiny_config, tiny_weights


@pytest.fixture(scope="session")
def tiny_flatbuffer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The untied tiny model: context 64, prefill 8."""
    config = tiny_config(tie_word_embeddings=False)
    target = tmp_path_factory.mktemp("flatbuffer") / "tiny.tflite"
    return write_flatbuffer(tiny_weights(config), config, target, context=64, prefill=(8,))


@pytest.fixture(scope="session")
def tiny_bundle(tiny_flatbuffer: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model with a tokenizer and a chat template that the runtime can render."""
    return write_bundle(tiny_flatbuffer, tmp_path_factory.mktemp("bundle") / "tiny.litertlm")


@pytest.fixture(scope="session")
def slow_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with a cache of 8,192 slots, which every step reads whole."""
    folder = tmp_path_factory.mktemp("slow")
    config = tiny_config(tie_word_embeddings=False)
    weights = tiny_weights(config)
    flatbuffer = write_flatbuffer(weights, config, folder / "x.tflite", context=8192, prefill=(8,))
    return write_bundle(flatbuffer, folder / "slow.litertlm")
