"""The number of start tokens that the runtime really feeds: counted, not assumed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import toy_tokenizers
from table_model import successor_table, write_table_model

from converters.bundle import BundleSpec, write_bundle
from hermes.checkpoint.source import Checkpoint
from hermes.config import HermesConfig
from hermes.runners.child import run_in_child
from hermes.tokenizer import PromptContract, prompt_contract
from hermes.tokenizer.huggingface import read_tokenizer_json

CONFIG = HermesConfig(vocab_size=400, bos_token_id=None, eos_token_id=None)
TOKENIZER = read_tokenizer_json(json.dumps(toy_tokenizers.byte_level_json()).encode(), "toy")
PRINTS = "{% for m in messages %}{{ bos_token + m.content + eos_token }}{% endfor %}"
PRINTS_NOT = "{% for m in messages %}{{ m.content + eos_token }}{% endfor %}"


def contract_for(folder: Path, template: str, add_bos: bool) -> PromptContract:
    settings = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "add_bos_token": add_bos}
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**settings, "chat_template": template}))
    checkpoint = Checkpoint(folder, {}, tokenizer_files={"tokenizer_config.json": path})
    return prompt_contract(TOKENIZER, checkpoint, CONFIG)


def fed(folder: Path, contract: PromptContract) -> int:
    """Tokens that the runtime fed for one message beyond those of the rendered prompt."""
    model = write_table_model(folder / "model.tflite", successor_table(400))
    target = folder / "bundle.litertlm"
    write_bundle(BundleSpec(model, TOKENIZER, contract, 64), target)
    prompt, count = run_in_child("runtime_probe:tokens_fed", str(target), "the cat")
    # The answer's one token is in the cache, too.
    return int(count) - len(TOKENIZER.encode(prompt)) - 1


@pytest.mark.parametrize(
    ("template", "add_bos", "added"),
    [(PRINTS, True, 0), (PRINTS, False, 0), (PRINTS_NOT, True, 1), (PRINTS_NOT, False, 0)],
)
def test_start_tokens_fed(tmp_path: Path, template: str, add_bos: bool, added: int) -> None:
    contract = contract_for(tmp_path, template, add_bos)
    assert fed(tmp_path, contract) == added


def test_a_doubled_start_token_is_counted(tmp_path: Path) -> None:
    """Planted: metadata and template both give it."""
    contract = replace(contract_for(tmp_path, PRINTS, True), start_token_id=1)
    assert fed(tmp_path, contract) == 1
