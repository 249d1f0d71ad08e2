"""How the custom operators of `hermes.exportable` become TFLite operators.

Importing this module registers the lowerings with litert-torch. The converter turns
`stablehlo.dynamic_update_slice` into DYNAMIC_UPDATE_SLICE and a `dot_general` that contracts the
last axis of both operands into BATCH_MATMUL with `adj_y`, without transposes.
"""

from __future__ import annotations

from typing import Any

import torch
from litert_converter.mlir import ir
from litert_converter.mlir.dialects import stablehlo
from litert_torch.backend import lowerings
from litert_torch.backend.lowerings import utils

import hermes.exportable  # noqa: F401  (defines the operators)


@lowerings.lower(torch.ops.hermes.cache_write)  # type: ignore[untyped-decorator]
def _lower_cache_write(_: Any, cache: Any, update: Any, position: Any, axis: int) -> Any:
    rank = len(cache.type.shape)
    zero = utils.splat(0, ir.IntegerType.get_signless(32))
    starts = [position if index == axis else zero for index in range(rank)]
    return stablehlo.dynamic_update_slice(cache, update, starts)


@lowerings.lower(torch.ops.hermes.batched_matmul)  # type: ignore[untyped-decorator]
def _lower_batched_matmul(_: Any, left: Any, right: Any) -> Any:
    dimensions = stablehlo.DotDimensionNumbers.get(
        lhs_batching_dimensions=[0, 1],
        rhs_batching_dimensions=[0, 1],
        lhs_contracting_dimensions=[3],
        rhs_contracting_dimensions=[3],
    )
    shape = [*list(left.type.shape)[:3], right.type.shape[2]]
    result = ir.RankedTensorType.get(shape, left.type.element_type)
    return stablehlo.dot_general(result, left, right, dimensions)
