"""Bundles of other exporters: the runtime takes their names and masks, and so do our runners."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from foreign_exports import FORMS, write_foreign
from tiny_bundle import write_bundle
from tiny_llama import PROMPT_IDS, reference_logits, tiny_config, tiny_weights

from hermes.runners.flatbuffer import FlatbufferRunner
from hermes.runners.litert_lm import LiteRtLmRunner
from hermes.verify.runtime import RuntimeData, check_runtime

UNTIED = tiny_config(tie_word_embeddings=False)
WEIGHTS = tiny_weights(UNTIED)
WANT = reference_logits(WEIGHTS, UNTIED, PROMPT_IDS).numpy()


@pytest.mark.parametrize("name", FORMS)
def test_runtime_and_runner_agree(name: str, tmp_path: Path) -> None:
    model = write_foreign(WEIGHTS, UNTIED, tmp_path / "model.tflite", FORMS[name])
    bundle = write_bundle(model, tmp_path / "model.litertlm")
    data = RuntimeData(("the cat sat", "a quick brown fox jumps over it"), "hi", 12, None, (2,))
    with FlatbufferRunner(model) as runner, LiteRtLmRunner(bundle) as runtime:
        assert (runner.capacity, runner.vocab_size, runner.prefill_lengths) == (64, 128, (8,))
        got = np.stack(list(runner.score(PROMPT_IDS)))
        assert np.abs(got - WANT).max() < 1e-4
        runner.reset()
        runner.prefill(PROMPT_IDS[:5], 0, 8)
        assert np.abs(runner.step(PROMPT_IDS[5], 5) - WANT[5]).max() < 1e-4
        checks = check_runtime(runtime, runner, data, 1e-3).checks
    assert [check.detail for check in checks if not check.passed] == []
