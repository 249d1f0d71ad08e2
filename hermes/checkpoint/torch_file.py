"""Files of torch.save, opened without torch and without running code.

The zip form: `<root>/data.pkl` describes the objects, `<root>/data/<key>` are the storages.
"""

from __future__ import annotations

import io
import struct
import zipfile
from pathlib import Path

from hermes.checkpoint.source import read_bytes
from hermes.checkpoint.tensor_pickle import MAX_PICKLE, Storage, load_tensor_pickle
from hermes.checkpoint.torch_legacy import open_legacy
from hermes.checkpoint.torch_tensors import AGAIN, RESAVE, MakeTensor, tensor_maker
from hermes.errors import BadInputError


def open_torch_file(path: Path) -> tuple[object, MakeTensor]:
    """The saved object with `PickledTensor` in the place of tensors, and how to read those.

    Raises:
        BadInputError: damaged, compressed, with code in it, or not a file of torch.save.
    """
    with path.open("rb") as file:
        start = file.read(4)
    if start == b"PK\x03\x04":
        return _open_zip(path)
    return open_legacy(path)


def _open_zip(path: Path) -> tuple[object, MakeTensor]:
    try:
        with zipfile.ZipFile(path) as archive:
            records = {info.filename: info for info in archive.infolist()}
            count = len(archive.infolist())
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError, struct.error) as error:
        raise BadInputError(
            f"{path}: damaged torch file: {error}",
            expected="a complete zip archive as torch.save writes it",
            todo=f"{AGAIN}; it is truncated or damaged",
        ) from error
    root = _zip_root(path, records)
    if len(records) != count:
        raise BadInputError(f"{path}: two records of the archive share a name", todo=AGAIN)
    _check_stored(path, records)
    pickled = records[f"{root}/data.pkl"]
    if pickled.file_size > MAX_PICKLE:
        raise BadInputError(
            f"{path}: data.pkl has {pickled.file_size} bytes",
            expected=f"at most {MAX_PICKLE}",
            todo=RESAVE,
        )
    order = records.get(f"{root}/byteorder")
    if order and bytes(_record(path, order)) != b"little":
        raise BadInputError(f"{path}: not written little-endian", todo=RESAVE)
    data = io.BytesIO(_record(path, pickled))
    tree = load_tensor_pickle(data, path)

    def locate(storage: Storage) -> tuple[int, int]:
        info = records.get(f"{root}/data/{storage.key}")
        if info is None:
            raise BadInputError(f"{path}: storage {storage.key!r} is missing", todo=AGAIN)
        return _data_offset(path, info), info.file_size

    return tree, tensor_maker(path, locate)


def _zip_root(path: Path, records: dict[str, zipfile.ZipInfo]) -> str:
    roots = [name.removesuffix("/data.pkl") for name in records if name.endswith("/data.pkl")]
    if any(name.endswith("/constants.pkl") for name in records):
        raise BadInputError(
            f"{path}: a TorchScript archive, which holds code",
            expected="a state_dict saved with torch.save",
            todo=RESAVE,
        )
    if len(roots) != 1:
        raise BadInputError(
            f"{path}: a zip archive without exactly one data.pkl",
            expected="a file written by torch.save",
            todo="unpack it first if it is an archive of a folder",
        )
    return roots[0]


def _check_stored(path: Path, records: dict[str, zipfile.ZipInfo]) -> None:
    for info in records.values():
        if info.compress_type != zipfile.ZIP_STORED or info.compress_size != info.file_size:
            raise BadInputError(
                f"{path}: record {info.filename} is compressed "
                f"({info.compress_size} bytes for {info.file_size})",
                expected="uncompressed records, as torch.save writes them",
                todo=f"unpack and re-save it only if you trust it; otherwise {RESAVE}",
            )
        if info.flag_bits & 1:
            raise BadInputError(f"{path}: record {info.filename} is encrypted", todo=RESAVE)


def _data_offset(path: Path, info: zipfile.ZipInfo) -> int:
    """Where a record's bytes begin, from its local header; they must end within the file."""
    origin = f"{path}: {info.filename}"
    header = bytes(read_bytes(path, info.header_offset, 30, origin))
    if header[:4] != b"PK\x03\x04":
        raise BadInputError(f"{origin}: its local header is damaged", todo=AGAIN)
    name_length, extra_length = struct.unpack("<HH", header[26:30])
    begin: int = info.header_offset + 30 + name_length + extra_length
    if begin + info.file_size > path.stat().st_size:
        raise BadInputError(f"{origin}: reaches past the end of the file", todo=AGAIN)
    return begin


def _record(path: Path, info: zipfile.ZipInfo) -> bytearray:
    return read_bytes(path, _data_offset(path, info), info.file_size, f"{path}: {info.filename}")
