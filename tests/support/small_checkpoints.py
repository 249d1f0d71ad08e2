"""Complete small checkpoint folders: weights, config, tokenizer; and a recipe that suits them."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from tiny_bundle import SENTENCES
from tiny_llama import tiny_config, tiny_weights
from torch import Tensor

# Bars as in the shipped recipe, over what fits 64 slots.
RECIPE = """
rewrites = ["fold_norm_gains", "rotate_residual"]
[export]
context = 64
prefill = [1, 8]
[[quantization]]
tensors = "*"
weights = "int8"
granularity = "{granularity}"
[limits]
float_logits = 1e-3
kl_mean = 0.03
top1 = 0.9
positions = 256
"""

# No quantization; the same rewrites, so that one graph serves both recipes.
PLAIN = """
rewrites = ["fold_norm_gains", "rotate_residual"]
[export]
context = 64
prefill = [1, 8]
[limits]
float_logits = 1e-3
kl_mean = 1e-6
top1 = 0.999
positions = 64
"""


def train_tokenizer() -> bytes:
    """A SentencePiece model of exactly 128 pieces: unknown 0, start 1, end 2."""
    import sentencepiece

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(SENTENCES * 10),
        model_writer=model,
        vocab_size=128,
        model_type="bpe",
        minloglevel=2,
    )
    return model.getvalue()


def write_checkpoint(
    folder: Path, config: Mapping[str, Any], weights: Mapping[str, Tensor]
) -> Path:
    """A Hugging Face style folder with a SentencePiece tokenizer of 128 pieces."""
    folder.mkdir(parents=True, exist_ok=True)
    contiguous = {name: value.contiguous() for name, value in weights.items()}
    save_file(contiguous, folder / "model.safetensors")
    fields = {"model_type": "llama", "hidden_act": "silu", "bos_token_id": 1, "eos_token_id": 2}
    (folder / "config.json").write_text(json.dumps({**fields, **config}))
    (folder / "tokenizer.model").write_bytes(train_tokenizer())
    (folder / "tokenizer_config.json").write_text(json.dumps({"add_bos_token": True}))
    return folder


def write_recipe(path: Path, granularity: str = "channel") -> Path:
    """The small recipe as a file."""
    path.write_text(RECIPE.format(granularity=granularity))
    return path


def small_model(**changes: Any) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Config and weights of the shared fixture, untied."""
    config = tiny_config(tie_word_embeddings=False, **changes)
    return config, tiny_weights(config)
