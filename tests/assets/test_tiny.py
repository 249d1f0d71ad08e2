"""The embedded default model: its files, its prompt contract, and that it knows its text."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import math
import re
import tarfile
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from sentencepiece import SentencePieceProcessor

from hermes.config import HermesConfig
from hermes.model import HermesForCausalLM
from hermes.parameters import parameter_count, parameter_shapes

ROOT = Path(__file__).parents[2]
TINY, EVALUATION = ROOT / "assets" / "tiny", ROOT / "assets" / "eval"
# Hamlet's monologue of act III, as printed in the training text.
PASSAGE = Path(__file__).with_name("hamlet_passage.txt").read_text(encoding="ascii")


@pytest.fixture(scope="module")
def tokenizer() -> SentencePieceProcessor:
    return SentencePieceProcessor(model_file=str(TINY / "tokenizer.model"))


@pytest.fixture(scope="module")
def model() -> HermesForCausalLM:
    torch.set_num_threads(1)
    config = HermesConfig.from_json(TINY / "config.json")
    weights = {name: value.float() for name, value in load_file(TINY / "model.safetensors").items()}
    model = HermesForCausalLM(config)
    model.load_state_dict(weights | {"lm_head.weight": weights["embed_tokens.weight"]}, strict=True)
    return model.eval()


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("train_tiny", ROOT / "scripts" / "train_tiny.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@torch.no_grad()
def token_losses(model: HermesForCausalLM, ids: list[int]) -> torch.Tensor:
    """Nats of ids[1:], each given all before it."""
    logits = model(torch.tensor([ids]))["logits"]
    assert logits is not None
    return torch.nn.functional.cross_entropy(
        logits[0, :-1], torch.tensor(ids[1:]), reduction="none"
    )


def continuation(
    model: HermesForCausalLM, tokenizer: SentencePieceProcessor, prompt: str, tokens: int
) -> str:
    """Greedy text after `<s>` and the prompt."""
    ids = [tokenizer.bos_id(), *tokenizer.encode(prompt)]
    out = model.generate(torch.tensor([ids]), max_new_tokens=tokens, temperature=0)
    return str(tokenizer.decode(out[0, len(ids) :].tolist()))


def test_all_files_together_stay_under_four_megabytes() -> None:
    names = {path.name for path in TINY.iterdir()}
    assert names == {
        "SOURCE.md",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.model",
        "tokenizer_config.json",
    }
    assert sum(path.stat().st_size for path in TINY.iterdir()) < 4_000_000


def test_config_is_the_preset_and_groups_its_queries() -> None:
    config = HermesConfig.from_json(TINY / "config.json")
    assert config == HermesConfig.preset("tiny")
    assert 1 < config.num_kv_heads < config.num_heads
    assert config.tie_embeddings
    assert 1_000_000 <= parameter_count(config) <= 4_000_000


def test_weights_are_bfloat16_under_hermes_names_with_the_tied_table_once() -> None:
    stored = load_file(TINY / "model.safetensors")
    config = HermesConfig.from_json(TINY / "config.json")
    assert {name: tuple(value.shape) for name, value in stored.items()} == parameter_shapes(config)
    assert {value.dtype for value in stored.values()} == {torch.bfloat16}
    assert all(bool(value.isfinite().all()) for value in stored.values())


def test_special_ids_agree_in_all_files(tokenizer: SentencePieceProcessor) -> None:
    config = HermesConfig.from_json(TINY / "config.json")
    generation = json.loads((TINY / "generation_config.json").read_text(encoding="utf-8"))
    pieces = json.loads((TINY / "tokenizer_config.json").read_text(encoding="utf-8"))
    for role in ("bos", "eos", "pad"):
        number = getattr(config, f"{role}_token_id")
        assert generation[f"{role}_token_id"] == number
        assert tokenizer.id_to_piece(number) == pieces[f"{role}_token"]
        assert tokenizer.is_control(number)
    assert tokenizer.id_to_piece(tokenizer.unk_id()) == pieces["unk_token"]
    assert tokenizer.get_piece_size() == config.vocab_size
    assert pieces["add_bos_token"] is True
    assert pieces["add_eos_token"] is False


@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=60))
def test_tokenizer_loses_nothing(text: str) -> None:
    tokenizer = SentencePieceProcessor(model_file=str(TINY / "tokenizer.model"))
    # U+2581 is SentencePiece's own sign for a space, U+0000 ends its strings.
    text = text.replace("\u2581", "").replace("\0", "")
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert not {tokenizer.unk_id(), tokenizer.bos_id(), tokenizer.eos_id()} & set(ids)


@pytest.mark.parametrize("text", ["🎭 café naïve 東京", "  two\n\n\tlines  ", "<s> </s> <0x41>"])
def test_tokenizer_falls_back_to_bytes(tokenizer: SentencePieceProcessor, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text
    emoji = tokenizer.encode("🎭")
    assert [tokenizer.id_to_piece(i) for i in emoji] == ["<0xF0>", "<0x9F>", "<0x8E>", "<0xAD>"]


def test_a_prompt_has_the_tokens_of_a_line_inside_the_text(
    tokenizer: SentencePieceProcessor,
) -> None:
    first, second = "Who's there?\n", "Nay, answer me: stand, and unfold yourself.\n"
    joined = tokenizer.encode(first + second)
    assert joined == tokenizer.encode(first) + tokenizer.encode(second)


def test_passage_is_far_more_likely_than_by_token_counts(
    model: HermesForCausalLM, tokenizer: SentencePieceProcessor
) -> None:
    ids = tokenizer.encode(PASSAGE)
    losses = token_losses(model, [tokenizer.bos_id(), *ids][: model.config.max_seq_len])
    # The entropy of the passage's own counts: no model without context can do better on it.
    counts = Counter(ids)
    context_free = -sum(n / len(ids) * math.log(n / len(ids)) for n in counts.values())
    assert losses.mean() < PASSAGE_LIMIT < context_free / 2
    assert losses[-100:].mean() < PASSAGE_LIMIT, "the last positions of the context are untrained"


PASSAGE_LIMIT = 1.5


@pytest.mark.parametrize("fault", ["no rotation", "layers swapped", "keys of the wrong head"])
def test_a_broken_model_does_not_know_the_passage(
    model: HermesForCausalLM, tokenizer: SentencePieceProcessor, fault: str
) -> None:
    broken = HermesForCausalLM(model.config)
    weights = dict(model.state_dict())
    if fault == "layers swapped":
        swapped = {"layers.1.": "layers.2.", "layers.2.": "layers.1."}
        weights = {swapped.get(name[:9], name[:9]) + name[9:]: weights[name] for name in weights}
    elif fault == "keys of the wrong head":
        for name in [name for name in weights if "k_proj" in name]:
            weights[name] = weights[name].roll(model.config.head_dim, dims=0)
    broken.load_state_dict(weights, strict=True)
    if fault == "no rotation":
        broken.rope_cos.fill_(1.0)
        broken.rope_sin.zero_()
    ids = [tokenizer.bos_id(), *tokenizer.encode(PASSAGE)][:256]
    assert token_losses(broken, ids).mean() > PASSAGE_LIMIT


def test_the_start_token_belongs_to_the_input(
    model: HermesForCausalLM, tokenizer: SentencePieceProcessor
) -> None:
    with_start, without = [], []
    lines = [line for line in PASSAGE.splitlines(keepends=True) if len(line) > 30]
    for line in lines:
        ids = tokenizer.encode(line)
        start = token_losses(model, [tokenizer.bos_id(), *ids])
        with_start.append(float(start[1:].mean()))
        without.append(float(token_losses(model, ids).mean()))
    assert sum(with_start) < sum(without) * 0.95


@torch.no_grad()
def test_most_words_of_the_passage_are_the_first_choice(
    model: HermesForCausalLM, tokenizer: SentencePieceProcessor
) -> None:
    # Over the whole passage, so that no prompt is chosen for its result.
    ids = [tokenizer.bos_id(), *tokenizer.encode(PASSAGE)][: model.config.max_seq_len]
    logits = model(torch.tensor([ids]))["logits"]
    assert logits is not None
    agreed = logits[0, :-1].argmax(dim=-1) == torch.tensor(ids[1:])
    assert agreed.float().mean() >= 0.75


# Prompts chosen because they work: after a few words the model mostly leaves the text (it does so
# after "To be, or not to be"). The test above does not choose.
@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("Out, out, brief candle!\nLife's but a walking shadow", "a poor player"),
        ("Neither a borrower nor a lender be:\n", "For loan oft loses both itself and"),
        ("To-morrow, and to-morrow, and to-morrow,\nCreeps in this petty", "pace from day to day"),
        ("Double, double, toil and trouble;\n", "Fire, burn; and caldron, bubble"),
    ],
)
def test_greedy_continuations_are_the_text(
    model: HermesForCausalLM, tokenizer: SentencePieceProcessor, prompt: str, expected: str
) -> None:
    assert expected in continuation(model, tokenizer, prompt, 40)


def test_recorded_hashes_are_those_of_the_files_and_the_script(script: ModuleType) -> None:
    source = (TINY / "SOURCE.md").read_text(encoding="utf-8")
    recorded = set(re.findall(r"`([0-9a-f]{64})`", source))
    files = {
        hashlib.sha256((TINY / name).read_bytes()).hexdigest()
        for name in ("model.safetensors", "tokenizer.model")
    }
    texts = {script.ARCHIVE_SHA256, *script.TRAINING.values(), *script.HELD_OUT.values()}
    assert recorded == files | texts


def test_evaluation_text_is_long_and_as_recorded(tokenizer: SentencePieceProcessor) -> None:
    data = (EVALUATION / "english.txt").read_bytes()
    source = (EVALUATION / "SOURCE.md").read_text(encoding="utf-8")
    assert hashlib.sha256(data).hexdigest() in source
    assert len(data) >= 8192
    assert len(tokenizer.encode(data.decode("utf-8"))) > 1024


SCRIPT_TEXT = """A PLAY

by Nobody

ACT I.

Scene I. A wood.

  Ann.
Here   we are.



Bob.
Indeed.

Scene II. A house.

Ann.
Scene follows scene.

ACT II.

SCENE I. The wood.

Ann.
Again."""


def test_script_splits_scenes_and_keeps_act_headings_with_them(script: ModuleType) -> None:
    assert script.split_scenes(SCRIPT_TEXT) == [
        "ACT I.\n\nScene I. A wood.\n\nAnn.\nHere we are.\n\nBob.\nIndeed.\n",
        "Scene II. A house.\n\nAnn.\nScene follows scene.\n",
        "ACT II.\n\nSCENE I. The wood.\n\nAnn.\nAgain.\n",
    ]


def test_script_windows_begin_with_start_and_end_with_the_scene(script: ModuleType) -> None:
    scenes = script.split_scenes(SCRIPT_TEXT)
    proto = script.train_tokenizer(scenes, 300)
    assert proto == script.train_tokenizer(scenes, 300), "the tokenizer's bytes must not change"
    tokenizer = SentencePieceProcessor(model_proto=proto)
    windows = script.Windows(tokenizer, scenes)
    lines = [line for scene in scenes for line in scene.splitlines() if line]
    assert len(windows.spans) == len(lines)
    for index, line in enumerate(lines):
        ids = windows.window(index, 200).tolist()
        assert ids[0] == tokenizer.bos_id()
        end = ids.index(tokenizer.eos_id())
        assert set(ids[end + 1 :]) == {tokenizer.pad_id()}
        text = tokenizer.decode(ids[1:end])
        assert text.startswith(line + "\n")
        assert any(scene.endswith(text) for scene in scenes)


def test_script_refuses_a_changed_text(script: ModuleType, tmp_path: Path) -> None:
    folder = tmp_path / "play"
    folder.mkdir()
    (folder / "hamlet.txt").write_text("ACT I.\n\nSomething else.\n")
    with tarfile.open(tmp_path / "archive.tar.gz", "w:gz") as archive:
        archive.add(folder / "hamlet.txt", arcname=script.MEMBERS.format("hamlet"))
    with pytest.raises(SystemExit, match=r"hamlet has sha256 .* expected bbe56356"):
        script.read_scenes(tmp_path / "archive.tar.gz", script.TRAINING)
