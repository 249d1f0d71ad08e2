"""Files that somebody broke, or made to break the reader; each writes itself into a folder."""

from __future__ import annotations

import io
import json
import pickle
import pickletools
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tiny_llama import tiny_config, tiny_weights

CONFIG = tiny_config(tie_word_embeddings=False)
WEIGHTS = tiny_weights(CONFIG)
CANARY = "hostile_canary"

Maker = Callable[[Path], Path]
HOSTILE: dict[str, tuple[Maker, int]] = {}
"""Name -> (maker, exit code it deserves)."""


def hostile(name: str, maker: Maker, code: int = 3) -> None:
    """Add one case; 3 is bad input, 4 a model we cannot compute."""
    assert name not in HOSTILE
    HOSTILE[name] = (maker, code)


def written(file: str, data: bytes) -> Maker:
    def make(folder: Path) -> Path:
        (folder / file).write_bytes(data)
        return folder / file

    return make


# safetensors


def _safetensors(header: object, data: bytes = b"", length: int | None = None) -> Maker:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    size = len(text) if length is None else length
    return written("m.safetensors", size.to_bytes(8, "little") + text + data)


def _entry(shape: Any, begin: Any, end: Any, dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def _cut(share: float) -> Maker:
    def make(folder: Path) -> Path:
        path = folder / "m.safetensors"
        save_file(WEIGHTS, path)
        data = path.read_bytes()
        path.write_bytes(data[: int(len(data) * share)])
        return path

    return make


_EIGHT = bytes(8)
for _share in (0.0, 0.00001, 0.0002, 0.004, 0.5, 0.999):
    hostile(f"safetensors cut to {_share}", _cut(_share))
for _name, _maker in {
    "header length 2**64-1": _safetensors({}, length=2**64 - 1),
    "header length 90 MB": _safetensors({}, length=90_000_000),
    "header of brackets": _safetensors(b"[" * 200_000),
    "header of nested objects": _safetensors(b'{"a":' * 100_000),
    "header not UTF-8": _safetensors(b"\xff\xfe\xfd"),
    "header with a 5000-digit number": _safetensors(b'{"a": ' + b"9" * 5000 + b"}"),
    "overlapping": _safetensors({"a": _entry([2], 0, 8), "b": _entry([2], 0, 8)}, _EIGHT),
    "gap": _safetensors({"a": _entry([1], 4, 8)}, _EIGHT),
    "trailing bytes": _safetensors({"a": _entry([1], 0, 4)}, _EIGHT),
    "duplicate key": _safetensors(
        b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},'
        b'"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}',
        _EIGHT,
    ),
    "negative offset": _safetensors({"a": _entry([1], -4, 0)}, _EIGHT),
    "product past 64 bits": _safetensors({"a": _entry([2**32, 2**33], 0, 8)}, _EIGHT),
    "zero times huge": _safetensors({"a": _entry([0, 2**60], 0, 0)}),
    "boolean size": _safetensors({"a": _entry([True], 0, 4)}, _EIGHT[:4]),
    "text as shape": _safetensors({"a": _entry("12", 0, 8)}, _EIGHT),
    "forty dimensions": _safetensors({"a": _entry([1] * 40, 0, 4)}, _EIGHT[:4]),
    "dtype is a list": _safetensors({"a": _entry([2], 0, 8, ["F32"])}, _EIGHT),
    "NaN offsets": _safetensors({"a": _entry([2], float("nan"), 8)}, _EIGHT),
}.items():
    hostile(f"safetensors {_name}", _maker)

# pickles


def _in_zip(pickled: bytes, **others: bytes) -> Maker:
    def make(folder: Path) -> Path:
        with zipfile.ZipFile(folder / "m.pt", "w") as archive:
            archive.writestr("m/data.pkl", pickled)
            for name, data in others.items():
                archive.writestr(f"m/{name.replace('__', '/')}", data)
        return folder / "m.pt"

    return make


def _call(module: str, name: str, argument: str, protocol: int = 2) -> bytes:
    """A pickle that calls module.name(argument) when a trusting reader loads it."""
    if protocol == 0:
        return f"c{module}\n{name}\n(V{argument}\ntR.".encode()
    text = b"X" + struct.pack("<I", len(argument)) + argument.encode()
    if protocol == 2:
        return b"\x80\x02" + f"c{module}\n{name}\n".encode() + text + b"\x85R."
    parts = b"".join(b"\x8c" + bytes([len(part)]) + part.encode() for part in (module, name))
    return b"\x80\x04" + parts + b"\x93" + text + b"\x85R."


_TOUCH = f"open({CANARY!r}, 'w').close()"
for _module, _name, _argument in (
    ("os", "system", f"touch {CANARY}"),
    ("posix", "system", f"touch {CANARY}"),
    ("builtins", "eval", _TOUCH),
    ("__builtin__", "execfile", CANARY),
    ("builtins", "exec", _TOUCH),
    ("subprocess", "Popen", f"touch {CANARY}"),
    ("importlib", "import_module", "antigravity"),
    ("torch.hub", "load", "somebody/something"),
    ("torch", "load", "other.pt"),
    ("numpy", "load", "other.npy"),
    ("pathlib", "os.system", f"touch {CANARY}"),
    ("webbrowser", "open", "about:blank"),
    ("pickle", "loads", "x"),
):
    hostile(f"pickle calls {_module}.{_name}", _in_zip(_call(_module, _name, _argument)))
for _protocol in (0, 4):
    _data = _call("os", "system", f"touch {CANARY}", _protocol)
    hostile(f"pickle protocol {_protocol} calls os.system", _in_zip(_data))
_OLD = pickle.dumps(0x1950A86A20F9469CFC6C, 2) + pickle.dumps(1001, 2)
_OLD += pickle.dumps({"little_endian": True}, 2)
hostile(
    "old torch file calls os.system",
    written("m.pt", _OLD + _call("os", "system", f"touch {CANARY}")),
)
_DOUBLED = b"K\x01" + b"".join(b"q%ch%c\x86" % (index, index) for index in range(60))
_STORAGE = b"X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpu"
_TENSOR = b"\x80\x02}X\x01\x00\x00\x00actorch._utils\n_rebuild_tensor_v2\n((" + _STORAGE


def _tensor(numel: bytes, offset: bytes, shape: bytes, stride: bytes) -> bytes:
    return _TENSOR + numel + b"tQ" + offset + shape + stride + b"\x89NtRs."


for _name, _data in {
    "is empty": b"",
    "stops in the middle": pickle.dumps({"a": list(range(100))}, 2)[:-20],
    "of noise": bytes(range(256)),
    "with memo index 2**31": b"\x80\x02]r\xff\xff\xff\x7f.",
    "claims 2**40 bytes": b"\x80\x04\x8e" + struct.pack("<Q", 2**40) + b"x.",
    "claims a 2 GB number": b"\x80\x02\x8b" + struct.pack("<i", 2**31 - 1) + b"x.",
    "with an extension code": b"\x80\x02\x82\x01.",
    "with INST": f"(Vtouch {CANARY}\nios\nsystem\n.".encode(),
    "with OBJ": b"(cos\nsystem\nVtouch " + CANARY.encode() + b"\no.",
    "of doubling tuples": b"\x80\x02" + _DOUBLED + b".",
    "with a doubling config": _tensor(b"K\x04", b"K\x00", b"K\x04\x85", b"K\x01\x85")[:-1]
    + b"X\x06\x00\x00\x00config}X\x03\x00\x00\x00dim"
    + _DOUBLED
    + b"ss.",
    "that holds itself": b"\x80\x02}q\x00X\x01\x00\x00\x00ah\x00s.",
    "changes a constructor": b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n"
    b"N}X\x01\x00\x00\x00aK\x01s\x86b.",
    "with a text as storage": b"\x80\x02X\x01\x00\x00\x00xQ.",
    "tensor past its storage": _tensor(b"K\x04", b"K\x00", b"K\x08\x85", b"K\x01\x85"),
    "tensor with negative size": _tensor(
        b"K\x04", b"K\x00", b"J\xff\xff\xff\xff\x85", b"K\x01\x85"
    ),
    "tensor with huge stride": _tensor(b"K\x04", b"K\x00", b"K\x02\x85", b"J\xff\xff\xff\x7f\x85"),
    "shape and stride differ": _tensor(b"K\x04", b"K\x00", b"K\x02\x85", b")"),
    "storage of a terabyte": _tensor(
        b"\x8a\x06\x00\x00\x00\x00\x00\x01", b"K\x00", b"K\x02\x85", b"K\x01\x85"
    ),
}.items():
    hostile(f"pickle {_name}", _in_zip(_data, data__0=bytes(16)))

# zip archives and the old stream


def _rezipped(edit: Callable[[dict[str, bytes]], None], **options: Any) -> Maker:
    def make(folder: Path) -> Path:
        path = folder / "m.pt"
        torch.save(WEIGHTS, path)
        with zipfile.ZipFile(path) as archive:
            records = {info.filename: archive.read(info) for info in archive.infolist()}
        edit(records)
        with zipfile.ZipFile(path, "w", **options) as archive:
            for name, data in records.items():
                archive.writestr(name, data)
        return path

    return make


def _patched(position: Callable[[bytes], int], value: bytes) -> Maker:
    def make(folder: Path) -> Path:
        path = folder / "m.pt"
        torch.save(WEIGHTS, path)
        data = bytearray(path.read_bytes())
        where = position(bytes(data))
        data[where : where + len(value)] = value
        path.write_bytes(data)
        return path

    return make


def _shorten(records: dict[str, bytes]) -> None:
    records["m/data/3"] = records["m/data/3"][:-4]


def _bomb(folder: Path) -> Path:
    buffer = io.BytesIO()
    torch.save({"a": torch.zeros(2**22)}, buffer)
    with (
        zipfile.ZipFile(buffer) as old,
        zipfile.ZipFile(folder / "m.pt", "w", zipfile.ZIP_DEFLATED) as new,
    ):
        for info in old.infolist():
            new.writestr(info.filename, old.read(info))
    return folder / "m.pt"


def _twice(folder: Path) -> Path:
    path = _rezipped(lambda records: None)(folder)
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("m/data/3", bytes(64))
    return path


def _old_stream(change: Callable[[list[str]], object], tail: bytes) -> Maker:
    """An old file whose list of storages is changed and whose data is `tail`."""

    def make(folder: Path) -> Path:
        buffer = io.BytesIO()
        torch.save({"a": torch.ones(4)}, buffer, _use_new_zipfile_serialization=False)
        buffer.seek(0)
        for _ in range(3):
            pickle.load(buffer)
        size = len(_objects(buffer))
        position = buffer.tell() + size
        buffer.seek(position)
        keys = pickle.load(buffer)
        data = buffer.getvalue()[:position] + pickle.dumps(change(keys), 2) + tail
        (folder / "m.pt").write_bytes(data)
        return folder / "m.pt"

    return make


def _objects(buffer: io.BytesIO) -> bytes:
    """The pickle at the buffer's position, which refers to storages and cannot be loaded here."""
    rest = buffer.getvalue()[buffer.tell() :]
    last = [position for opcode, _, position in pickletools.genops(rest) if opcode.name == "STOP"]
    return rest[: (last[0] or 0) + 1]


for _name, _maker in {
    "zip bomb": _bomb,
    "zip without data.pkl": _rezipped(lambda records: records.pop("m/data.pkl") and None),
    "zip with two data.pkl": _rezipped(lambda records: records.update({"n/data.pkl": b"."})),
    "zip with TorchScript": _rezipped(lambda records: records.update({"m/constants.pkl": b"."})),
    "zip big-endian": _rezipped(lambda records: records.update({"m/byteorder": b"big"})),
    "zip without a storage": _rezipped(lambda records: records.pop("m/data/3") and None),
    "zip with a short storage": _rezipped(_shorten),
    "zip with a record twice": _twice,
    "zip with a damaged local header": _patched(lambda data: data.index(b"m/data/0") - 30, b"XX"),
    "zip with a damaged directory": _patched(lambda data: data.index(b"PK\x01\x02"), b"XX"),
    "zip with records past the end": _patched(
        lambda data: data.index(b"PK\x01\x02") + 42, b"\xff\xff\xff\x0f"
    ),
    "zip with an encrypted record": _patched(lambda data: data.index(b"PK\x01\x02") + 8, b"\x01"),
    "old file with keys as text": _old_stream(lambda keys: "keys", b""),
    "old file without storages": _old_stream(lambda keys: [], b""),
    "old file with 2**60 elements": _old_stream(list, struct.pack("<q", 2**60)),
    "old file with -1 elements": _old_stream(list, struct.pack("<q", -1)),
}.items():
    hostile(_name, _maker)

# GGUF


def _gguf(tensors: int, keys: int, body: bytes, version: int = 3) -> Maker:
    head = b"GGUF" + struct.pack("<IQQ", version, tensors, keys)
    return written("m.gguf", head + body)


def _text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


_INFO = _text("a") + struct.pack("<IQQIQ", 2, 64, 4, 0, 0)
for _name, _maker in {
    "with nothing": written("m.gguf", b"GGUF"),
    "version 77": _gguf(0, 0, b"", 77),
    "big-endian": written("m.gguf", b"GGUF" + struct.pack(">IQQ", 3, 0, 0)),
    "with 2**60 keys": _gguf(0, 2**60, bytes(64)),
    "with 2**60 tensors": _gguf(2**60, 0, bytes(64)),
    "with a text of 2**60 bytes": _gguf(0, 1, struct.pack("<Q", 2**60)),
    "with an array of 2**40": _gguf(0, 1, _text("k") + struct.pack("<IIQ", 9, 5, 2**40)),
    "with arrays of arrays": _gguf(
        0, 1, _text("k") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 500
    ),
    "with value type 99": _gguf(0, 1, _text("k") + struct.pack("<IQ", 99, 0)),
    "with a key twice": _gguf(0, 2, (_text("k") + struct.pack("<II", 4, 1)) * 2),
    "with data past the end": _gguf(1, 0, _INFO + bytes(64)),
    "with tensors on each other": _gguf(2, 0, _INFO + _INFO.replace(b"a", b"b", 1) + bytes(4096)),
    "with a tensor twice": _gguf(2, 0, _INFO * 2 + bytes(4096)),
    "with nine dimensions": _gguf(1, 0, _text("a") + struct.pack("<I", 9) + bytes(100)),
    "with half a block": _gguf(
        1, 0, _text("a") + struct.pack("<IQQIQ", 2, 40, 4, 8, 0) + bytes(4096)
    ),
    "with alignment 0": _gguf(0, 1, _text("general.alignment") + struct.pack("<II", 4, 0)),
}.items():
    hostile(f"gguf {_name}", _maker)
_UNKNOWN = _gguf(1, 0, _text("a") + struct.pack("<IQQIQ", 2, 64, 4, 250, 0) + bytes(4096))
hostile("gguf with an unknown kind", _UNKNOWN, 4)

# index files, configurations, things that are no checkpoint


def _indexed(weight_map: object) -> Maker:
    def make(folder: Path) -> Path:
        save_file(WEIGHTS, folder / "a.safetensors")
        (folder / "config.json").write_text(json.dumps(CONFIG))
        content = json.dumps({"weight_map": weight_map})
        (folder / "model.safetensors.index.json").write_text(content)
        return folder

    return make


def _configured(config: object, weights: dict[str, torch.Tensor] = WEIGHTS) -> Maker:
    text = config if isinstance(config, str) else json.dumps(config)

    def make(folder: Path) -> Path:
        save_file(weights, folder / "model.safetensors")
        (folder / "config.json").write_text(text)
        return folder

    return make


_NORM = "model.norm.weight"
for _name, _map in {
    "to /etc/passwd": {_NORM: "/etc/passwd"},
    "to the parent folder": {_NORM: "../m.safetensors"},
    "to itself": {_NORM: "model.safetensors.index.json"},
    "to a folder": {_NORM: "."},
    "to nothing": {_NORM: ""},
    "to a number": {_NORM: 7},
    "of a list": [_NORM],
    "to a missing file": {_NORM: "b.safetensors"},
}.items():
    hostile(f"index {_name}", _indexed(_map))
for _name, _config in {
    "cut": json.dumps(CONFIG)[:40],
    "of a list": "[]",
    "nested": '{"a":' * 100_000,
    "with a key twice": '{"hidden_size": 64, "hidden_size": 64}',
    "hidden_size 10**18": CONFIG | {"hidden_size": 10**18},
    "num_hidden_layers 10**9": CONFIG | {"num_hidden_layers": 10**9},
    "vocab_size text": CONFIG | {"vocab_size": "128"},
    "heads 0": CONFIG | {"num_attention_heads": 0, "head_dim": None},
    "heads negative": CONFIG | {"num_attention_heads": -4},
    "head_dim 0.5": CONFIG | {"head_dim": 0.5},
    "heads true": CONFIG | {"num_attention_heads": True, "head_dim": None},
    "rope_theta null": CONFIG | {"rope_theta": None},
    "rope_theta infinite": CONFIG | {"rope_theta": float("inf")},
    "rms_norm_eps negative": CONFIG | {"rms_norm_eps": -1},
    "rope_scaling a list": CONFIG | {"rope_scaling": [8]},
    "eos_token_id 999": CONFIG | {"eos_token_id": 999},
    "eos_token_id text": CONFIG | {"eos_token_id": "</s>"},
    "tie_word_embeddings text": CONFIG | {"tie_word_embeddings": "yes"},
    "everything null": dict.fromkeys(CONFIG),
}.items():
    hostile(f"config {_name}", _configured(_config))
hostile("config of another model", _configured(CONFIG | {"model_type": "bloom"}), 4)
hostile(
    "layer number 10**12",
    _configured(
        CONFIG, {**WEIGHTS, "model.layers.1000000000000.mlp.up_proj.weight": torch.ones(96, 64)}
    ),
)
hostile(
    "layer number 9000",
    _configured(CONFIG, {**WEIGHTS, "model.layers.9000.mlp.up_proj.weight": torch.ones(96, 64)}),
)
for _name, _maker in {
    "empty file": written("m.pt", b""),
    "text file": written("m.pt", b"hello\n"),
    "web page": written("m.safetensors", b"<!DOCTYPE html><html></html>"),
    "git lfs pointer": written(
        "m.pt", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n"
    ),
    "tar archive": written("m.pt", b"m/data" + bytes(600)),
    "numpy archive": written("m.npz", b"\x93NUMPY" + bytes(100)),
    "missing file": lambda folder: folder / "nothing.pt",
    "empty folder": lambda folder: folder,
}.items():
    hostile(_name, _maker)
