"""Writing and reading bundles; the runtime reads them too."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import tiny_bundle
import toy_tokenizers
from table_model import successor_table, write_table_model

from converters import bundle as bundle_module
from converters.bundle import (
    BundleSpec,
    extract_section,
    read_bundle,
    section_bytes,
    write_bundle,
)
from hermes.checkpoint.source import Checkpoint
from hermes.config import HermesConfig
from hermes.errors import BadInputError, NativeToolError, ResourceError
from hermes.runners.child import run_in_child
from hermes.tokenizer import PromptContract, prompt_contract
from hermes.tokenizer.huggingface import read_tokenizer_json
from hermes.tokenizer.sentencepiece import SentencePieceTokenizer

TEMPLATE = "{% for m in messages %}{{ m.content[0].text }}{% endfor %}"
JSON = read_tokenizer_json(json.dumps(toy_tokenizers.byte_level_json()).encode(), "toy")
MODEL = SentencePieceTokenizer(toy_tokenizers.sentencepiece_model(), "toy")


@pytest.fixture(scope="module")
def flatbuffer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("model") / "model.tflite"
    return write_table_model(target, successor_table(420))


@pytest.fixture
def spec(flatbuffer: Path) -> BundleSpec:
    contract = PromptContract(1, (2, 300), chat_template=TEMPLATE)
    return BundleSpec(flatbuffer, JSON, contract, 64, {"hermes": "0"}, tuple(range(400, 420)))


@pytest.mark.parametrize("tokenizer", [JSON, MODEL], ids=["json", "sentencepiece"])
def test_what_goes_in_comes_out(
    spec: BundleSpec, tmp_path: Path, tokenizer: SentencePieceTokenizer
) -> None:
    target = tmp_path / "out.litertlm"
    write_bundle(replace(spec, tokenizer=tokenizer), target)
    bundle = read_bundle(target)
    assert bundle.prompt.start_token_id == 1
    assert bundle.prompt.stop_token_ids == (2, 300)
    assert bundle.prompt.chat_template == TEMPLATE
    assert bundle.prompt.max_num_tokens == 64
    assert bundle.prompt.suppress_tokens == tuple(range(400, 420))
    assert bundle.prompt.model_type == "generic_model"
    assert bundle.metadata["hermes"] == "0"
    assert bundle.tokenizer.kind == tokenizer.kind
    assert bundle.tokenizer.data == tokenizer.data
    model = bundle.section("TFLiteModel")
    assert model.sha256 == hashlib.sha256(spec.model.read_bytes()).hexdigest()
    extract_section(bundle, model, tmp_path / "back.tflite")
    assert (tmp_path / "back.tflite").read_bytes() == spec.model.read_bytes()
    kind = "HF_Tokenizer_Zlib" if tokenizer is JSON else "SP_Tokenizer"
    assert section_bytes(bundle, bundle.section(kind)) == tokenizer.data
    extract_section(bundle, bundle.section(kind), tmp_path / "tokenizer")
    assert (tmp_path / "tokenizer").read_bytes() == tokenizer.data


def test_no_start_token_and_no_template_stay_absent(spec: BundleSpec, tmp_path: Path) -> None:
    target = tmp_path / "out.litertlm"
    write_bundle(replace(spec, contract=PromptContract(None, (2,)), suppress_tokens=()), target)
    prompt = read_bundle(target).prompt
    assert (prompt.start_token, prompt.chat_template, prompt.suppress_tokens) == (None, None, ())


def test_token_zero_is_a_token(spec: BundleSpec, tmp_path: Path) -> None:
    write_bundle(replace(spec, contract=PromptContract(0, (0,))), tmp_path / "o")
    prompt = read_bundle(tmp_path / "o").prompt
    assert (prompt.start_token_id, prompt.stop_token_ids) == (0, (0,))


def test_the_same_spec_gives_the_same_bytes(spec: BundleSpec, tmp_path: Path) -> None:
    first, second, other = tmp_path / "a", tmp_path / "b", tmp_path / "c"
    write_bundle(spec, first)
    time.sleep(0.01)
    write_bundle(spec, second)
    assert first.read_bytes() == second.read_bytes()
    write_bundle(replace(spec, metadata={"hermes": "1"}), other)
    assert read_bundle(first).metadata["uuid"] != read_bundle(other).metadata["uuid"]


def test_a_longer_old_file_leaves_nothing_behind(spec: BundleSpec, tmp_path: Path) -> None:
    fresh, used = tmp_path / "a", tmp_path / "b"
    write_bundle(spec, fresh)
    used.write_bytes(b"\xff" * 5_000_000)
    write_bundle(spec, used)
    assert fresh.read_bytes() == used.read_bytes()


def test_the_runtime_reads_the_same(spec: BundleSpec, tmp_path: Path) -> None:
    target = tmp_path / "out.litertlm"
    contract = PromptContract(1, (2, 300), chat_template=TEMPLATE)
    write_bundle(replace(spec, contract=contract), target)
    start, stops = run_in_child("runtime_probe:special_ids", str(target))
    assert start == 1
    assert stops == [[2], [300]]
    prompt = [{"role": "user", "content": "hello"}]
    assert run_in_child("runtime_probe:render", str(target), [None], [prompt]) == [["hello"]]


def test_b26_suppressed_tokens_are_never_emitted(flatbuffer: Path, tmp_path: Path) -> None:
    """After token t the table model prefers t + 1; a suppressed successor must not come."""
    import numpy as np

    ids = JSON.encode("cat")
    table = successor_table(420)
    last = ids[-1]
    table[last, 415] = 50.0  # an untrained row of a padded vocabulary wins
    table[last, 50] = 20.0
    table[50, 2] = 20.0
    model = write_table_model(tmp_path / "m.tflite", table.astype(np.float32))
    texts = []
    for suppressed in ((), tuple(range(400, 420))):
        target = tmp_path / f"{len(suppressed)}.litertlm"
        spec = BundleSpec(model, JSON, PromptContract(None, (2,)), 64, {}, suppressed)
        write_bundle(spec, target)
        texts.append(run_in_child("runtime_probe:generate", str(target), "cat"))
    assert texts[1] == JSON.decode([50])
    assert texts[0] != texts[1]


def test_both_stop_tokens_end_the_answer(flatbuffer: Path, tmp_path: Path) -> None:
    """The planted fault: with one of two enders missing the text runs on."""
    table = successor_table(420)
    last = JSON.encode("cat")[-1]
    table[last, 60], table[60, 300] = 50.0, 50.0
    model = write_table_model(tmp_path / "m.tflite", table)
    answers = {}
    for stops in ((2,), (2, 300)):
        target = tmp_path / f"{len(stops)}.litertlm"
        write_bundle(BundleSpec(model, JSON, PromptContract(None, stops), 64), target)
        answers[stops] = run_in_child("runtime_probe:generate", str(target), "cat")
    assert answers[(2, 300)] == JSON.decode([60])
    assert answers[(2,)].startswith(answers[(2, 300)])
    assert len(answers[(2,)]) > len(answers[(2, 300)])


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"model": Path("absent.tflite")}, "absent"),
        ({"contract": PromptContract(None, ())}, "stop token"),
        ({"contract": PromptContract(None, (-1,))}, "negative"),
        ({"max_num_tokens": 0}, "max_num_tokens"),
        ({"metadata": {"uuid": "x"}}, "uuid"),
        ({"suppress_tokens": (2,)}, "suppressed"),
    ],
)
def test_specs_that_contradict_themselves(
    spec: BundleSpec, tmp_path: Path, change: dict[str, object], word: str
) -> None:
    with pytest.raises(BadInputError, match=word):
        write_bundle(replace(spec, **change), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_full_disk_is_a_resource_error(spec: BundleSpec) -> None:
    with pytest.raises(ResourceError, match="space"):
        write_bundle(spec, Path("/dev/full"))


def test_a_builder_that_drops_something_is_noticed(
    spec: BundleSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted: the metadata handed to the builder lacks what the spec asks for."""
    lossy = replace(spec, contract=replace(spec.contract, stop_token_ids=(2,)))
    build = bundle_module._llm_metadata
    monkeypatch.setattr(bundle_module, "_llm_metadata", lambda _: build(lossy))
    with pytest.raises(NativeToolError, match="stop tokens"):
        write_bundle(spec, tmp_path / "out")


def test_reading_needs_no_torch(spec: BundleSpec, tmp_path: Path) -> None:
    write_bundle(spec, tmp_path / "out")
    code = (
        "import sys; from pathlib import Path; from converters.bundle_reader import read_bundle; "
        f"read_bundle(Path({str(tmp_path / 'out')!r})).tokenizer; "
        "print([m for m in ('torch', 'litert_torch', 'litert_lm') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout.strip() == "[]", result.stderr


@pytest.mark.parametrize(
    ("generation", "stops"),
    [
        ({"bos_token_id": 0, "eos_token_id": [1, 2]}, (1, 2)),
        ({"bos_token_id": 0, "eos_token_id": 1}, (1, 2)),
        ({"bos_token_id": 0, "eos_token_id": None}, (2,)),
        ({"bos_token_id": 0}, (2,)),
        ({"bos_token_id": 0, "eos_token_id": [1, 999]}, None),
    ],
)
def test_b33_stop_tokens_read_back_from_the_bundle(
    flatbuffer: Path,
    tmp_path: Path,
    generation: dict[str, object],
    stops: tuple[int, ...] | None,
) -> None:
    tokenizer = SentencePieceTokenizer(tiny_bundle.train_sentencepiece(), "toy")
    settings = tmp_path / "tokenizer_config.json"
    settings.write_text(json.dumps({"eos_token": "</s>"}))
    checkpoint = Checkpoint(
        tmp_path,
        {},
        generation_config=generation,
        tokenizer_files={"tokenizer_config.json": settings},
    )
    config = HermesConfig(vocab_size=128, bos_token_id=None, eos_token_id=None)
    if stops is None:
        with pytest.raises(BadInputError, match="999"):
            prompt_contract(tokenizer, checkpoint, config)
        return
    contract = prompt_contract(tokenizer, checkpoint, config)
    write_bundle(BundleSpec(flatbuffer, tokenizer, contract, 64), tmp_path / "out")
    assert read_bundle(tmp_path / "out").prompt.stop_token_ids == stops
