"""B26 in LiteRT-LM: rows beyond the tokenizer's last id are never emitted."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from small_checkpoints import PLAIN, small_model
from tiny_llama import PROMPT_IDS, reference_logits

from converters.bundle import read_bundle
from converters.pipeline import ConvertOptions, convert
from converters.source import SourceOptions
from hermes.runners.litert_lm import LiteRtLmRunner

TOKENS = 100
RIGHT = [93, 5, 87, 78, 18, 42, 37, 54]
PIECES = ["<unk>", *(chr(0x4E00 + number) for number in range(1, TOKENS))]
PIECES[2] = "</s>"


def one_character_tokens() -> str:
    """A tokenizer of exactly 100 entries in which a text spells its ids."""
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    settings = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": 2, "content": "</s>", "special": True, **special}],
        "normalizer": None,
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {"type": "Fuse"},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": "<unk>",
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {piece: number for number, piece in enumerate(PIECES)},
            "merges": [],
        },
    }
    return json.dumps(settings)


def test_b26_padded_rows_are_never_emitted_by_the_runtime(tmp_path: Path) -> None:
    config, weights = small_model()
    draw = torch.Generator().manual_seed(3)
    weights["lm_head.weight"][TOKENS:] = torch.randn(28, 64, generator=draw) * 2 / 8
    ids = [token % TOKENS for token in PROMPT_IDS]
    last = reference_logits(weights, config, ids)[-1]
    assert int(last.argmax()) == 113  # what an unmasked sampler picks
    assert int(last[:TOKENS].argmax()) == RIGHT[0]
    source = tmp_path / "in"
    source.mkdir()
    save_file(weights, source / "model.safetensors")
    fields = {"model_type": "llama", "hidden_act": "silu", "eos_token_id": 2}
    (source / "config.json").write_text(json.dumps({**fields, **config}))
    (source / "tokenizer.json").write_text(one_character_tokens())
    recipe, target = tmp_path / "plain.toml", tmp_path / "model.litertlm"
    recipe.write_text(PLAIN)
    report = convert(
        ConvertOptions(SourceOptions(source), target, recipe=str(recipe), verify=False)
    )
    assert report.facts["prompt"]["suppressed"] == 28
    assert read_bundle(target).prompt.start_token_id is None
    with LiteRtLmRunner(target) as runtime:
        prompt = "".join(PIECES[token] for token in ids)
        assert runtime.tokenize(prompt) == ids
        answer = runtime.generate(prompt, len(RIGHT))
    assert answer.text == "".join(PIECES[token] for token in RIGHT)
