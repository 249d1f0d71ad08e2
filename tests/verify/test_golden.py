"""Rung 1: golden logits in every container, and what is wrong with them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tiny_llama import PROMPT_IDS, hermes_config, hermes_weights, reference_logits, tiny_config
from tiny_llama import tiny_weights as weights_of

from hermes.errors import BadInputError
from hermes.model import HermesForCausalLM
from hermes.runners.reference import ReferenceRunner
from hermes.verify.golden import check_golden, read_golden

UNTIED = tiny_config(tie_word_embeddings=False)
WEIGHTS = weights_of(UNTIED)
IDS = torch.tensor(PROMPT_IDS)
LOGITS = reference_logits(WEIGHTS, UNTIED, PROMPT_IDS)


@pytest.fixture(scope="module")
def reference() -> ReferenceRunner:
    model = HermesForCausalLM(hermes_config(UNTIED))
    model.load_state_dict(hermes_weights(WEIGHTS))
    return ReferenceRunner(model)


def write(path: Path, logits: torch.Tensor, ids: torch.Tensor = IDS) -> Path:
    if path.suffix == ".npz":
        np.savez(path, input_ids=ids.numpy(), logits=logits.numpy())
    elif path.suffix == ".safetensors":
        save_file({"input_ids": ids, "logits": logits.contiguous()}, path)
    else:
        torch.save({"input_ids": ids, "logits": logits}, path)
    return path


@pytest.mark.parametrize("suffix", [".npz", ".safetensors", ".pt"])
@pytest.mark.parametrize("batch", [False, True])
def test_the_training_codes_logits(
    suffix: str, batch: bool, reference: ReferenceRunner, tmp_path: Path
) -> None:
    ids, logits = (IDS[None], LOGITS[None]) if batch else (IDS, LOGITS)
    golden = read_golden(write(tmp_path / f"golden{suffix}", logits.float(), ids))
    checks = check_golden(golden, reference, 1e-3)
    assert all(check.passed for check in checks)
    assert float(checks[0].value) < 1e-4


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_coarse_storage_is_not_held_against_the_model(
    kind: torch.dtype, reference: ReferenceRunner, tmp_path: Path
) -> None:
    golden = read_golden(write(tmp_path / "golden.pt", LOGITS.to(kind)))
    (first, *_) = check_golden(golden, reference, 1e-3)
    assert first.passed
    assert str(kind).removeprefix("torch.") in first.detail


def test_another_rotary_style_is_red(reference: ReferenceRunner, tmp_path: Path) -> None:
    other = reference_logits(WEIGHTS, UNTIED, PROMPT_IDS, style="interleaved").float()
    golden = read_golden(write(tmp_path / "golden.pt", other))
    first, mean, agreement = check_golden(golden, reference, 1e-3)
    assert not first.passed
    assert first.rung == 1
    assert float(first.value) > 1
    assert mean.passed
    assert agreement.passed


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"input_ids": IDS}, "expected: input_ids and logits"),
        ({"input_ids": IDS[:5], "logits": LOGITS.float()}, r"shape \[1, 5\]"),
        ({"input_ids": IDS.float(), "logits": LOGITS.float()}, "integers"),
        ({"input_ids": IDS, "logits": LOGITS.float() * torch.nan}, "finite"),
        ({"input_ids": IDS, "logits": LOGITS.long()}, "float type"),
        ([1, 2], "holds a list"),
    ],
)
def test_unusable_files(content: object, message: str, tmp_path: Path) -> None:
    path = tmp_path / "golden.pt"
    torch.save(content, path)
    with pytest.raises(BadInputError, match=message):
        read_golden(path)


def test_unreadable_files(tmp_path: Path, reference: ReferenceRunner) -> None:
    for name in ("golden.npz", "golden.pt", "golden.safetensors", "golden.txt"):
        path = tmp_path / name
        path.write_bytes(b"not a golden file")
        with pytest.raises(BadInputError, match="golden"):
            read_golden(path)
    narrow = read_golden(write(tmp_path / "narrow.pt", LOGITS[:, :100].float()))
    with pytest.raises(BadInputError, match="100 wide"):
        check_golden(narrow, reference, 1e-3)
