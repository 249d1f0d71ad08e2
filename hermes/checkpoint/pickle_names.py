"""Which names a checkpoint's pickle may contain."""

from __future__ import annotations

import sys

STORAGE_DTYPES = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128",
    "QInt8Storage": "int8",
    "QUInt8Storage": "uint8",
    "QInt32Storage": "int32",
    "UntypedStorage": None,
}

# Library classes whose pickled form is a call; they appear in configs and metrics and stay inert.
_INERT_CALLS = {
    "_codecs.encode",
    "argparse.Namespace",
    "builtins.bytearray",
    "builtins.complex",
    "builtins.range",
    "builtins.slice",
    "collections.Counter",
    "collections.deque",
    "datetime.date",
    "datetime.datetime",
    "datetime.timedelta",
    "decimal.Decimal",
    "numpy.core.multiarray._reconstruct",
    "numpy.core.multiarray.scalar",
    "numpy._core.multiarray._reconstruct",
    "numpy._core.multiarray.scalar",
    "numpy.dtype",
    "numpy.random._pickle.__bit_generator_ctor",
    "numpy.random._pickle.__generator_ctor",
    "numpy.random._pickle.__randomstate_ctor",
    "numpy.random.bit_generator.__pyx_unpickle_SeedSequence",
    "pathlib.Path",
    "pathlib.PosixPath",
    "pathlib.PurePosixPath",
    "pathlib.WindowsPath",
    "torch.device",
    "types.SimpleNamespace",
    "uuid.UUID",
}


def may_stay_inert(path: str) -> bool:
    """Calls of unknown classes of user packages are data (enums, paths); all other calls are not.

    PyTorch's own rebuild functions make tensors of other kinds, which are refused by name later.
    Nothing would run either way. Refusing keeps a tampered file from passing as a checkpoint.
    """
    if path in _INERT_CALLS or path.startswith("torch._utils._rebuild_"):
        return True
    package = path.split(".")[0]
    is_class = path.rpartition(".")[2][:1].isupper()
    return is_class and package not in sys.stdlib_module_names and package not in ("torch", "nt")
