"""Our reader of torch files against torch's own, and what it refuses."""

from __future__ import annotations

import argparse
import datetime
import enum
import io
import pickle
import random
import subprocess
import sys
import types
import zipfile
from collections import Counter, OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from tiny_llama import tiny_config, tiny_weights

from hermes.checkpoint import open_checkpoint
from hermes.checkpoint.tensor_pickle import ForeignObject, load_tensor_pickle
from hermes.errors import BadInputError, UnsupportedModelError

CONFIG = tiny_config(tie_word_embeddings=False)
BASE = torch.arange(120, dtype=torch.float32).reshape(10, 12)
TENSORS = {
    "plain": BASE,
    "transposed": BASE.T,
    "slice": BASE[2:7, 3:9],
    "shared": BASE[4],
    "half": BASE.half(),
    "bfloat": BASE.bfloat16(),
    "double": BASE.double(),
    "long": torch.arange(5),
    "flag": torch.tensor([True, False]),
    "scalar": torch.tensor(2.5),
    "empty": torch.empty(0, 4),
    "parameter": torch.nn.Parameter(BASE + 1),
}


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("make", [dict, OrderedDict])
def test_reads_what_torch_reads(tmp_path: Path, zipped: bool, make: Any) -> None:
    path = tmp_path / "model.pt"
    torch.save(make(TENSORS), path, _use_new_zipfile_serialization=zipped)
    wanted = torch.load(path, weights_only=True)
    found = open_checkpoint(path).tensors
    assert list(found) == list(TENSORS)
    for name, tensor in found.items():
        value = tensor.read()
        assert value.dtype == wanted[name].dtype
        assert value.shape == tensor.shape == wanted[name].shape
        assert torch.equal(value, wanted[name])
        if tensor.shape and tensor.shape[0] > 3:
            assert torch.equal(tensor.read(1, 3), wanted[name][1:3])


def test_module_state_dict_with_metadata(tmp_path: Path) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.LayerNorm(4))
    torch.save(module.state_dict(), tmp_path / "model.pt")
    found = open_checkpoint(tmp_path / "model.pt").tensors
    for name, value in module.state_dict().items():
        assert torch.equal(found[name].read(), value)


def test_opening_does_not_import_torch_or_read_data(tmp_path: Path) -> None:
    torch.save(tiny_weights(CONFIG), tmp_path / "model.pt")
    program = (
        "import sys; from pathlib import Path; from hermes.checkpoint import open_checkpoint; "
        f"c = open_checkpoint(Path({str(tmp_path / 'model.pt')!r})); "
        "assert len(c.tensors) == 21; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


@dataclass
class TrainingConfig:
    hidden_size: int = 64
    rope_theta: float = 5e4
    note: str = "mine"


def test_a_config_object_of_unknown_class_is_read_as_data(tmp_path: Path) -> None:
    torch.save({"model": tiny_weights(CONFIG), "config": TrainingConfig()}, tmp_path / "model.pt")
    found = open_checkpoint(tmp_path / "model.pt")
    assert found.config == {"hidden_size": 64, "rope_theta": 5e4, "note": "mine"}


class Precision(enum.Enum):
    HALF = 16


def test_what_training_scripts_save_beside_the_weights(tmp_path: Path) -> None:
    module = torch.nn.Linear(3, 4)
    optimizer = torch.optim.AdamW(module.parameters())
    module(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1.0, total_steps=10)
    content = {
        "model": module.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
        "rng_state": {
            "python": random.getstate(),
            "numpy": numpy.random.get_state(),
            "generator": numpy.random.default_rng(1),
            "torch": torch.get_rng_state(),
        },
        "best": numpy.float64(1.5),
        "array": numpy.arange(4),
        "path": Path("a/b"),
        "when": datetime.datetime(2026, 1, 1),
        "precision": Precision.HALF,
        "args": argparse.Namespace(dim=64, names={"a", "b"}),
        "more": types.SimpleNamespace(x=1),
        "counts": Counter("abca"),
        "seen": frozenset([1, 2]),
        "dtype": torch.bfloat16,
        "device": torch.device("cpu"),
    }
    for zipped in (True, False):
        torch.save(content, tmp_path / "model.pt", _use_new_zipfile_serialization=zipped)
        found = open_checkpoint(tmp_path / "model.pt")
        assert set(found.tensors) == {"weight", "bias"}
        assert torch.equal(found.tensors["weight"].read(), module.weight)
        assert found.config is not None
        assert found.config["dim"] == 64
        assert set(found.config["names"]) == {"a", "b"}


def test_a_whole_pickled_module_gives_its_parameters(tmp_path: Path) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.LayerNorm(4))
    module.register_buffer("scratch", torch.ones(2), persistent=False)
    torch.save(module, tmp_path / "model.pt")
    found = open_checkpoint(tmp_path / "model.pt")
    assert set(found.tensors) == set(module.state_dict())
    assert any("its code was not run" in note for note in found.notes)


class Trap:
    """Runs a function when unpickled."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return self.call


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize(
    "trap",
    [
        Trap(exec, "open('touched', 'w')"),
        Trap(eval, "1"),
        Trap(subprocess.Popen, ["touch", "touched"]),
        Trap(getattr, dict, "fromkeys"),
        Trap(getattr, Precision, "__class__"),
        Trap(getattr, Precision, "_member_map_"),
        Trap(getattr, Precision, "HALF.value"),
        Trap(getattr, Precision, "HALF", None),
        Trap(getattr, Trap(getattr, Precision, "HALF"), "value"),
        Trap(getattr, TrainingConfig(), "note"),
        Trap(getattr, subprocess.Popen, "wait"),
        Trap(getattr, subprocess.run, "func"),
        Trap(getattr, torch.Tensor, "numpy"),
        Trap(getattr, "text", "upper"),
        Trap(getattr, Precision, 5),
        Trap(torch.hub.load, "a", "b"),
    ],
)
def test_code_is_refused_and_never_run(
    tmp_path: Path, trap: Trap, zipped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    content = {"weight": torch.ones(2), "trap": trap}
    torch.save(content, tmp_path / "model.pt", _use_new_zipfile_serialization=zipped)
    with pytest.raises(BadInputError, match="without running anything") as caught:
        open_checkpoint(tmp_path / "model.pt")
    assert "weights_only=False" not in str(caught.value)
    assert not (tmp_path / "touched").exists()


class EarlyMember:
    """A member of an enum as Python 3.11.0 to 3.11.3 pickle it, whichever Python runs this."""

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return getattr, (Precision, "HALF")


@pytest.mark.parametrize("zipped", [True, False])
def test_an_enum_of_python_3_11_0_is_read_as_data(tmp_path: Path, zipped: bool) -> None:
    content = {"model": tiny_weights(CONFIG), "config": {"dim": 64, "precision": EarlyMember()}}
    torch.save(content, tmp_path / "model.pt", _use_new_zipfile_serialization=zipped)
    found = open_checkpoint(tmp_path / "model.pt")
    assert set(found.tensors) == set(tiny_weights(CONFIG))
    assert found.config is not None
    assert found.config["dim"] == 64
    member = load_tensor_pickle(io.BytesIO(pickle.dumps(EarlyMember(), 2)), tmp_path)
    assert isinstance(member, ForeignObject)
    assert member.class_name.endswith(".Precision")
    assert (member.arguments, member.attributes) == (("HALF",), {})


def test_a_member_cannot_be_called(tmp_path: Path) -> None:
    # As protocol 2 writes a nested class: getattr(Outer, "Inner"), and then the call of that.
    data = b"\x80\x02c__builtin__\ngetattr\nctraining\nOuter\nX\x05\x00\x00\x00Inner\x86R)R."
    with zipfile.ZipFile(tmp_path / "model.pt", "w") as archive:
        archive.writestr("a/data.pkl", data)
    with pytest.raises(BadInputError):
        open_checkpoint(tmp_path / "model.pt")


def test_a_pickle_cannot_change_the_reader(tmp_path: Path) -> None:
    # GLOBAL, then BUILD with slot values: sets attributes on whatever the GLOBAL gave.
    data = b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n}X\x04\x00\x00\x00nameK\x01s\x86b."
    data = b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\nN}X\x04\x00\x00\x00nameK\x01s\x86b."
    with zipfile.ZipFile(tmp_path / "model.pt", "w") as archive:
        archive.writestr("a/data.pkl", data)
    with pytest.raises(BadInputError, match="changes a constructor"):
        open_checkpoint(tmp_path / "model.pt")


def test_short_storage_record(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    torch.save({"a": torch.ones(8), "b": torch.zeros(8)}, path)
    with zipfile.ZipFile(path) as archive:
        records = {info.filename: archive.read(info) for info in archive.infolist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in records.items():
            archive.writestr(name, data[:12] if name.endswith("data/0") else data)
    with pytest.raises(BadInputError, match="12 bytes, 32 are declared"):
        open_checkpoint(path)


def test_zip_bomb(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    torch.save({"a": torch.zeros(2**20)}, path)
    with zipfile.ZipFile(path) as archive:
        records = {info.filename: archive.read(info) for info in archive.infolist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in records.items():
            archive.writestr(name, data)
    assert path.stat().st_size < 2**16
    with pytest.raises(BadInputError, match="compressed"):
        open_checkpoint(path)


def test_truncated(tmp_path: Path) -> None:
    for zipped in (True, False):
        path = tmp_path / "model.pt"
        torch.save(tiny_weights(CONFIG), path, _use_new_zipfile_serialization=zipped)
        data = path.read_bytes()
        for share in (0.1, 0.5, 0.98):
            path.write_bytes(data[: int(len(data) * share)])
            with pytest.raises(BadInputError):
                open_checkpoint(path)


def test_view_past_its_storage(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    tensor = torch.zeros(4)
    torch.save({"a": tensor}, path)
    with zipfile.ZipFile(path) as archive:
        records = {info.filename: archive.read(info) for info in archive.infolist()}
    name = next(name for name in records if name.endswith("data.pkl"))
    assert b"K\x04\x85" in records[name]
    records[name] = records[name].replace(b"K\x04\x85", b"K\x40\x85")
    with zipfile.ZipFile(path, "w") as archive:
        for entry, data in records.items():
            archive.writestr(entry, data)
    with pytest.raises(BadInputError, match="past the end of its storage"):
        open_checkpoint(path)


def test_quantized_tensor_is_refused_by_name(tmp_path: Path) -> None:
    quantized = torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8)
    torch.save({"a": torch.ones(3), "layer.weight": quantized}, tmp_path / "model.pt")
    with pytest.raises(UnsupportedModelError, match=r"layer\.weight: already quantized"):
        open_checkpoint(tmp_path / "model.pt")


def test_tensors_without_data_are_refused_by_name(tmp_path: Path) -> None:
    content = {"a": torch.ones(3), "layer.weight": torch.empty(3, device="meta")}
    torch.save(content, tmp_path / "model.pt")
    with pytest.raises(BadInputError, match=r"layer\.weight: a .*meta_tensor"):
        open_checkpoint(tmp_path / "model.pt")


def test_an_ordinary_pickle_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "model.pt").write_bytes(pickle.dumps({"a": 1}, protocol=2))
    with pytest.raises(BadInputError, match="not one of"):
        open_checkpoint(tmp_path / "model.pt")
