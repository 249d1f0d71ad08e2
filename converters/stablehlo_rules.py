"""What each torch function of the exportable module is in StableHLO.

In the form in which the official converter writes it, so that its passes find the same patterns;
the flatbuffers that come out are compared operator by operator with the official ones in tests.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from converters.stablehlo import NoRuleError, Recorder, shaped, type_of


def _reshape(r: Recorder, source: Tensor, *sizes: Any) -> Tensor:
    shape = list(sizes[0]) if isinstance(sizes[0], (tuple, list)) else list(sizes)
    if -1 in shape:
        known = -math.prod(shape)
        shape[shape.index(-1)] = source.numel() // known
    return _reshaped(r, r.name(source), source.shape, shape, source)


def _unsqueeze(r: Recorder, source: Tensor, dim: int) -> Tensor:
    shape = list(source.shape)
    shape.insert(dim % (source.ndim + 1), 1)
    return _reshaped(r, r.name(source), source.shape, shape, source)


def _reshaped(
    r: Recorder, name: str, before: Sequence[int], after: Sequence[int], like: Tensor
) -> Tensor:
    if list(before) != list(after):
        name = r.unary("reshape", name, shaped(before, like), shaped(after, like))
    return r.made(name, after, like)


def _getitem(r: Recorder, source: Tensor, index: Any) -> Tensor:
    entries = list(index) if isinstance(index, tuple) else [index]
    whole = slice(None)
    if any(entry is Ellipsis for entry in entries):
        place = next(i for i, entry in enumerate(entries) if entry is Ellipsis)
        entries[place : place + 1] = [whole] * (source.ndim - len(entries) + 1)
    entries += [whole] * (source.ndim - len(entries))
    ranges, shape = [], []
    for length, entry in zip(source.shape, entries, strict=True):
        if isinstance(entry, slice):
            start, stop, step = entry.indices(length)
            if step != 1:
                raise NoRuleError("slices with a step")
            shape.append(stop - start)
        elif isinstance(entry, int):
            start = entry % length
            stop = start + 1
        else:
            raise NoRuleError(f"an index of type {type(entry).__name__}")
        ranges.append((start, stop))
    cut = [stop - start for start, stop in ranges]
    return _reshaped(r, _sliced(r, source, ranges), cut, shape, source)


def _sliced(r: Recorder, source: Tensor, ranges: Sequence[tuple[int, int]]) -> str:
    shape = [stop - start for start, stop in ranges]
    if shape == list(source.shape):
        return r.name(source)
    bounds = ", ".join(f"{start}:{stop}" for start, stop in ranges)
    result = shaped(shape, source)
    return r.unary("slice", r.name(source), type_of(source), result, f" [{bounds}]")


def _chunk(r: Recorder, source: Tensor, chunks: int, dim: int = 0) -> tuple[Tensor, ...]:
    axis = dim % source.ndim
    length = source.shape[axis]
    size = -(-length // chunks)
    results = []
    for begin in range(0, length, size):
        ranges = [(0, other) for other in source.shape]
        ranges[axis] = (begin, min(begin + size, length))
        shape = [stop - start for start, stop in ranges]
        results.append(r.made(_sliced(r, source, ranges), shape, source))
    return tuple(results)


def _elementwise(operation: str) -> Callable[..., Tensor]:
    def rule(r: Recorder, left: Tensor | float, right: Tensor | float) -> Tensor:
        tensors = [one for one in (left, right) if isinstance(one, Tensor)]
        like, rank = tensors[0], max(one.ndim for one in tensors)
        wide = [[1] * (rank - one.ndim) + list(one.shape) for one in tensors]
        shape = [max(lengths) for lengths in zip(*wide, strict=True)]
        one, two = r.broadcast(left, shape, like), r.broadcast(right, shape, like)
        return r.made(r.binary(operation, one, two, shaped(shape, like)), shape, like)

    return rule


def _mean(r: Recorder, source: Tensor, dim: int, keepdim: bool = False) -> Tensor:
    if dim % source.ndim != source.ndim - 1 or not keepdim:
        raise NoRuleError("a mean over another axis than the last, kept")
    shape = [*source.shape[:-1], 1]
    result = shaped(shape, source)
    total = r.reduced("add", r.name(source), source, 0.0)
    count = r.splat(source.shape[-1], result)
    return r.made(r.binary("divide", total, count, result), shape, source)


def _softmax(r: Recorder, source: Tensor, dim: int) -> Tensor:
    if dim % source.ndim != source.ndim - 1:
        raise NoRuleError("a softmax over another axis than the last")
    shape, narrow = type_of(source), shaped([*source.shape[:-1], 1], source)
    axes = f", dims = {list(range(source.ndim))}"
    largest = r.reduced("maximum", r.name(source), source, -math.inf)
    wide = r.unary("broadcast_in_dim", largest, narrow, shape, axes)
    shifted = r.binary("subtract", r.name(source), wide, shape)
    powers = r.line(f"stablehlo.exponential {shifted} : {shape}")
    total = r.reduced("add", powers, source, 0.0)
    wide = r.unary("broadcast_in_dim", total, narrow, shape, axes)
    return r.made(r.binary("divide", powers, wide, shape), source.shape, source)


def _rsqrt(r: Recorder, source: Tensor) -> Tensor:
    text = f"stablehlo.rsqrt {r.name(source)} : {type_of(source)}"
    return r.made(r.line(text), source.shape, source)


def _silu(r: Recorder, source: Tensor, inplace: bool = False) -> Tensor:
    gate = r.line(f"stablehlo.logistic {r.name(source)} : {type_of(source)}")
    product = r.binary("multiply", r.name(source), gate, type_of(source))
    return r.made(product, source.shape, source)


def _cat(r: Recorder, sources: Sequence[Tensor], dim: int = 0) -> Tensor:
    first = sources[0]
    axis, shape = dim % first.ndim, list(first.shape)
    shape[axis] = sum(source.shape[axis] for source in sources)
    names = ", ".join(r.name(source) for source in sources)
    types = ", ".join(type_of(source) for source in sources)
    text = f"stablehlo.concatenate {names}, dim = {axis} : ({types}) -> {shaped(shape, first)}"
    return r.made(r.line(text), shape, first)


def _transpose(r: Recorder, source: Tensor, first: int, second: int) -> Tensor:
    axes = list(range(source.ndim))
    axes[first], axes[second] = axes[second], axes[first]
    return _permute(r, source, axes)


def _permute(r: Recorder, source: Tensor, *axes: Any) -> Tensor:
    order = list(axes[0]) if isinstance(axes[0], (tuple, list)) else list(axes)
    order = [axis % source.ndim for axis in order]
    shape = [source.shape[axis] for axis in order]
    result, extra = shaped(shape, source), f", dims = {order}"
    return r.made(
        r.unary("transpose", r.name(source), type_of(source), result, extra), shape, source
    )


def _linear(r: Recorder, source: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if source.ndim != 2:
        raise NoRuleError(f"a linear layer on {source.ndim} axes")
    shape = [source.shape[0], weight.shape[0]]
    result = shaped(shape, source)
    turned = shaped([weight.shape[1], weight.shape[0]], weight)
    matrix = r.unary("transpose", r.name(weight), type_of(weight), turned, ", dims = [1, 0]")
    product = r.line(
        f"stablehlo.dot_general {r.name(source)}, {matrix}, contracting_dims = [1] x [0] : "
        f"({type_of(source)}, {turned}) -> {result}"
    )
    if bias is not None:
        product = r.binary("add", product, r.broadcast(bias, shape, source), result)
    return r.made(product, shape, source)


def _embedding(r: Recorder, rows: Tensor, table: Tensor, **_: Any) -> Tensor:
    """A composite whose inside is never computed: the converter has an operator for it."""
    group, shape = r.unique(), [len(rows), table.shape[1]]
    index = _mark(r, type_of(rows), r.name(rows), group, 0, is_input=True)
    values = _mark(r, type_of(table), r.name(table), group, 1, is_input=True)
    column, result = shaped([len(rows), 1], rows), shaped(shape, table)
    numbers = r.unary("reshape", index, type_of(rows), column)
    found = r.line(
        f'"stablehlo.gather"({values}, {numbers}) <{{dimension_numbers = #stablehlo.gather<'
        "offset_dims = [1], collapsed_slice_dims = [0], start_index_map = [0], "
        f"index_vector_dim = 1>, slice_sizes = array<i64: 1, {table.shape[1]}>}}> : "
        f"({type_of(table)}, {column}) -> {result}"
    )
    return r.made(_mark(r, result, found, group, 0, is_input=False), shape, table)


def _mark(r: Recorder, kind: str, name: str, group: str, position: int, *, is_input: bool) -> str:
    """One border of the composite."""
    config = {
        "name": "odml.embedding_lookup",
        "pos": position,
        "id": group,
        "is_input": is_input,
        "attr": None,
    }
    text = json.dumps(config).replace('"', "\\22")
    return r.line(
        f'stablehlo.custom_call @mark_tensor({name}) {{backend_config = "{text}"}} : '
        f"({kind}) -> {kind}"
    )


def _cache_write(r: Recorder, cache: Tensor, update: Tensor, position: Tensor, axis: int) -> Tensor:
    zero = r.line("stablehlo.constant dense<0> : tensor<i32>")
    starts = ", ".join(r.name(position) if index == axis else zero for index in range(cache.ndim))
    types = ", ".join([type_of(cache), type_of(update), *["tensor<i32>"] * cache.ndim])
    operands = f"{r.name(cache)}, {r.name(update)}, {starts}"
    text = f"stablehlo.dynamic_update_slice {operands} : ({types}) -> {type_of(cache)}"
    return r.made(r.line(text), cache.shape, cache)


def _batched_matmul(r: Recorder, left: Tensor, right: Tensor) -> Tensor:
    shape = [*left.shape[:3], right.shape[2]]
    text = (
        f"stablehlo.dot_general {r.name(left)}, {r.name(right)}, "
        "batching_dims = [0, 1] x [0, 1], contracting_dims = [3] x [3] : "
        f"({type_of(left)}, {type_of(right)}) -> {shaped(shape, left)}"
    )
    return r.made(r.line(text), shape, left)


RULES: dict[str, Callable[..., Any]] = {
    "reshape": _reshape,
    "view": _reshape,
    "unsqueeze": _unsqueeze,
    "getitem": _getitem,
    "chunk": _chunk,
    "mul": _elementwise("multiply"),
    "rmul": _elementwise("multiply"),
    "add": _elementwise("add"),
    "radd": _elementwise("add"),
    "mean": _mean,
    "softmax": _softmax,
    "rsqrt": _rsqrt,
    "silu": _silu,
    "cat": _cat,
    "transpose": _transpose,
    "permute": _permute,
    "linear": _linear,
    "embedding": _embedding,
    "cache_write": _cache_write,
    "batched_matmul": _batched_matmul,
}
