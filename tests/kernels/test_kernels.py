"""Machine code does what its formulas say, bit for bit in the order that they are written in."""

from __future__ import annotations

import concurrent.futures
import functools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hermes.hadamard import transform_columns, transform_rows
from hermes.kernels.code import Code
from hermes.kernels.rounding import round_rows

BLOCK = 16


def sylvester(size: int) -> np.ndarray:
    """Unscaled: the sign of entry (i, j) is the parity of the bits that i and j share."""
    return np.array([[(-1.0) ** (i & j).bit_count() for j in range(size)] for i in range(size)])


def planted(rows: int, parts: int, size: int, seed: int = 0) -> tuple[np.ndarray, ...]:
    """Values, signs and an odd factor, float64."""
    generator = np.random.default_rng(seed)
    width = parts * size
    values = generator.standard_normal((rows, width))
    odd = generator.standard_normal((parts, parts))
    return values, generator.choice([-1.0, 1.0], width), odd


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 20),
    st.sampled_from([1, 2, 3, 5, 9, 65]),
    st.sampled_from([1, 2, 4, 8, 16, 64, 128, 1024]),
    st.sampled_from(["float32", "float64"]),
)
def test_transforms_are_the_matrix_they_claim(rows: int, parts: int, size: int, dtype: str) -> None:
    if parts * size > 1200:
        return
    values, signs, odd = planted(rows, parts, size)
    matrix = signs[:, None] * np.kron(odd, sylvester(size))
    given = [array.astype(dtype) for array in (values, signs, odd)]
    wanted, scale = values @ matrix, np.abs(values) @ np.abs(matrix)
    limit = {"float32": 1e-6, "float64": 1e-15}[dtype] * scale.max()
    found = transform_rows(*given)
    assert found.dtype == dtype
    assert np.abs(found - wanted).max() < limit
    # Columns that lie among others, as a slice of a matrix has them.
    wide = np.zeros((parts * size, rows + 3), dtype)
    wide[:, 1 : rows + 1] = given[0].T
    for lying in (wide[:, 1 : rows + 1], given[0].T):
        columns = transform_columns(lying, *given[1:])
        assert np.abs(columns - wanted.T).max() < limit


@pytest.mark.parametrize(("parts", "size"), [(1, 8), (1, 2048), (3, 1024), (9, 64), (15, 64)])
def test_transforms_add_in_the_order_written(parts: int, size: int) -> None:
    """numpy rounds after every operation; a contracted product would not."""
    values, signs, odd = (array.astype(np.float32) for array in planted(7, parts, size, 1))

    def combined(contracted: bool) -> np.ndarray:
        exact = np.float64 if contracted else np.float32
        signed = (values * signs).reshape(len(values), parts, size)
        total = signed[:, :1] * odd[0, :, None]
        for part in range(1, parts):
            product = signed[:, part : part + 1].astype(exact) * odd[part, :, None]
            total = (total + product).astype(np.float32)
        distance = 1
        while distance < size:
            pairs = total.reshape(len(values), -1, 2, distance)
            first, second = pairs[:, :, 0], pairs[:, :, 1]
            total = np.stack([first + second, first - second], axis=2)
            distance *= 2
        return total.reshape(values.shape)

    found = transform_rows(values, signs, odd)
    assert np.array_equal(found, combined(contracted=False))
    columns = transform_columns(np.ascontiguousarray(values.T), signs, odd)
    assert np.array_equal(columns.T, found)
    if parts > 1:
        assert not np.array_equal(found, combined(contracted=True))


def in_order(
    rows: np.ndarray, scales: np.ndarray, inputs: np.ndarray, gains: np.ndarray, exact: type
) -> np.ndarray:
    """The loop of `round_rows` with numpy, rounding after every operation if exact is float32."""
    outputs = np.zeros((len(rows), gains.shape[1]), exact)
    rounded = []
    for block in range(len(gains)):
        values = rows[:, block * BLOCK : (block + 1) * BLOCK].astype(exact)
        wanted = values
        for token in range(gains.shape[1]):
            wanted = wanted + outputs[:, token : token + 1] * gains[block, token].astype(exact)
        group = block // (len(gains) // scales.shape[1])
        scale = scales[:, group : group + 1].astype(exact)
        integers = np.clip(np.rint(wanted / scale), -127, 127)
        rounded.append(integers.astype(np.int8))
        errors = values - integers * scale
        for column in range(BLOCK):
            seen = inputs[block, column].astype(exact)
            outputs = outputs + errors[:, column : column + 1] * seen
    return np.concatenate(rounded, axis=1)


@functools.cache
def rounding_case(rows: int, blocks: int, tokens: int, groups: int) -> tuple[np.ndarray, ...]:
    generator = np.random.default_rng(blocks)
    values = generator.standard_normal((rows, blocks * BLOCK)).astype(np.float32)
    peaks = np.abs(values.reshape(rows, groups, -1)).max(axis=2)
    inputs = generator.standard_normal((blocks, BLOCK, tokens)).astype(np.float32)
    gains = (0.1 * generator.standard_normal((blocks, tokens, BLOCK))).astype(np.float32)
    return values, peaks / np.float32(127), inputs, gains


@pytest.mark.parametrize(
    ("rows", "blocks", "tokens", "groups"),
    [(1, 1, 16, 1), (3, 4, 16, 1), (4, 6, 32, 3), (9, 12, 64, 6), (1025, 20, 16, 1)],
)
def test_rows_are_rounded_in_the_order_written(
    rows: int, blocks: int, tokens: int, groups: int
) -> None:
    case = rounding_case(rows, blocks, tokens, groups)
    found = round_rows(*case, 127)
    assert np.array_equal(found, in_order(*case, np.float32))


def test_another_order_would_be_seen() -> None:
    """The comparison can fail: sums that are not rounded give other integers here and there."""
    case = rounding_case(1025, 20, 16, 1)
    found = round_rows(*case, 127)
    share = (found != in_order(*case, np.float64)).mean()
    assert 0 < share < 0.01


def test_integers_stay_within_their_limit() -> None:
    values, scales, inputs, gains = rounding_case(9, 12, 64, 6)
    found = round_rows(values, scales / 20, inputs, gains, 7)
    assert (found.min(), found.max()) == (-7, 7)


def test_threads_share_a_kernel() -> None:
    case = rounding_case(1025, 20, 16, 1)
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: round_rows(*case, 127), range(8)))
    assert all(np.array_equal(one, found[0]) for one in found)


def test_memory_of_another_kind_is_refused() -> None:
    """A pointer says nothing about what it points to."""
    code = Code("nothing", ("float32", "integer"))
    kernel = code.compiled()
    kernel(np.zeros(3, np.float32), 3)
    with pytest.raises(TypeError, match="float64"):
        kernel(np.zeros(3), 3)
    with pytest.raises(TypeError, match="contiguous"):
        kernel(np.zeros((3, 4), np.float32)[:, 1:], 3)


def test_shapes_that_do_not_fit_are_refused() -> None:
    values, signs, odd = planted(4, 3, 16)
    for wrong in (
        (values[:, :40], signs, odd),
        (values, signs[:40], odd),
        (values, signs, odd[:2]),
    ):
        with pytest.raises(ValueError, match="odd factor"):
            transform_rows(*wrong)
    with pytest.raises(ValueError, match="odd factor"):
        transform_columns(values, signs, odd)
    rows, scales, inputs, gains = rounding_case(9, 12, 64, 6)
    for case in (
        (rows[:, :-16], scales, inputs, gains),
        (rows, scales[:5], inputs, gains),
        (rows, scales, inputs[:, :, :16], gains),
        (rows, scales[:, :5], inputs, gains),
    ):
        with pytest.raises(ValueError, match="gains"):
            round_rows(*case, 127)
