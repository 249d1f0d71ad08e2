"""Products of many vectors with diag(signs) (odd (x) H), H a Hadamard matrix.

H = H_2 (x) H_2 (x) ... is applied as sums and differences, up to eight vectors in registers at a
time, so a value costs log2(N) additions instead of N multiplications.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
from llvmlite import ir
from numpy.typing import NDArray

from hermes.kernels.code import LANES, Array, Code, Value

_RADIX = 8
"""Most vectors that are combined at a time: they and their sums fill the registers."""

Numbers = NDArray[np.floating]


def transform_rows(values: Numbers, signs: Numbers, odd: Numbers) -> Numbers:
    """See `hermes.hadamard.transform_rows`; N must be a multiple of `LANES`."""
    result = np.empty(values.shape, values.dtype)
    kernel = _rows_kernel(str(values.dtype), len(odd), values.shape[1] // len(odd))
    kernel(np.ascontiguousarray(values), signs, odd, result, len(values))
    return result


def transform_columns(values: Numbers, signs: Numbers, odd: Numbers) -> Numbers:
    """See `hermes.hadamard.transform_columns`."""
    columns = values.shape[1]
    padded = np.pad(values, ((0, 0), (0, -columns % LANES))) if columns % LANES else values
    given = np.ascontiguousarray(padded)
    result = np.empty_like(given)
    kernel = _columns_kernel(str(values.dtype), len(odd), len(values) // len(odd))
    kernel(given, signs, odd, result, given.shape[1])
    return result[:, :columns]


@functools.cache
def _rows_kernel(dtype: str, parts: int, size: int) -> Callable[..., None]:
    code = Code("transform_rows", (*[dtype] * 4, "integer"))
    values, signs, odd, result, count = code.arguments
    build, at_once = code.build, min(size, _RADIX * LANES)
    with code.loop(count) as row:
        start = build.mul(row, code.integer(parts * size))
        given, target = values.at(start), result.at(start)
        with code.loop(code.integer(parts)) as part:
            column, mine = odd.at(part), target.at(build.mul(part, code.integer(size)))
            with code.loop(code.integer(size), at_once) as at:
                vectors = [
                    _combined(
                        code, given, signs, column, parts, size, build.add(at, code.integer(v))
                    )
                    for v in range(0, at_once, LANES)
                ]
                vectors = _across([_within(code, vector) for vector in vectors], code)
                for v, vector in enumerate(vectors):
                    mine.at(build.add(at, code.integer(v * LANES))).store(vector)
            _passes(code, mine, size // at_once, code.integer(at_once))
    return code.compiled()


@functools.cache
def _columns_kernel(dtype: str, parts: int, size: int) -> Callable[..., None]:
    code = Code("transform_columns", (*[dtype] * 4, "integer"))
    values, signs, odd, result, count = code.arguments
    build = code.build
    with code.loop(code.integer(parts)) as part:
        column = odd.at(part)
        mine = result.at(build.mul(build.mul(part, code.integer(size)), count))
        with code.loop(code.integer(size)) as row, code.loop(count, LANES) as at:
            total = None
            for other in range(parts):
                place = build.add(row, code.integer(other * size))
                vector = values.at(build.add(build.mul(place, count), at)).load()
                signed = build.fmul(vector, signs.at(place).splat())
                total = _added(code, total, signed, column.at(code.integer(other * parts)))
            mine.at(build.add(build.mul(row, count), at)).store(total)
        _passes(code, mine, size, count)
    return code.compiled()


def _combined(
    code: Code, given: Array, signs: Array, column: Array, parts: int, size: int, at: Value
) -> Value:
    """Eight values of one part of a row: the signed parts times a column of the odd factor."""
    total = None
    for part in range(parts):
        place = code.build.add(at, code.integer(part * size))
        signed = code.build.fmul(given.at(place).load(), signs.at(place).load())
        total = _added(code, total, signed, column.at(code.integer(part * parts)))
    return total


def _added(code: Code, total: Value | None, vector: Value, factor: Array) -> Value:
    product = code.build.fmul(vector, factor.splat())
    return product if total is None else code.build.fadd(total, product)


def _within(code: Code, vector: Value) -> Value:
    """The vector times the Hadamard matrix of its length."""
    for distance in (1, 2, 4):
        places = [lane ^ distance for lane in range(LANES)]
        signs = [-1.0 if lane & distance else 1.0 for lane in range(LANES)]
        signed = code.build.fmul(vector, ir.Constant(vector.type, signs))
        vector = code.build.fadd(code.pick(vector, places), signed)
    return vector


def _across(vectors: list[Value], code: Code) -> list[Value]:
    """Sums and differences of vectors: their index is transformed."""
    distance = 1
    while distance < len(vectors):
        combined = list(vectors)
        for index, vector in enumerate(vectors):
            if not index & distance:
                other = vectors[index | distance]
                combined[index] = code.build.fadd(vector, other)
                combined[index | distance] = code.build.fsub(vector, other)
        vectors, distance = combined, 2 * distance
    return vectors


def _passes(code: Code, values: Array, count: int, distance: Value) -> None:
    """Transform an index that runs over `count` neighbours of `distance` values each."""
    build = code.build
    while count > 1:
        radix = min(count, _RADIX)
        count //= radix
        span = build.mul(distance, code.integer(radix))
        with code.loop(code.integer(count)) as group:
            start = build.mul(group, span)
            with code.loop(distance, LANES) as at:
                here = build.add(start, at)
                places = [
                    values.at(build.add(here, build.mul(distance, code.integer(i))))
                    for i in range(radix)
                ]
                for place, vector in zip(
                    places, _across([place.load() for place in places], code), strict=True
                ):
                    place.store(vector)
        distance = span
