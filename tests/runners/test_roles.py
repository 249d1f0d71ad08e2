"""Which tensor is what, by every name and form that the runtime takes."""

from __future__ import annotations

import numpy as np
import pytest

from hermes.errors import BadInputError
from hermes.runners.roles import decode_roles, fill_inputs, prefill_roles, roles_of
from hermes.signatures import Signature, TensorSpec


def spec(name: str, *shape: int, kind: str = "float32") -> TensorSpec:
    return TensorSpec(name, shape, kind)  # type: ignore[arg-type]


KEYS, VALUES = spec("k_cache_0", 1, 2, 6, 4), spec("v_cache_0", 1, 2, 4, 6)
TOKENS, POSITIONS = spec("token_ids", 1, 3, kind="int32"), spec("positions", 3, kind="int32")


def signature(*inputs: TensorSpec, name: str = "prefill") -> Signature:
    return Signature(name, 0, inputs, (KEYS, VALUES, spec("logits", 1, 1, 9)))


def test_other_names() -> None:
    roles = roles_of(signature(VALUES, TOKENS, spec("attn_mask", 1, 1, 3, 6), KEYS, POSITIONS))
    assert (roles.length, roles.capacity) == (3, 6)
    assert (roles.tokens.name, roles.positions.name) == ("token_ids", "positions")
    assert roles.cache == (VALUES, KEYS)
    assert roles.logits is not None


def test_without_a_mask_the_keys_tell_the_context() -> None:
    roles = roles_of(signature(TOKENS, POSITIONS, KEYS, VALUES))
    assert (roles.mask, roles.capacity) == (None, 6)
    assert set(fill_inputs(roles, [5], 2)) == {"token_ids", "positions"}


@pytest.mark.parametrize(
    ("kind", "opened", "closed"),
    [
        ("bool", True, False),
        ("float16", 0.0, -45824.0),
        ("float32", 0.0, -0.7 * 3.4028234663852886e38),
    ],
)
def test_masks(kind: str, opened: float, closed: float) -> None:
    mask = spec("attn_mask", 1, 1, 3, 6, kind=kind)
    filled = fill_inputs(roles_of(signature(TOKENS, POSITIONS, mask, KEYS, VALUES)), [7, 9], 1)
    assert filled["token_ids"].tolist() == [[7, 9, 0]]
    assert filled["positions"].tolist() == [1, 2, 0]
    rows = filled["attn_mask"]
    assert (rows.dtype, rows.shape) == (np.dtype(kind), (1, 1, 3, 6))
    wanted = np.array([[opened] * 2 + [closed] * 4, [opened] * 3 + [closed] * 3, [closed] * 6])
    assert (rows[0, 0] == wanted.astype(kind)).all()


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        ((POSITIONS, KEYS), "no input tokens or token_ids"),
        ((TOKENS, KEYS), "no input input_pos or positions"),
        ((TOKENS, POSITIONS), "neither a mask nor a cache"),
        ((TOKENS, POSITIONS, KEYS, spec("embeddings", 1, 3, 8)), "input embeddings is none"),
        ((TOKENS, POSITIONS, KEYS, spec("mask", 1, 1, 3, 6, kind="int32")), "of type int32"),
    ],
)
def test_what_cannot_be_driven_is_refused(inputs: tuple[TensorSpec, ...], words: str) -> None:
    with pytest.raises(BadInputError, match=words):
        roles_of(signature(*inputs))


def test_decode_and_prefill_are_found_by_name() -> None:
    decode = signature(TOKENS, POSITIONS, KEYS, name="decode")
    short = signature(spec("tokens", 1, 2, kind="int32"), POSITIONS, KEYS, name="prefill_b")
    found = (signature(TOKENS, POSITIONS, KEYS, name="prefill_a"), decode, short)
    assert decode_roles(found, "x").signature is decode
    assert [roles.length for roles in prefill_roles(found)] == [2, 3]
    with pytest.raises(BadInputError, match="signatures prefill"):
        decode_roles(found[:1], "x")
    mute = Signature("decode", 1, decode.inputs, (KEYS,))
    with pytest.raises(BadInputError, match="decode gives k_cache_0"):
        decode_roles([mute], "x")
