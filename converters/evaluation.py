"""How much of the float model a finished bundle keeps, over real texts: KL, top-1, perplexity."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from converters.bundle import extract_section, read_bundle
from converters.float_models import open_float_models
from converters.proof import text_ids
from converters.source import Source
from hermes.assets import assets_folder
from hermes.progress import OnProgress, Progress, silent
from hermes.recipe import Limits
from hermes.rewrite import RewritableModel
from hermes.runners.flatbuffer import FlatbufferRunner
from hermes.runners.interface import Scorer
from hermes.verify.quantized import check_quantized
from hermes.verify.scores import KnownScores


@dataclass(frozen=True)
class Fidelity:
    """A bundle against the float model on one text.

    Attributes:
        text: the file's name.
        positions: tokens compared.
        kl: mean KL(float || bundle), nats.
        kl_p99: its 99th percentile.
        top1: share of positions where both prefer the same token.
        perplexity: of the bundle.
        reference_perplexity: of the float model.
    """

    text: str
    positions: int
    kl: float
    kl_p99: float
    top1: float
    perplexity: float
    reference_perplexity: float

    def to_dict(self) -> dict[str, float | str]:
        """For JSON."""
        return asdict(self)


class Evaluator:
    """Compares bundles with one float model, whose scores are computed once per text.

    Args:
        source: the opened checkpoint.
        texts: files of real text.
        positions: tokens of each to compare.
        on_progress: told what is running.
    """

    def __init__(
        self,
        source: Source,
        texts: Sequence[Path],
        positions: int,
        on_progress: OnProgress = silent,
    ) -> None:
        on_progress(Progress("reading the float model"))
        original = RewritableModel(source.mapped.config, source.mapped.weights)
        reference = open_float_models(original, original, (1,)).reference
        self._texts = {text: text_ids(source, text, positions) for text in texts}
        self._scores: dict[Path, Scorer] = {
            text: KnownScores(reference, ids) for text, ids in self._texts.items()
        }

    def evaluate(
        self, bundle: Path, *, threads: int = 2, on_progress: OnProgress = silent
    ) -> list[Fidelity]:
        """Score every text with the bundle's decode signature, token by token."""
        with tempfile.TemporaryDirectory(prefix="hermes-eval-") as folder:
            model = Path(folder) / "model.tflite"
            opened = read_bundle(bundle)
            extract_section(opened, opened.section("TFLiteModel"), model)
            with FlatbufferRunner(model, threads=threads) as runner:
                return [self._one(text, runner, on_progress) for text in self._texts]

    def _one(self, text: Path, runner: FlatbufferRunner, on_progress: OnProgress) -> Fidelity:
        on_progress(Progress(f"scoring {text.name}"))
        ids = self._texts[text]
        limits = Limits(positions=len(ids))
        result = check_quantized(self._scores[text], runner, ids, limits).comparison
        reference, model = result.perplexities()
        return Fidelity(
            text=text.name,
            positions=result.positions,
            kl=float(result.kl.mean()),
            kl_p99=float(np.quantile(result.kl, 0.99)),
            top1=float(result.top1.mean()),
            perplexity=model.value,
            reference_perplexity=reference.value,
        )


def evaluation_texts(given: Sequence[Path] | None) -> list[Path]:
    """The given texts, or the two shipped ones: a novel and technical prose."""
    folder = assets_folder() / "eval"
    return list(given or (folder / "english.txt", folder / "technical.txt"))
