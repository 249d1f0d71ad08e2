"""What each tensor of a signature is for, by every name and form that LiteRT-LM accepts.

Observed with probe models (`tests/runners/test_foreign_bundles.py` repeats it): the runtime looks
inputs up by name, takes every signature that starts with `prefill`, reads lengths from shapes, and
needs no mask. Other exporters use these liberties.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hermes.errors import BadInputError
from hermes.signatures import DECODE, MASK_CLOSED, Signature, TensorSpec

if TYPE_CHECKING:
    import numpy as np

PREFILL = "prefill"
TOKEN_NAMES = ("tokens", "token_ids")
POSITION_NAMES = ("input_pos", "positions")
MASK_NAMES = ("mask", "attn_mask")
KEY_PREFIXES = ("kv_cache_k_", "k_cache_")
VALUE_PREFIXES = ("kv_cache_v_", "v_cache_")
_LOGITS = "logits"
_CLOSED = {"float32": MASK_CLOSED, "float16": -45824.0, "bool": False}
"""What stands in closed entries of a mask; open ones are 0, or True."""


@dataclass(frozen=True)
class Roles:
    """The tensors of one signature.

    Attributes:
        signature: as the file describes it.
        length: tokens it takes.
        capacity: slots of the cache.
        tokens: name of the input of token ids, and
        positions: of their positions.
        mask: None where the graph makes its own from the positions.
        cache: inputs that are also outputs, updated in place.
        logits: output; None in a prefill without logits.
    """

    signature: Signature
    length: int
    capacity: int
    tokens: TensorSpec
    positions: TensorSpec
    mask: TensorSpec | None
    cache: tuple[TensorSpec, ...]
    logits: TensorSpec | None


def roles_of(signature: Signature) -> Roles:
    """Find every tensor that the runtime would find.

    Raises:
        BadInputError: an input that it needs is absent, or one that it could not fill is there.
    """
    inputs = list(signature.inputs)
    tokens, positions = _take(inputs, TOKEN_NAMES), _take(inputs, POSITION_NAMES)
    mask = _take(inputs, MASK_NAMES)
    cache = tuple(spec for spec in inputs if spec.name.startswith(KEY_PREFIXES + VALUE_PREFIXES))
    others = [spec.name for spec in inputs if spec not in cache]
    problems = [
        f"no input {' or '.join(names)}"
        for names, found in ((TOKEN_NAMES, tokens), (POSITION_NAMES, positions))
        if found is None
    ]
    problems += [f"input {name} is none that the runtime fills" for name in others]
    if mask is not None and mask.dtype not in _CLOSED:
        problems.append(f"a mask of type {mask.dtype}, expected {', '.join(_CLOSED)}")
    keys = next((spec for spec in cache if spec.name.startswith(KEY_PREFIXES)), None)
    if mask is None and (keys is None or len(keys.shape) < 3):
        problems.append("neither a mask nor a cache of keys tells the context")
    if problems or tokens is None or positions is None:
        raise BadInputError(
            f"signature {signature.name} cannot be driven",
            problems=problems,
            expected="token ids, positions, a cache and perhaps a mask",
        )
    # Without a mask the runtime takes the third axis of the keys for the context.
    capacity = mask.shape[-1] if mask is not None else keys.shape[2] if keys is not None else 0
    logits = next((spec for spec in signature.outputs if spec.name == _LOGITS), None)
    length = tokens.shape[-1]
    return Roles(signature, length, capacity, tokens, positions, mask, cache, logits)


def decode_roles(signatures: Iterable[Signature], where: str) -> Roles:
    """The roles of `decode`, which every bundle has.

    Args:
        signatures: of the file.
        where: the file, for messages.

    Raises:
        BadInputError: there is none, or it gives no logits.
    """
    found = {signature.name: signature for signature in signatures}
    if DECODE not in found:
        names = ", ".join(found) or "(none)"
        raise BadInputError(f"{where}: signatures {names}", expected=DECODE)
    roles = roles_of(found[DECODE])
    if roles.logits is None:
        outputs = ", ".join(spec.name for spec in found[DECODE].outputs)
        raise BadInputError(f"{where}: {DECODE} gives {outputs}", expected=_LOGITS)
    return roles


def prefill_roles(signatures: Iterable[Signature]) -> tuple[Roles, ...]:
    """The roles of all prefill signatures, shortest first."""
    found = [roles_of(item) for item in signatures if item.name.startswith(PREFILL)]
    return tuple(sorted(found, key=lambda roles: roles.length))


def runtime_inputs(
    ids: Sequence[int], position: int, length: int, context: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens [1, T], positions [T] and mask [1, 1, T, S] as LiteRT-LM fills them (observed).

    Rows after the last real one have token 0, position 0 and a closed mask row.
    """
    import numpy as np

    if not 0 < len(ids) <= length:
        raise ValueError(f"{len(ids)} tokens for {length} rows")
    tokens = np.zeros((1, length), np.int32)
    positions = np.zeros(length, np.int32)
    mask = np.full((1, 1, length, context), MASK_CLOSED, np.float32)
    tokens[0, : len(ids)] = ids
    positions[: len(ids)] = np.arange(position, position + len(ids))
    for row in range(len(ids)):
        mask[0, 0, row, : position + row + 1] = 0.0
    return tokens, positions, mask


def fill_inputs(roles: Roles, ids: Sequence[int], position: int) -> dict[str, np.ndarray]:
    """`runtime_inputs` in the form that a signature takes, by input name."""
    import numpy as np

    tokens, positions, mask = runtime_inputs(ids, position, roles.length, roles.capacity)
    filled = {
        roles.tokens.name: tokens.reshape(roles.tokens.shape),
        roles.positions.name: positions.reshape(roles.positions.shape),
    }
    if roles.mask is not None:
        kind = str(roles.mask.dtype)
        if kind == "bool":
            mask = mask == 0
        elif kind != "float32":
            mask = np.where(mask == 0, np.zeros((), kind), np.array(_CLOSED[kind], kind))
        filled[roles.mask.name] = mask.reshape(roles.mask.shape)
    return filled


def token_count(inputs: Iterable[TensorSpec]) -> int:
    """Rows of a signature with these inputs; 0 if it takes no token ids."""
    return next((spec.shape[-1] for spec in inputs if spec.name in TOKEN_NAMES), 0)


def _take(inputs: list[TensorSpec], names: Sequence[str]) -> TensorSpec | None:
    """Remove and return the input of one of these names."""
    found = next((spec for spec in inputs if spec.name in names), None)
    if found is not None:
        inputs.remove(found)
    return found
