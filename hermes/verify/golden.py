"""Rung 1: the reference computes what the user's own training code computed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hermes.errors import BadInputError
from hermes.report.check import Check, at_most, measured
from hermes.runners.interface import Scorer
from hermes.verify.metrics import Row, compare

_IDS, _LOGITS = "input_ids", "logits"
# Distance of neighbouring numbers relative to their size.
_SPACING = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}


@dataclass(frozen=True)
class Golden:
    """Ids and logits that the training code wrote.

    Attributes:
        ids: one list per text.
        logits: [T, V] per text, as float32 or float64.
        stored: the element type in the file; its rounding is not held against the model.
    """

    ids: tuple[list[int], ...]
    logits: tuple[Row, ...]
    stored: str


def read_golden(path: Path) -> Golden:
    """Read `input_ids` [T] or [B, T] and `logits` [T, V] or [B, T, V] from a file.

    Args:
        path: `.npz`, `.safetensors`, or `.pt` (a dict of both tensors; read without code).

    Raises:
        BadInputError: unreadable, or the two arrays are absent or do not fit each other.
    """
    arrays, stored = _read_arrays(path)
    ids, logits = arrays[_IDS], arrays[_LOGITS]
    if ids.ndim == 1 and logits.ndim == 2:
        ids, logits = ids[None], logits[None]
    if ids.ndim != 2 or logits.ndim != 3 or ids.shape != logits.shape[:2]:
        raise BadInputError(
            f"{path}: {_IDS} has shape {list(ids.shape)}, {_LOGITS} {list(logits.shape)}",
            expected="[T] and [T, vocab], or [B, T] and [B, T, vocab]",
            todo="save both from one call of your model",
        )
    if not np.issubdtype(ids.dtype, np.integer) or not np.isfinite(logits).all():
        raise BadInputError(f"{path}: ids must be integers and logits finite")
    return Golden(tuple(row.tolist() for row in ids), tuple(logits), stored)


def check_golden(golden: Golden, reference: Scorer, limit: float) -> list[Check]:
    """Largest logit difference over all golden positions, against `limit` plus stored rounding."""
    width = golden.logits[0].shape[1]
    if width != reference.vocab_size:
        raise BadInputError(
            f"the golden logits are {width} wide",
            expected=f"the model's vocabulary of {reference.vocab_size}",
            todo="write them with the same model",
        )
    largest, mean, agreed, positions = 0.0, 0.0, 0, 0
    for ids, logits in zip(golden.ids, golden.logits, strict=True):
        result = compare(logits, reference.score(ids), [None] * len(ids))
        largest = max(largest, float(result.largest.max()))
        mean += float(result.mean.sum())
        agreed += int(result.top1.sum())
        positions += result.positions
    rounding = max(float(np.abs(logits).max()) for logits in golden.logits)
    rounding *= _SPACING[golden.stored] / 2
    detail = f"{positions} positions, stored as {golden.stored} (rounding up to {rounding:.1e})"
    return [
        at_most("largest logit difference from golden", 1, largest, limit + rounding, detail),
        measured("mean logit difference from golden", 1, mean / positions),
        measured("top-1 agreement with golden", 1, agreed / positions),
    ]


def _read_arrays(path: Path) -> tuple[dict[str, NDArray[np.generic]], str]:
    readers = {".npz": _read_npz, ".safetensors": _read_safetensors, ".pt": _read_torch}
    if path.suffix not in readers:
        raise BadInputError(f"{path}: unknown kind", expected="a .npz, .safetensors or .pt file")
    try:
        arrays, stored = readers[path.suffix](path)
    except BadInputError:
        raise
    except Exception as error:  # every reader has its own family of exceptions
        raise BadInputError(f"{path}: not readable: {error}") from error
    if stored not in _SPACING:
        raise BadInputError(f"{path}: logits of type {stored}", expected="a float type")
    return arrays, stored


def _read_npz(path: Path) -> tuple[dict[str, NDArray[np.generic]], str]:
    with np.load(path, allow_pickle=False) as file:
        _demand(path, set(file.files))
        stored = str(file[_LOGITS].dtype)
        logits = file[_LOGITS].astype(np.float64 if stored == "float64" else np.float32)
        return {_IDS: file[_IDS], _LOGITS: logits}, stored


def _read_safetensors(path: Path) -> tuple[dict[str, NDArray[np.generic]], str]:
    from safetensors.torch import load_file

    return _from_tensors(path, load_file(path))


def _read_torch(path: Path) -> tuple[dict[str, NDArray[np.generic]], str]:
    import torch

    return _from_tensors(path, torch.load(path, map_location="cpu", weights_only=True))


def _from_tensors(path: Path, content: object) -> tuple[dict[str, NDArray[np.generic]], str]:
    import torch

    if not isinstance(content, dict):
        raise BadInputError(f"{path}: holds a {type(content).__name__}", expected="a dict")
    _demand(path, set(content))
    ids, logits = torch.as_tensor(content[_IDS]), torch.as_tensor(content[_LOGITS])
    stored = str(logits.dtype).removeprefix("torch.")
    wide = logits if stored == "float64" else logits.float()
    return {_IDS: ids.detach().numpy(), _LOGITS: wide.detach().numpy()}, stored


def _demand(path: Path, names: set[str]) -> None:
    if not {_IDS, _LOGITS} <= names:
        raise BadInputError(
            f"{path}: holds {', '.join(sorted(map(str, names))) or 'nothing'}",
            expected=f"{_IDS} and {_LOGITS}",
            todo="save the ids you fed and the logits your training code gave",
        )
