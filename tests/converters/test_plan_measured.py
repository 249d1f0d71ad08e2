"""Predicted peak memory beside the measured one, in processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from small_checkpoints import write_checkpoint
from tiny_llama import tiny_config, tiny_weights

RECIPE = """
rewrites = ["fold_norm_gains", "rotate_residual"]
[export]
context = 32
prefill = [4, 8]
[[quantization]]
tensors = "*"
"""
SIZES: dict[str, dict[str, Any]] = {
    "0.1M": {"num_hidden_layers": 1},
    "13M": {"num_hidden_layers": 2, "hidden_size": 512, "intermediate_size": 2048,
            "vocab_size": 8000},
    "79M": {"num_hidden_layers": 1, "hidden_size": 1024, "intermediate_size": 4096,
            "vocab_size": 32000},
}  # fmt: skip


def convert(folder: Path, checkpoint: Path) -> dict[str, Any]:
    recipe = folder / "own.toml"
    recipe.write_text(RECIPE)
    command = [
        sys.executable, "-m", "hermes.cli", "convert", str(checkpoint), "-o",
        str(folder / "own.litertlm"), "--recipe", str(recipe), "--no-verify", "--force", "--json",
    ]  # fmt: skip
    environment = {**os.environ, "XDG_CACHE_HOME": str(folder / "cache")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    facts: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])["facts"]
    return facts


@pytest.mark.slow
@pytest.mark.parametrize("name", SIZES)
def test_memory_predictions_hold_within_a_quarter(name: str, tmp_path: Path) -> None:
    config = tiny_config(**SIZES[name])
    checkpoint = write_checkpoint(tmp_path / "checkpoint", config, tiny_weights(config))
    for made in ("traced", "kept"):
        facts = convert(tmp_path, checkpoint)
        assert facts["graph"]["made"] == made
        peak = facts["cost"]["peak_memory"]
        assert abs(peak["predicted"] - peak["measured"]) <= 0.25 * peak["measured"], (made, peak)
        size = facts["cost"]["bundle_bytes"]
        assert size["predicted"] <= size["measured"] <= size["predicted"] * 1.25 + 500_000
