"""Good files with a few bytes changed, dropped or added: read, or refused with a HermesError."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from mapped_logits import mapped
from safetensors.torch import save_file
from tiny_llama import tiny_config, tiny_weights

from hermes.errors import HermesError

CONFIG = tiny_config(tie_word_embeddings=False)
_EDGE = 3000


def write(kind: str, path: Path) -> None:
    weights = tiny_weights(CONFIG)
    if kind == "safetensors":
        save_file(weights, path)
    else:
        content = {"model": weights, "config": CONFIG, "optimizer": {"lr": [1, 2.5, None]}}
        torch.save(content, path, _use_new_zipfile_serialization=kind == "zip")


def mutated(data: bytes, draw: random.Random) -> bytes:
    """One to four changes near the beginning or the end, where the structure is."""
    changed = bytearray(data)
    for _ in range(draw.randint(1, 4)):
        start = draw.choice((0, max(0, len(changed) - _EDGE)))
        position = draw.randrange(start, min(len(changed), start + _EDGE))
        length = draw.randint(1, 8)
        kind = draw.random()
        if kind < 0.6:
            changed[position] = draw.randrange(256)
        elif kind < 0.8:
            del changed[position : position + length]
        else:
            changed[position:position] = draw.randbytes(length)
    return bytes(changed)


@pytest.mark.parametrize("kind", ["safetensors", "zip", "old"])
def test_mutated_files(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "model.pt"
    write(kind, path)
    good, draw, refused = path.read_bytes(), random.Random(7), 0
    for _ in range(250):
        path.write_bytes(mutated(good, draw))
        try:
            for tensor in mapped(path, CONFIG).weights.values():
                tensor.read()
        except HermesError:
            refused += 1
    assert refused > 100
