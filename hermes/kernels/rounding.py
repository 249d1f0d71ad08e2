"""Rounding by inputs: the loop of `converters.rounding`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from llvmlite import ir
from numpy.typing import NDArray

from hermes.kernels.code import LANES, Array, Code, Value

_ROWS = 4
"""Rows that are worked on together: with blocks of 16 columns their sums fill the registers."""
_VALUES = 1 << 17
"""Of rows that are gone through block by block: with their integers they stay in a core's cache."""

Floats = NDArray[np.float32]


def round_rows(
    rows: Floats, scales: Floats, inputs: Floats, gains: Floats, largest: int
) -> NDArray[np.int8]:
    """Integers [R, C]: what the rounding of a block does to the outputs is made good after it.

    Args:
        rows: [R, C] in B blocks of S columns, S a multiple of LANES.
        scales: [R, G] of G equal groups of columns, whole blocks each.
        inputs: [B, S, T], T a multiple of S.
        gains: [B, T, S], what errors of the outputs add to each column.
        largest: magnitude of integers.
    """
    blocks, tokens, size = gains.shape
    wanted = ((len(rows), blocks * size), (blocks, size, tokens), len(rows))
    if (rows.shape, inputs.shape, len(scales)) != wanted or blocks % scales.shape[1]:
        found = [array.shape for array in (rows, scales, inputs, gains)]
        raise ValueError(f"rows, scales, inputs and gains of shapes {found}")
    rounded = np.empty(rows.shape, np.int8)
    groups = scales.shape[1]
    kernel = _kernel(tokens, size, largest)
    step = max(1, _VALUES // rows.shape[1] // _ROWS) * _ROWS
    for top in range(0, len(rows), step):
        part = slice(top, min(top + step, len(rows)))
        outputs = np.zeros((step, tokens), np.float32)
        kernel(
            rows[part], scales[part], inputs, gains, outputs, rounded[part],
            part.stop - top, blocks, blocks // groups, groups,
        )  # fmt: skip
    return rounded


@functools.cache
def _kernel(tokens: int, size: int, largest: int) -> Callable[..., None]:
    code = Code("round_rows", (*["float32"] * 5, "int8", *["integer"] * 4))
    rows, scales, inputs, gains, outputs, rounded, count, blocks, per_group, groups = code.arguments
    build = code.build
    columns = build.mul(blocks, code.integer(size))
    with code.loop(blocks) as block:
        start = build.mul(block, code.integer(size * tokens))
        left, group = build.mul(block, code.integer(size)), build.udiv(block, per_group)
        with code.loop(count, _ROWS) as top:
            lines = [
                _Line(
                    rows.at(build.add(build.mul(row, columns), left)),
                    scales.at(build.add(build.mul(row, groups), group)),
                    outputs.at(build.mul(build.add(top, code.integer(i)), code.integer(tokens))),
                    rounded.at(build.add(build.mul(row, columns), left)),
                )
                for i, row in enumerate(_rows(code, top, count))
            ]
            _round_block(code, lines, gains.at(start), inputs.at(start), tokens, size, largest)
    return code.compiled()


@dataclass(frozen=True)
class _Line:
    """Where a row's values of a block are, its scale, its outputs [T] and its integers."""

    values: Array
    scale: Array
    outputs: Array
    integers: Array


def _rows(code: Code, top: Value, count: Value) -> list[Value]:
    """The last row stands in for those that are missing: it is written more than once, alike."""
    build, last = code.build, code.build.sub(count, code.integer(1))
    wanted = [build.add(top, code.integer(i)) for i in range(_ROWS)]
    return [build.select(build.icmp_unsigned("<", row, last), row, last) for row in wanted]


def _round_block(
    code: Code,
    lines: list[_Line],
    gains: Array,
    inputs: Array,
    tokens: int,
    size: int,
    largest: int,
) -> None:
    values = [_vectors(code, line.values, size) for line in lines]
    wanted = values
    for token in range(tokens):
        factors = [line.outputs.at(code.integer(token)).splat() for line in lines]
        row = _vectors(code, gains.at(code.integer(token * size)), size)
        wanted = _with_products(code, wanted, factors, row)
    errors = [
        _rounded(code, line, value, want, largest)
        for line, value, want in zip(lines, values, wanted, strict=True)
    ]
    for token in range(0, tokens, size):
        outputs = [line.outputs.at(code.integer(token)) for line in lines]
        sums = [_vectors(code, output, size) for output in outputs]
        for column in range(size):
            vector, lane = divmod(column, LANES)
            factors = [code.pick(error[vector], [lane] * LANES) for error in errors]
            row = _vectors(code, inputs.at(code.integer(column * tokens + token)), size)
            sums = _with_products(code, sums, factors, row)
        for output, vectors in zip(outputs, sums, strict=True):
            for v, one in enumerate(vectors):
                output.at(code.integer(v * LANES)).store(one)


def _vectors(code: Code, array: Array, size: int) -> list[Value]:
    return [array.at(code.integer(start)).load() for start in range(0, size, LANES)]


def _with_products(
    code: Code, sums: list[list[Value]], factors: list[Value], row: list[Value]
) -> list[list[Value]]:
    """Each line's sums plus its factor times the row."""
    build = code.build
    return [
        [
            build.fadd(total, build.fmul(factor, vector))
            for total, vector in zip(totals, row, strict=True)
        ]
        for totals, factor in zip(sums, factors, strict=True)
    ]


def _rounded(
    code: Code, line: _Line, values: list[Value], wanted: list[Value], largest: int
) -> list[Value]:
    """Store the nearest integers; gives what each misses of its value."""
    build, scale, errors = code.build, line.scale.splat(), []
    kind = values[0].type
    nearest_integer = code.intrinsic(f"llvm.rint.v{LANES}f32", kind)
    high = ir.Constant(kind, [float(largest)] * LANES)
    low = ir.Constant(kind, [-float(largest)] * LANES)
    for v, (value, want) in enumerate(zip(values, wanted, strict=True)):
        nearest = build.call(nearest_integer, [build.fdiv(want, scale)])
        nearest = build.select(build.fcmp_ordered("<", nearest, high), nearest, high)
        nearest = build.select(build.fcmp_ordered(">", nearest, low), nearest, low)
        whole = build.fptosi(nearest, ir.VectorType(ir.IntType(32), LANES))
        narrow = build.trunc(whole, ir.VectorType(ir.IntType(8), LANES))
        line.integers.at(code.integer(v * LANES)).store(narrow)
        errors.append(build.fsub(value, build.fmul(nearest, scale)))
    return errors
