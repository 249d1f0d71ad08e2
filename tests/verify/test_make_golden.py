"""The script's five lines write what rung 1 reads, for a model that is not ours."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from tiny_llama import (
    PROMPT_IDS,
    hermes_config,
    hermes_weights,
    reference_logits,
    tiny_config,
    tiny_weights,
)

from hermes.model import HermesForCausalLM
from hermes.runners.reference import ReferenceRunner
from hermes.verify.golden import check_golden, read_golden

FIELDS = tiny_config(tie_word_embeddings=False)
WEIGHTS = tiny_weights(FIELDS)
SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "make_golden.py"


class TrainingModel(torch.nn.Module):
    """Some training code: batch in, logits out, in half of its own precision."""

    def __init__(self, theta: float = 10000.0) -> None:
        super().__init__()
        self.fields = {**FIELDS, "rope_theta": theta}

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return reference_logits(WEIGHTS, self.fields, batch[0].tolist())[None]


@pytest.mark.parametrize(("theta", "passed"), [(10000.0, True), (20000.0, False)])
def test_written_and_compared(theta: float, passed: bool, tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("make_golden_script", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    path = tmp_path / "golden.pt"
    script.make_golden(TrainingModel(theta).eval(), list(PROMPT_IDS), str(path))
    golden = read_golden(path)
    assert golden.ids == (list(PROMPT_IDS),)
    model = HermesForCausalLM(hermes_config(FIELDS))
    model.load_state_dict(hermes_weights(WEIGHTS))
    checks = check_golden(golden, ReferenceRunner(model), 1e-3)
    assert all(check.passed for check in checks) == passed
