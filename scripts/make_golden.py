"""Write golden logits of a PyTorch model for `hermes convert --golden`: five lines to copy.

Put `make_golden` into your training code and call it with your trained model; the file that comes
out lets rung 1 compare Hermes' reference with what your own code computes.
"""

from __future__ import annotations

from collections.abc import Callable

import torch


def make_golden(model: Callable[[torch.Tensor], torch.Tensor], ids: list[int], path: str) -> None:
    """Save ids [1, T] and the logits [1, T, vocab] that `model(ids)` gives for them, as float32.

    Args:
        model: in evaluation mode; wrap it if it returns more than the logits.
        ids: 32 or more tokens of real text, beginning as in training.
        path: ends in `.pt`.
    """
    with torch.no_grad():
        batch = torch.tensor([ids])
        logits = model(batch).float().cpu()
    torch.save({"input_ids": batch, "logits": logits}, path)
