"""tokenizer.json: the bytes that go into the bundle, and what is refused."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest
import toy_tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from hermes.errors import BadInputError, UnsupportedModelError
from hermes.tokenizer import open_tokenizer
from hermes.tokenizer.huggingface import read_tokenizer_json

TOY = toy_tokenizers.byte_level_json()
PROBES = [chr(code) for code in range(0xA0, 0x180)]
PROBES += ["\U0001f60a", "Hello! \U0001f60a", "\u00a0", "<|im_start|>user\nhi<|im_end|>"]


def read(values: dict[str, object]) -> object:
    return read_tokenizer_json(json.dumps(values).encode(), "toy")


def test_b28_byte_level_bpe_keeps_its_bytes(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(TOY))
    original, ours = Tokenizer.from_file(str(path)), open_tokenizer(tmp_path)
    assert ours.kind == "huggingface"
    assert ours.data == path.read_bytes()
    for probe in PROBES:
        ids = ours.encode(probe)
        assert ids == original.encode(probe).ids
        assert ours.decode(ids) == probe
    emoji = ours.encode("\U0001f60a")
    assert [ours.decode([token]) for token in emoji] == ["\ufffd"] * 4
    assert 2 not in emoji


def test_truncation_and_padding_are_taken_out() -> None:
    truncation = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    padding = {
        "strategy": {"Fixed": 16},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "<|endoftext|>",
    }
    tokenizer = read({**TOY, "truncation": truncation, "padding": padding})
    assert len(tokenizer.encode("the cat sat on the mat")) > 3
    kept = json.loads(tokenizer.data)
    assert kept == {**TOY, "truncation": None, "padding": None}


def test_special_tokens_count_and_none_are_added() -> None:
    template = {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": "<|im_start|>", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {
            "<|im_start|>": {"id": "<|im_start|>", "ids": [1], "tokens": ["<|im_start|>"]}
        },
    }
    tokenizer = read({**TOY, "post_processor": template})
    assert tokenizer.encode("<|im_end|>a")[0] == 2
    assert tokenizer.encode("a") == read(TOY).encode("a")
    assert tokenizer.leading_ids() == [1]
    assert read(TOY).leading_ids() == []


def test_pieces_and_ids() -> None:
    tokenizer = read(TOY)
    assert tokenizer.vocab_size == len(TOY["model"]["vocab"])
    assert tokenizer.token_id("<|im_end|>") == 2
    assert tokenizer.piece(2) == "<|im_end|>"
    assert tokenizer.token_id("no such piece") is None
    assert tokenizer.special_pieces == {text: i for i, text in enumerate(toy_tokenizers.SPECIAL)}
    with pytest.raises(IndexError, match="outside"):
        tokenizer.decode([tokenizer.vocab_size])


def test_holes_in_the_vocabulary() -> None:
    added = {**TOY["added_tokens"][0], "id": 450, "content": "<far>"}
    tokenizer = read({**TOY, "added_tokens": [*TOY["added_tokens"], added]})
    # The library renumbers an added token behind the vocabulary; what it says is what counts.
    far = tokenizer.token_id("<far>")
    assert far is not None
    assert tokenizer.vocab_size == far + 1
    assert tokenizer.encode("<far>") == [far]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model": {"type": "Quantum"}}, ["model", "Quantum"]),
        ({"pre_tokenizer": {"type": "Bogus"}}, ["pre_tokenizer", "Bogus"]),
        (
            {
                "normalizer": {"type": "Sequence", "normalizers": [{"type": "Nope"}]},
                "decoder": {"type": "Odd"},
            },
            ["normalizer", "Nope", "decoder", "Odd"],
        ),
    ],
)
def test_components_that_abort_the_runtime_are_refused(
    change: dict[str, object], words: list[str]
) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        read({**TOY, **change})
    assert all(word in str(caught.value) for word in words)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"{}",
        b'{"model": 3}',
        b"\xff\xfe",
        b'{"model": {"type": "BPE"}}',
        b'{"model": {"type": "BPE", "vocab": {}, "merges": []}}',
        b'{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": [["a", "b"]]}}',
        b'{"model": {"type": "BPE", "vocab": {"a": -1}, "merges": []}}',
        b"[" * 5000,
        b'{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": [], "unk_token": "?"}}',
    ],
)
def test_damaged_files_are_refused(data: bytes) -> None:
    with pytest.raises(BadInputError, match="toy"):
        read_tokenizer_json(data, "toy")


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_mutated_files_never_end_the_process(data: st.DataObject) -> None:
    raw = bytearray(json.dumps(TOY).encode())
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(BadInputError, UnsupportedModelError):
        read_tokenizer_json(bytes(raw), "mutated").encode("the cat")
