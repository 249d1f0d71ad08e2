"""All outputs of a flatbuffer's signatures in the LiteRT interpreter, in a process of its own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from hermes.runners.child import run_in_child
from hermes.runners.roles import runtime_inputs
from hermes.runners.session import STALE

Outputs = list[dict[str, np.ndarray]]


def outputs_of(path: Path, ids: Sequence[int], prefill: int) -> Outputs:
    """Prefill signature of `prefill` rows over the first ids, padded by one row, then decode.

    One dict per call: the whole cache and, in decode, the logits.
    """
    outputs: Outputs = run_in_child("interpreted:run", str(path), list(ids), prefill)
    return outputs


def run(path: str, ids: list[int], prefill: int) -> Outputs:
    """The child's side of `outputs_of`."""
    from ai_edge_litert.interpreter import Interpreter

    interpreter = Interpreter(model_path=path, num_threads=1)
    first = prefill - 1
    calls = [(f"prefill_{prefill}", prefill, ids[:first], 0)]
    calls += [("decode", 1, [ids[p]], p) for p in range(first, len(ids))]
    cache: dict[str, np.ndarray] = {}
    outputs = []
    for name, length, fed, position in calls:
        runner = interpreter.get_signature_runner(name)
        details = runner.get_input_details()
        for key, detail in details.items():
            if key.startswith("kv_cache_") and key not in cache:
                cache[key] = np.full(detail["shape"], STALE, np.float32)
        context = int(details["mask"]["shape"][-1])
        tokens, positions, mask = runtime_inputs(fed, position, length, context)
        result = runner(tokens=tokens, input_pos=positions, mask=mask, **cache)
        cache = {key: result[key].copy() for key in cache}
        outputs.append({key: value.copy() for key, value in result.items()})
    return outputs


def assert_identical(first: Outputs, second: Outputs) -> None:
    """Bit-equal outputs of every call."""
    for call, (one, two) in enumerate(zip(first, second, strict=True)):
        assert one.keys() == two.keys()
        for name in one:
            assert one[name].tobytes() == two[name].tobytes(), (call, name)
