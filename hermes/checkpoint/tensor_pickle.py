"""A pickle reader that can build nothing but plain data, tensor descriptions and inert objects.

Stricter than `torch.load(weights_only=True)`: no class or function of a real module is ever
looked up, so nothing in the file can run, and no storage is read, so opening costs only the index.
Objects of classes that we do not know (a training code's config dataclass, say) come back as
`ForeignObject`: their class name and their attributes. A call of library code is refused.
"""

from __future__ import annotations

import pickle
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections.abc import Callable
from pathlib import Path
from typing import IO, NamedTuple

from hermes.checkpoint.pickle_names import STORAGE_DTYPES, may_stay_inert
from hermes.checkpoint.source import ITEM_SIZES
from hermes.errors import BadInputError

MAX_PICKLE = 32 * 2**20
"""Bytes that the description of a checkpoint's objects may have."""


class RefusedPickleError(Exception):
    """The pickle asks for something that plain weights never need."""


# Named tuples, because a pickle can change the attributes of any other object it has made.
class Storage(NamedTuple):
    """A block of bytes elsewhere in the file, by its key there."""

    key: str
    dtype: str | None  # None: untyped bytes, the tensor names its dtype
    numel: int


class PickledTensor(NamedTuple):
    """A strided view of a storage; sizes and positions in elements."""

    storage: Storage
    dtype: str
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class ForeignObject:
    """An instance of a class we do not load: what it was called with and what it held."""

    class_name = ""

    def __init__(self, *arguments: object) -> None:
        self.arguments = arguments
        self.attributes: dict[object, object] = {}
        self.elements: list[object] = []

    def __new__(cls, *arguments: object, **named: object) -> ForeignObject:
        made = super().__new__(cls)
        ForeignObject.__init__(made, *arguments)
        return made

    def __setstate__(self, state: object) -> None:
        # Two dicts are the instance's and the slots' values.
        for part in state if isinstance(state, tuple) else (state,):
            if isinstance(part, dict):
                self.attributes.update(part)

    def __setitem__(self, key: object, value: object) -> None:
        self.attributes[key] = value

    def append(self, value: object) -> None:
        self.elements.append(value)

    def extend(self, values: list[object]) -> None:
        self.elements.extend(values)


class TensorUnpickler(pickle._Unpickler):
    """Loads one pickle.

    Pure Python on purpose: the C version allocates as much as a forged memo index says.
    """

    def __init__(self, file: IO[bytes]) -> None:
        super().__init__(file, encoding="utf-8")
        self._classes: dict[str, object] = {}

    def find_class(self, module: str, name: str) -> object:
        """A constructor of ours in the place of the named global; fresh for every pickle."""
        # Protocol 2, which torch.save uses, writes the names that Python 2 had.
        module, name = NAME_MAPPING.get((module, name), (IMPORT_MAPPING.get(module, module), name))
        path = f"{module}.{name}"
        if path not in self._classes:
            self._classes[path] = _constructor(module, name)
        return self._classes[path]

    def persistent_load(self, pid: object) -> Storage:
        """`('storage', type, key, location, numel[, view])`, as torch.save writes them."""
        match pid:
            case ("storage", StorageType() as kind, str() as key, str(), int() as numel, *view):
                if numel >= 0 and view in ([], [None]):
                    return Storage(key, kind.dtype, numel)
        raise RefusedPickleError(f"a storage reference is malformed: {str(pid)[:100]}")


class StorageType(NamedTuple):
    """Stands for torch.FloatStorage and its relatives."""

    dtype: str | None


class DType(NamedTuple):
    """Stands for torch.float32 and its relatives."""

    name: str


class _Call:
    """A callable that a pickle may call but not change."""

    __slots__ = ("_function",)

    def __init__(self, function: Callable[..., object]) -> None:
        object.__setattr__(self, "_function", function)

    def __setattr__(self, name: str, value: object) -> None:
        raise RefusedPickleError("the pickle changes a constructor")

    def __call__(self, *arguments: object) -> object:
        function: Callable[..., object] = object.__getattribute__(self, "_function")
        try:
            return function(*arguments)
        except (TypeError, ValueError) as error:
            raise RefusedPickleError(f"malformed tensor or container: {error}") from error


def _constructor(module: str, name: str) -> object:
    if module in ("torch", "torch.storage") and name in STORAGE_DTYPES:
        return StorageType(STORAGE_DTYPES[name])
    if module == "torch" and name in ITEM_SIZES:
        return DType(name)
    function = _CALLS.get(f"{module}.{name}")
    return _Call(function) if function else _foreign_class(module, name)


class _ForeignClass(type):
    """Makes a call of an unknown class harmless, and of library code an error."""

    def __call__(cls, *arguments: object) -> object:
        path = str(cls.__dict__.get("class_name"))
        if not may_stay_inert(path):
            raise RefusedPickleError(f"it calls {path}, which is code and not data")
        return ForeignObject.__new__(cls, *arguments)  # type: ignore[arg-type]


def _foreign_class(module: str, name: str) -> object:
    return _ForeignClass("Foreign", (ForeignObject,), {"class_name": f"{module}.{name}"})


def _rebuild_tensor(
    storage: object, offset: object, shape: object, stride: object, *_: object
) -> PickledTensor:
    if not isinstance(storage, Storage) or storage.dtype is None:
        raise ValueError("a tensor without a typed storage")
    return _checked_tensor(storage, storage.dtype, offset, shape, stride)


def _rebuild_tensor_with_dtype(
    storage: object,
    offset: object,
    shape: object,
    stride: object,
    requires_grad: object,
    hooks: object,
    dtype: object,
    *_: object,
) -> PickledTensor:
    if not isinstance(storage, Storage) or not isinstance(dtype, DType):
        raise ValueError("a tensor without a storage or dtype")
    return _checked_tensor(storage, dtype.name, offset, shape, stride)


def _checked_tensor(
    storage: Storage, dtype: str, offset: object, shape: object, stride: object
) -> PickledTensor:
    if not (_is_size(offset) and _are_sizes(shape) and _are_sizes(stride)):
        raise ValueError("a tensor's offset, shape or stride is not made of sizes")
    assert isinstance(offset, int)
    assert isinstance(shape, tuple)
    assert isinstance(stride, tuple)
    if len(shape) != len(stride):
        raise ValueError("a tensor's shape and stride differ in length")
    return PickledTensor(storage, dtype, offset, shape, stride)


def _is_size(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**48


def _are_sizes(value: object) -> bool:
    return isinstance(value, tuple) and len(value) <= 8 and all(map(_is_size, value))


def _rebuild_subclass(function: object, kind: object, arguments: object, state: object) -> object:
    """torch.Tensor subclasses; only plain tensors and parameters keep their meaning."""
    if not isinstance(function, _Call) or not isinstance(arguments, tuple):
        raise ValueError("a tensor subclass that is not rebuilt from a plain tensor")
    return function(*arguments)


def _first(value: object, *_: object) -> object:
    return value


def _default_dict(*_: object) -> dict[object, object]:
    return {}


def _enum_member(kind: object, name: object, *more: object) -> ForeignObject:
    """`getattr(Class, "MEMBER")`, which Python 3.11.0 to 3.11.3 write for an enum's member.

    Nothing is looked up: the member becomes an inert object, as the call of its class would.
    """
    if not (isinstance(kind, _ForeignClass) and issubclass(kind, ForeignObject)) or more:
        raise RefusedPickleError("it calls builtins.getattr, and not for a member of an enum")
    path = str(kind.__dict__.get("class_name"))
    known = may_stay_inert(path) and path.rpartition(".")[2][:1].isupper()
    if not known or type(name) is not str or not name.isidentifier() or name.startswith("_"):
        raise RefusedPickleError(f"it calls builtins.getattr for {path}, {str(name)[:40]!r}")
    return ForeignObject.__new__(kind, name)


class _Mapping(dict[object, object]):
    """A dict that may carry attributes, as OrderedDict does (`_metadata` of a state_dict)."""


_CALLS: dict[str, Callable[..., object]] = {
    "collections.OrderedDict": _Mapping,
    "collections.defaultdict": _default_dict,
    "builtins.dict": dict,
    "builtins.frozenset": set,
    "builtins.getattr": _enum_member,
    "builtins.set": set,
    "torch.Size": tuple,
    "torch._utils._rebuild_tensor": _rebuild_tensor,
    "torch._utils._rebuild_tensor_v2": _rebuild_tensor,
    "torch._utils._rebuild_tensor_v3": _rebuild_tensor_with_dtype,
    "torch._utils._rebuild_parameter": _first,
    "torch._utils._rebuild_parameter_with_state": _first,
    "torch._tensor._rebuild_from_type_v2": _rebuild_subclass,
    "torch.serialization._get_layout": _first,
}


def load_tensor_pickle(file: IO[bytes], path: Path) -> object:
    """One pickle from the file, as plain data.

    Raises:
        BadInputError: damaged, or asking for code.
    """
    try:
        return TensorUnpickler(file).load()
    except RefusedPickleError as error:
        raise BadInputError(
            f"{path}: refused without running anything: {error}",
            expected="tensors in dicts and lists, with plain numbers and text",
            todo="save it again where it was made, with torch.save(model.state_dict(), ...)",
        ) from error
    except Exception as error:
        # A damaged pickle can raise nearly anything from the opcode it fails at.
        raise BadInputError(
            f"{path}: its object description is damaged ({type(error).__name__}: {error})"[:400],
            expected="a pickle as torch.save writes it",
            todo="copy or download the file again",
        ) from error
