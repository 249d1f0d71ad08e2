"""Which module may import which, read from the source with `ast`.

Imports go one way: scripts -> hermes.cli -> converters -> the rest of hermes. The native toolchain
is imported by converters only.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

TOOLCHAIN = ("litert_torch", "ai_edge_quantizer", "litert_lm_builder", "litert_converter")
_DYNAMIC = re.compile(r"(converters\.[\w.]+|hermes\.cli)(:\w+)?")
"""A whole string that names a module, as `importlib` and the worker process take it."""


def import_violations(root: Path) -> list[str]:
    """`path:line: what` for every import against the rules in hermes, converters and scripts."""
    found = []
    for room in ("hermes", "converters", "scripts"):
        for path in sorted((root / room).rglob("*.py")):
            module = path.relative_to(root).with_suffix("").as_posix().replace("/", ".")
            tree = ast.parse(path.read_text(encoding="utf-8"))
            for line, imported in _imports(tree, module):
                reason = _against(module, imported)
                if reason:
                    found.append(f"{path.relative_to(root)}:{line}: {reason}")
    return found


def _against(module: str, imported: str) -> str | None:
    if imported == "tests" or imported.startswith("tests."):
        return f"imports {imported}"
    to_converters = _inside(imported, "converters")
    if to_converters and not (_inside(module, "hermes.cli") or _inside(module, "converters")):
        return f"imports {imported}; only hermes.cli and converters may"
    if _inside(imported, "hermes.cli") and not (
        _inside(module, "scripts") or _inside(module, "hermes.cli")
    ):
        return f"imports {imported}; only scripts may"
    if imported.split(".")[0] in TOOLCHAIN and not _inside(module, "converters"):
        return f"imports {imported}; only converters may"
    if _inside(imported, "scripts") and not _inside(module, "scripts"):
        return f"imports {imported}; nothing may"
    return None


def _inside(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def _imports(tree: ast.AST, module: str) -> Iterator[tuple[int, str]]:
    """(line, absolute module) of imports anywhere in the file, dynamic ones by name included.

    `from a import b` gives `a` and `a.b`, since b may be a module.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(node, module)
            yield node.lineno, base
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Constant) and _DYNAMIC.fullmatch(str(node.value)):
            yield node.lineno, str(node.value).partition(":")[0]


def _absolute(node: ast.ImportFrom, module: str) -> str:
    """The module an import names; `__init__` counts as a module of its package."""
    if not node.level:
        return node.module or ""
    parts = module.split(".")[: -node.level]
    return ".".join([*parts, node.module] if node.module else parts)
