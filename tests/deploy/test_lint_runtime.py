"""What lint calls an error, the real runtime refuses or dies of."""

from __future__ import annotations

from pathlib import Path

import broken_bundles as broken
import pytest
from lint_cases import BREAKS

from hermes.errors import NativeToolError
from hermes.runners.child import run_in_child

REFUSED = (
    "file-name",
    "no-model",
    "no-metadata",
    "no-decode",
    "no-prefill",
    "input-names",
    "no-cache",
    "cache-shape",
    "logits",
    "mask-type",
    "prefill-too-long",
    "tokenizer-damaged",
    "tokenizer-type",
    "no-stop-token",
    "start-token",
    "sampler",
    "template-broken",
    "content-parts",
    "template-engine",
)


@pytest.mark.parametrize("rule", REFUSED)
def test_the_runtime_refuses_it_too(rule: str, tmp_path: Path) -> None:
    edit, _, options = BREAKS[rule]
    pieces = broken.clean(tmp_path, **options)  # type: ignore[arg-type]
    edit(pieces)
    with pytest.raises(NativeToolError):
        run_in_child("lint_runtime:talk", str(broken.write(pieces, tmp_path)), timeout=60)


@pytest.mark.parametrize("kind", [broken.SENTENCEPIECE, broken.JSON])
def test_the_runtime_takes_the_clean_one(kind: str, tmp_path: Path) -> None:
    target = broken.write(broken.clean(tmp_path, kind=kind), tmp_path)
    assert len(run_in_child("lint_runtime:talk", str(target), timeout=60)) == 2
