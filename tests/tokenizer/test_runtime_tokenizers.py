"""The runtime's tokenizer gives the ids and texts that ours gives."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import toy_tokenizers
from table_model import successor_table, write_table_model
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from converters.bundle import BundleSpec, write_bundle
from hermes.runners.child import run_in_child
from hermes.tokenizer import PromptContract, tokenizer_from_gguf
from hermes.tokenizer.huggingface import RUNTIME_TYPES, read_tokenizer_json
from hermes.tokenizer.interface import Tokenizer as HermesTokenizer
from hermes.tokenizer.sentencepiece import SentencePieceTokenizer

PROBES = [chr(code) for code in range(1, 0x180)] + toy_tokenizers.random_texts(150)
PROBES += ["\U0001f60a", "Hello! \U0001f60a", "\u00a0", "<|im_start|>user\nhi<|im_end|>", "", " "]


@pytest.fixture(scope="module")
def bundled(tmp_path_factory: pytest.TempPathFactory) -> Callable[[HermesTokenizer], str]:
    folder = tmp_path_factory.mktemp("runtime")
    model = write_table_model(folder / "model.tflite", successor_table(128))

    def write(tokenizer: HermesTokenizer) -> str:
        target = folder / "bundle.litertlm"
        write_bundle(BundleSpec(model, tokenizer, PromptContract(None, (2,)), 64), target)
        return str(target)

    return write


def tokenizers() -> dict[str, HermesTokenizer]:
    settings = toy_tokenizers.byte_level_json()
    truncation = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    cut = {**settings, "truncation": truncation}
    found: dict[str, HermesTokenizer] = {
        "byte-level json": read_tokenizer_json(json.dumps(settings).encode(), "toy"),
        "with truncation": read_tokenizer_json(json.dumps(cut).encode(), "toy"),
        "sentencepiece": SentencePieceTokenizer(toy_tokenizers.sentencepiece_model(), "toy"),
        "unigram": SentencePieceTokenizer(
            toy_tokenizers.sentencepiece_model(
                model_type="unigram", normalization_rule_name="nmt_nfkc"
            ),
            "toy",
        ),
    }
    for pre in ("smollm", "llama-bpe", "qwen2", "default"):
        metadata = toy_tokenizers.gguf_metadata(settings, pre)
        found[f"gguf {pre}"] = tokenizer_from_gguf(metadata)
    return found


@pytest.mark.parametrize("name", tokenizers())
def test_b28_ids_and_texts_in_the_runtime(
    bundled: Callable[[HermesTokenizer], str], name: str
) -> None:
    ours = tokenizers()[name]
    ids = [ours.encode(text) for text in PROBES]
    bundle = bundled(ours)
    assert run_in_child("runtime_probe:tokenize", bundle, PROBES) == ids
    texts = [ours.decode(sequence) for sequence in ids]
    assert run_in_child("runtime_probe:detokenize", bundle, ids) == texts


def test_b28_streamed_text_holds_incomplete_characters_back(tmp_path: Path) -> None:
    ours = tokenizers()["byte-level json"]
    emoji = ours.encode("\U0001f60a")
    assert len(emoji) == 4
    table = np.zeros((ours.vocab_size, ours.vocab_size), np.float32)
    for before, after in zip([ours.encode("a")[-1], *emoji], [*emoji, 2], strict=True):
        table[before, after] = 10.0
    model = write_table_model(tmp_path / "m.tflite", table)
    target = tmp_path / "bundle.litertlm"
    write_bundle(BundleSpec(model, ours, PromptContract(None, (2,)), 64), target)
    chunks = run_in_child("runtime_probe:stream", str(target), "a")
    assert "".join(chunks) == "\U0001f60a"
    assert all("\ufffd" not in chunk for chunk in chunks)


def character_map() -> bytes:
    """The compiled NFKC rules of a SentencePiece model."""
    from sentencepiece import sentencepiece_model_pb2

    data = toy_tokenizers.sentencepiece_model(normalization_rule_name="nmt_nfkc")
    model = sentencepiece_model_pb2.ModelProto.FromString(data)
    return bytes(model.normalizer_spec.precompiled_charsmap)


def component_tokenizers() -> dict[str, Tokenizer]:
    """One tokenizer for every component type that `read_tokenizer_json` lets through."""
    vocabulary = {chr(code): index for index, code in enumerate(range(33, 127))}
    vocabulary |= {"[UNK]": 94, "\u2581": 95, "\u0120": 96, " ": 97, "##a": 98}
    built: dict[str, Tokenizer] = {}

    def add(name: str, model: object = None, **parts: object) -> None:
        default = models.BPE(vocab=dict(vocabulary), merges=[], unk_token="[UNK]")
        built[name] = Tokenizer(default if model is None else model)
        for part, value in parts.items():
            setattr(built[name], part, value)

    add("model BPE")
    add("model Unigram", models.Unigram([("[UNK]", 0.0), ("a", -1.0), ("b", -2.0)], 0, False))
    add("model WordLevel", models.WordLevel(dict(vocabulary), unk_token="[UNK]"))
    add("model WordPiece", models.WordPiece(dict(vocabulary), unk_token="[UNK]"))
    for name in sorted(RUNTIME_TYPES["normalizer"] - {"Prepend", "Replace", "Precompiled"}):
        argument = [[normalizers.NFC()]] if name == "Sequence" else []
        add(f"normalizer {name}", normalizer=getattr(normalizers, name)(*argument))
    add("normalizer Precompiled", normalizer=normalizers.Precompiled(character_map()))
    add("normalizer Prepend", normalizer=normalizers.Prepend("\u2581"))
    add("normalizer Replace", normalizer=normalizers.Replace(Regex(r"\s+"), "\u2581"))
    special = {
        "CharDelimiterSplit": ["-"],
        "FixedLength": [3],
        "Split": [Regex(r"\s+(?!\S)|(?i:'s)|\p{N}{1,3}"), "isolated"],
        "Sequence": [[pre_tokenizers.Digits()]],
    }
    for name in sorted(RUNTIME_TYPES["pre_tokenizer"]):
        value = getattr(pre_tokenizers, name)(*special.get(name, []))
        add(f"pre_tokenizer {name}", pre_tokenizer=value)
    special = {"Replace": ["\u2581", " "], "Strip": [" ", 1, 0], "Sequence": [[decoders.Fuse()]]}
    for name in sorted(RUNTIME_TYPES["decoder"]):
        add(f"decoder {name}", decoder=getattr(decoders, name)(*special.get(name, [])))
    pair = [("a", 64), ("b", 65)]
    add("post_processor BertProcessing", post_processor=processors.BertProcessing(*pair))
    add("post_processor RobertaProcessing", post_processor=processors.RobertaProcessing(*pair))
    add("post_processor ByteLevel", post_processor=processors.ByteLevel())
    template = processors.TemplateProcessing(single="a $A", special_tokens=pair[:1])
    add("post_processor TemplateProcessing", post_processor=template)
    add("post_processor Sequence", post_processor=processors.Sequence([processors.ByteLevel()]))
    return built


def test_every_allowed_component_works_in_the_runtime(tmp_path: Path) -> None:
    built = component_tokenizers()
    covered = {f"{part} {name}" for part, names in RUNTIME_TYPES.items() for name in names}
    assert covered == set(built)
    texts = ["ab-1 2 A'b", "\u00c0B  c", "a b", "\ufb01 \uff21"]
    model = write_table_model(tmp_path / "model.tflite", successor_table(128))
    bundles, wanted = [], {}
    for number, (name, tokenizer) in enumerate(built.items()):
        ours = read_tokenizer_json(tokenizer.to_str().encode(), name)
        wanted[name] = [ours.encode(text) for text in texts]
        target = tmp_path / f"{number}.litertlm"
        write_bundle(BundleSpec(model, ours, PromptContract(None, (2,)), 64), target)
        bundles.append(str(target))
    found = run_in_child("runtime_probe:tokenize_all", bundles, texts)
    assert dict(zip(built, found, strict=True)) == wanted
