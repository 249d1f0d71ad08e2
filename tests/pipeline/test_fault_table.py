"""At least 25 planted faults, each with the rung that must go red first.

`opening` stands for a file that is refused before the first rung.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from planted_faults import (
    Case,
    Rung,
    World,
    bound_in_wrong_order,
    build_world,
    contract,
    each,
    exported,
    four_bits,
    heads_reversed,
    lossy,
    lowered,
    misread,
    other_model_in_the_runtime,
    other_tokenizer,
    outliers,
    permuted,
    prompted,
    quantized,
    same,
    setting,
    spaced,
    swap,
    tied,
    unaccounted,
    unadapted,
    untied,
    wrong_rewrite,
)

from converters.bundle import read_bundle
from hermes.cli import app, run_command
from hermes.errors import BadInputError


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return build_world(tmp_path_factory.mktemp("world"))


# Before the first rung: the file itself is damaged.


def damaged(change: Callable[[bytearray, int], object]) -> Case:
    """`change` gets the bundle's bytes and the middle of its weights."""

    def run(world: World, folder: Path) -> Rung | None:
        section = read_bundle(world.bundle).section("TFLiteModel")
        data = bytearray(world.bundle.read_bytes())
        change(data, section.offset + section.size - section.size // 4)
        target = folder / "damaged.litertlm"
        target.write_bytes(data)
        checkpoint = str(world.source.checkpoint.path)
        assert run_command(app, ["verify", str(target), "--against", checkpoint]) == 3
        with pytest.raises(BadInputError):
            read_bundle(target)
        return "opening"

    return run


def flip(data: bytearray, place: int) -> None:
    data[place] ^= 1


def cut(data: bytearray, place: int) -> None:
    del data[place:]


FAULTS: dict[str, tuple[Rung, Case]] = {
    "a tensor nobody uses": (0, unaccounted),
    "pairs read as halves": (1, misread(same, style="interleaved")),
    "halves read as pairs": (1, misread(each("k_proj", permuted))),
    "rotary base": (1, misread(setting(rope_theta=20000.0))),
    "eps": (1, misread(setting(rms_norm_eps=1e-3))),
    "norms swapped": (1, misread(swap("0.input_layernorm", "0.post_attention_layernorm"))),
    "gate and up swapped": (1, misread(swap("1.mlp.gate_proj", "1.mlp.up_proj"))),
    "kv heads serve other groups": (1, misread(each("v_proj", heads_reversed))),
    "head tied that was not": (1, misread(tied)),
    "head of its own, wrong rows": (1, misread(untied)),
    "two layers' weights swapped": (1, misread(swap("0.mlp.down_proj", "1.mlp.down_proj"))),
    "square matrix transposed": (1, misread(each("0.self_attn.o_proj", torch.t))),
    "gain folded into another layer": (2, wrong_rewrite),
    "cache position off by one": (3, exported("cache position off by one")),
    "cache not written by prefill": (3, exported("prefill not written")),
    "last slot written one early": (3, exported("last slot written one early")),
    "mask too weak": (3, exported("closed mask too weak")),
    "mask leaks one future position": (3, exported("one future slot open")),
    "padding rows visible": (3, exported("pads visible")),
    "padding scattered to row 0": (3, exported("pads scattered to row 0")),
    "NaN in padding rows": (3, exported("NaN in padding rows")),
    "chunks restart at position 0": (3, exported("chunks restart at position 0")),
    "positions counted from the bucket": (3, exported("positions counted from the bucket")),
    "rotary pairs in the file only": (4, lowered("rotary pairs interleaved")),
    "weights bound to other layers": (4, bound_in_wrong_order),
    "int4 where int8 was asked": (5, quantized("channel", each("proj", four_bits))),
    "one scale per tensor": (5, quantized("tensor", outliers)),
    "another tokenizer file": (6, prompted(other_tokenizer)),
    "lossy SentencePiece rebuild": (6, prompted(lossy)),
    "start token doubled": (6, prompted(contract(start_token_id=1), chat=True)),
    "start token missing": (6, prompted(contract(start_token_id=None))),
    "stop token missing": (6, prompted(contract(stop_token_ids=(5,)))),
    "template ends in another space": (6, prompted(spaced, chat=True)),
    "template needs string content": (6, prompted(unadapted, chat=True)),
    "context larger than the cache": (6, prompted(lambda spec: replace(spec, max_num_tokens=65))),
    "another model in the runtime": (7, other_model_in_the_runtime),
    "bundle cut short": ("opening", damaged(cut)),
    "one bit flipped in the weights": ("opening", damaged(flip)),
}


def test_the_table_is_as_long_as_promised() -> None:
    assert len(FAULTS) >= 25
    assert {rung for rung, _ in FAULTS.values()} == {0, 1, 2, 3, 4, 5, 6, 7, "opening"}


@pytest.mark.parametrize("name", FAULTS)
def test_fault(name: str, world: World, tmp_path: Path) -> None:
    expected, run = FAULTS[name]
    assert run(world, tmp_path) == expected


# The same paths without a fault are green: the table's reds come from its faults.
RIGHT: dict[str, Case] = {
    "training code": misread(same),
    "export": exported("none"),
    "int8": quantized("channel", same),
    "plain bundle": prompted(lambda spec: spec),
    "chat bundle": prompted(lambda spec: spec, chat=True),
}


@pytest.mark.parametrize("name", RIGHT)
def test_without_a_fault_the_same_path_is_green(name: str, world: World, tmp_path: Path) -> None:
    assert RIGHT[name](world, tmp_path) is None
