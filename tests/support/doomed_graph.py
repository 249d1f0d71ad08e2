"""Stand-ins for `converters.graph.make_graph` that end as a native converter can end."""

from __future__ import annotations

import os
from typing import Any


def abort(config: Any, shapes: Any, options: Any, target: Any) -> str:
    """A failed check in the converter, after part of the file was written."""
    target.write_bytes(b"half a graph")
    os.write(2, b"F0000 check failed: !pass.failed()\n")
    os.abort()


def refuse_to_lower(config: Any, shapes: Any, options: Any, target: Any) -> str:
    raise RuntimeError("failed to legalize operation 'stablehlo.sort'")


def hang(config: Any, shapes: Any, options: Any, target: Any) -> str:
    import time

    time.sleep(3600)
    return ""
