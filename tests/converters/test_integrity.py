"""`hermes check`: any changed bit is found, in the part that it is in, on any machine."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import tiny_bundle
import toy_tokenizers

from converters.bundle import BundleSpec, stamp_metadata, write_bundle
from converters.integrity import check_integrity
from hermes.cli import app, run_command
from hermes.deploy.card import BLANK_CARD, CARD_KEY, REPORT_KEY, card_path, inside
from hermes.errors import BadInputError
from hermes.tokenizer import PromptContract
from hermes.tokenizer.huggingface import read_tokenizer_json

JSON = read_tokenizer_json(json.dumps(toy_tokenizers.byte_level_json()).encode(), "toy")


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    (folder / "m.tflite").write_bytes(random.Random(1).randbytes(30_011))
    metadata = {REPORT_KEY: "0" * 64, CARD_KEY: BLANK_CARD}
    spec = BundleSpec(folder / "m.tflite", JSON, PromptContract(1, (2,)), 64, metadata)
    write_bundle(spec, folder / "whole.litertlm")
    return folder / "whole.litertlm"


@contextmanager
def flipped(path: Path, offset: int, bit: int) -> Iterator[None]:
    """One bit of the file is different inside the block."""
    with path.open("r+b") as file:
        file.seek(offset)
        (byte,) = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ 1 << bit]))
        file.flush()
        try:
            yield
        finally:
            file.seek(offset)
            file.write(bytes([byte]))


def refusal(path: Path) -> str:
    with pytest.raises(BadInputError) as caught:
        check_integrity(path).demand()
    return str(caught.value)


def test_a_whole_bundle_is_proven(bundle: Path) -> None:
    found = check_integrity(bundle).demand()
    assert found.proven
    kinds = {part.kind for part in found.parts}
    assert kinds == {"LlmMetadataProto", "HF_Tokenizer_Zlib", "TFLiteModel"}
    assert found.size == bundle.stat().st_size


def test_a_thousand_flipped_bits_are_all_found_and_placed(bundle: Path) -> None:
    draw = random.Random(8)
    parts = check_integrity(bundle).parts
    first = min(part.begin for part in parts)
    size = bundle.stat().st_size
    # Half of them in header and padding, which a file's random positions would hardly ever hit.
    positions = [draw.randrange(size) for _ in range(500)] + draw.choices(range(first), k=500)
    for offset in positions:
        with flipped(bundle, offset, draw.randrange(8)):
            message = refusal(bundle)
        owner = [part.kind for part in parts if part.begin <= offset < part.end]
        assert str(bundle) in message
        assert not owner or f"section {owner[0]}: SHA-256" in message
    assert check_integrity(bundle).proven


def test_one_bit_in_every_byte_of_the_header(bundle: Path) -> None:
    end = int.from_bytes(bundle.read_bytes()[24:32], "little")
    draw = random.Random(9)
    for offset in range(end):
        with flipped(bundle, offset, draw.randrange(8)):
            refusal(bundle)


def test_the_digest_is_covered_too(bundle: Path) -> None:
    digest = str(check_integrity(bundle).digest).encode()
    start = bundle.read_bytes().index(digest)
    for offset in range(start, start + len(digest)):
        for bit in (0, 4):
            with flipped(bundle, offset, bit):
                assert "header (bytes 0 to" in refusal(bundle)


def test_without_its_key_a_hermes_bundle_is_not_taken_for_a_foreign_one(bundle: Path) -> None:
    offset = bundle.read_bytes().index(b"hermes_digest")
    with flipped(bundle, offset + len("hermes_diges"), 0):
        assert "no hermes_digest" in refusal(bundle)


def test_padding_is_named(bundle: Path) -> None:
    model = next(part for part in check_integrity(bundle).parts if part.kind == "TFLiteModel")
    with flipped(bundle, model.begin - 3, 5):
        assert f"byte {model.begin - 3} is not zero" in refusal(bundle)


def test_two_hundred_truncations_and_additions(bundle: Path, tmp_path: Path) -> None:
    data, draw = bundle.read_bytes(), random.Random(10)
    target = tmp_path / "cut.litertlm"
    sizes = [draw.randrange(len(data)) for _ in range(190)]
    for size in [*sizes, *range(len(data) - 10, len(data))]:
        target.write_bytes(data[:size])
        assert str(target) in refusal(target)
    for extra in (b"\0", b"x" * 70_000):
        target.write_bytes(data + extra)
        assert f"{len(extra)} bytes follow the last section" in refusal(target)


def test_garbage_is_refused_in_one_message(tmp_path: Path) -> None:
    draw, target = random.Random(11), tmp_path / "garbage.litertlm"
    for _ in range(200):
        noise = draw.randbytes(draw.choice([0, 1, 31, 32, 200, 40_000]))
        header = b"LITERTLM" + (1).to_bytes(4, "little") + bytes(12) + (200).to_bytes(8, "little")
        target.write_bytes(draw.choice([noise, header + noise]))
        with pytest.raises(BadInputError):
            check_integrity(target)
    with pytest.raises(BadInputError, match="absent"):
        check_integrity(tmp_path / "absent.litertlm")
    with pytest.raises(BadInputError):
        check_integrity(tmp_path)


def test_stamping_keeps_it_proven_and_the_bytes_repeatable(bundle: Path, tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    for target in (one, two):
        target.write_bytes(bundle.read_bytes())
        stamp_metadata(target, {REPORT_KEY: "1" * 64, CARD_KEY: inside({"verdict": "fine"})})
    assert one.read_bytes() == two.read_bytes()
    found = check_integrity(one)
    assert found.proven
    assert found.digest != check_integrity(bundle).digest


def test_the_command_tells_what_it_found(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(app, ["check", str(bundle)]) == 0
    assert "INTACT" in capsys.readouterr().out
    assert run_command(app, ["check", str(bundle), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["proven"]
    with flipped(bundle, bundle.stat().st_size - 1, 0):
        assert run_command(app, ["check", str(bundle)]) == 3
    errors = capsys.readouterr().err
    assert errors.count("error:") == 1
    assert "section " in errors


def test_a_card_of_another_file(
    bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "a.litertlm"
    target.write_bytes(bundle.read_bytes())
    card_path(target).write_text(json.dumps({"digest": check_integrity(bundle).digest}))
    assert run_command(app, ["check", str(target)]) == 0
    assert "the card beside it belongs to it" in capsys.readouterr().out
    card_path(target).write_text(json.dumps({"digest": "1" * 64}))
    assert run_command(app, ["check", str(target)]) == 6
    assert "another file" in capsys.readouterr().err
    for broken in ("[1]", "{", "\0"):
        card_path(target).write_text(broken)
        assert run_command(app, ["check", str(target)]) == 3


def test_another_exporters_bundle_is_not_called_proven(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The official builder alone writes no hashes, so a flipped weight cannot be seen."""
    from table_model import successor_table, write_table_model

    model = write_table_model(tmp_path / "m.tflite", successor_table(128))
    target = tiny_bundle.write_bundle(model, tmp_path / "foreign.litertlm")
    assert run_command(app, ["check", str(target)]) == 0
    said = capsys.readouterr().out
    assert "NOT PROVABLE" in said
    assert "INTACT" not in said
    assert not check_integrity(target).proven


def test_checking_needs_no_torch_and_no_runtime(bundle: Path) -> None:
    code = (
        "import sys; from hermes.cli import app, run_command; "
        f"assert run_command(app, ['check', {str(bundle)!r}]) == 0; "
        "print([m for m in ('torch', 'litert_torch', 'litert_lm', 'ai_edge_litert', 'numpy') "
        "if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "[]", done.stderr
