"""The export card: what travels inside the bundle, what lies beside it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hermes.deploy.card import (
    CARD_ROOM,
    beside,
    card_path,
    essentials,
    inside,
    read_card,
    read_inside,
    write_card,
)
from hermes.errors import BadInputError, ResourceError
from hermes.report.check import Report, at_most, holds


def report(files: int = 2, value: float = 0.01) -> Report:
    return Report(
        [at_most("KL to the reference", 5, value, 0.03), holds("chat template", 6, True, "equal")],
        {1: "no --golden"},
        {
            "machine": {"hermes": "1.2", "packages": {"torch": "2"}, "processor": "one"},
            "recipe": {"name": "int8", "export": {"context": 64, "prefill": [1, 8]}},
            "config": {"num_layers": {"value": 3, "source": "config.json"}},
            "inputs": {f"model-{number}.safetensors": "0" * 64 for number in range(files)},
            "bundle": {"path": "/somewhere/m.litertlm", "bytes": 5, "sha256": "1" * 64},
            "fingerprint": "2" * 64,
        },
    )


def test_the_inner_card_holds_no_measured_value_and_no_machine() -> None:
    one, other = report(value=0.01), report(value=0.02)
    other.facts["machine"]["processor"] = "another"
    assert inside(essentials(one)) == inside(essentials(other))
    card = essentials(one)
    assert card["verdict"] == "PASSED: 2 checks on rungs 5, 6"
    assert (card["checks"], card["not_run"]) == ({"5": 1, "6": 1}, [1])
    assert (card["model"], card["context"], card["recipe"]) == ({"num_layers": 3}, 64, "int8")


def test_the_outer_card_adds_hashes_and_measured_values() -> None:
    card = beside(report(), "3" * 64)
    assert essentials(report()).items() <= card.items()
    assert card["measured"] == {"KL to the reference": 0.01}
    assert (card["file"], card["sha256"], card["digest"]) == ("m.litertlm", "1" * 64, "3" * 64)
    assert card["report"] == "2" * 64


def test_the_inner_card_has_one_length_whatever_it_holds() -> None:
    for files in (0, 2, 8, 9, 500):
        text = inside(essentials(report(files)))
        assert len(text) == CARD_ROOM
        assert text.isascii()
        assert read_inside(text) == essentials(report(files))
    assert essentials(report(500))["inputs"] == {"files": 500}
    with pytest.raises(BadInputError, match="2048"):
        inside({"verdict": "x" * 3000})


@pytest.mark.parametrize("value", ["", " ", "{", "[1]", "\0", 7, None])
def test_what_is_no_card_inside_is_none(value: object) -> None:
    assert read_inside(value) == {}


def test_written_as_a_whole_and_read_back(tmp_path: Path) -> None:
    bundle = tmp_path / "m.litertlm"
    assert read_card(bundle) is None
    write_card(bundle, {"digest": "x"})
    assert read_card(bundle) == {"digest": "x"}
    assert [path.name for path in tmp_path.iterdir()] == [card_path(bundle).name]
    card_path(bundle).write_text(json.dumps([1]))
    with pytest.raises(BadInputError, match="card"):
        read_card(bundle)


def test_no_room_for_the_card_is_a_resource_error(tmp_path: Path) -> None:
    with pytest.raises(ResourceError, match="card"):
        write_card(tmp_path / "absent" / "m.litertlm", {})
