"""TensorFlow's interpreter as a second opinion on rungs 4 and 5."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from tiny_llama import PROMPT_IDS, reference_logits, tiny_config, tiny_weights

from hermes.cli import app, run_command
from hermes.errors import UsageError
from hermes.runners.choice import RuntimeChoice
from hermes.runners.flatbuffer import LITERT, FlatbufferRunner
from hermes.runners.interpreters import TENSORFLOW, interpreter_for

UNTIED = tiny_config(tie_word_embeddings=False)
WANT = reference_logits(tiny_weights(UNTIED), UNTIED, PROMPT_IDS).numpy()
INSTALLED = find_spec("tensorflow") is not None
needs_tensorflow = pytest.mark.skipif(not INSTALLED, reason="the extra `tensorflow` is absent")


@needs_tensorflow
def test_logits_and_cache(tiny_flatbuffer: Path) -> None:
    assert interpreter_for(RuntimeChoice.TENSORFLOW) is TENSORFLOW
    with FlatbufferRunner(tiny_flatbuffer, interpreter=TENSORFLOW) as runner:
        assert runner.name == "flatbuffer in TensorFlow"
        assert (runner.capacity, runner.vocab_size, runner.prefill_lengths) == (64, 128, (8,))
        got = np.stack(list(runner.score(PROMPT_IDS)))
        assert np.abs(got - WANT).max() < 1e-4
        runner.reset()
        runner.prefill(PROMPT_IDS[:5], 0, 8)
        assert np.abs(runner.step(PROMPT_IDS[5], 5) - WANT[5]).max() < 1e-4


def test_without_it_the_message_has_the_command(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import hermes.runners.interpreters

    monkeypatch.setattr(hermes.runners.interpreters, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"pip install 'hermes-litertlm\[tensorflow\]'"):
        interpreter_for(RuntimeChoice.TENSORFLOW)
    assert interpreter_for(RuntimeChoice.LITERT) is LITERT
    command = ["verify", "x.litertlm", "--against", str(tmp_path), "--runtime", "tensorflow"]
    assert run_command(app, command) == 2
    assert "TensorFlow is not installed" in capsys.readouterr().err


def test_other_runtimes_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(app, ["verify", "x", "--against", "y", "--runtime", "onnx"]) == 2
    assert json.dumps("onnx")[1:-1] in capsys.readouterr().err
