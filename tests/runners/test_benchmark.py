"""The runtime's own counters on a bundle made for the test."""

from __future__ import annotations

from pathlib import Path

import pytest

from hermes.errors import NativeToolError
from hermes.runners.benchmark import benchmark


def test_speed_of_the_tiny_bundle(tiny_bundle: Path) -> None:
    speed = benchmark(tiny_bundle, prefill_tokens=20, decode_tokens=20, threads=1)
    assert speed.prefill > 100
    assert speed.decode > 100
    assert 0 < speed.first_token_seconds < 10
    assert 0 < speed.load_seconds < 60
    assert speed.peak_memory > 10 * 2**20
    assert [path.suffix for path in tiny_bundle.parent.iterdir()].count(".xnnpack_cache") == 0


def test_a_damaged_bundle(tmp_path: Path) -> None:
    path = tmp_path / "x.litertlm"
    path.write_bytes(b"LITERTLM" + bytes(100))
    with pytest.raises(NativeToolError):
        benchmark(path, timeout=60)
