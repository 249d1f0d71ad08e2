"""Imports go one way, and the light commands stay light."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from import_rules import import_violations

from hermes.rewrite.rotate import Rotation

ROOT = Path(__file__).resolve().parent.parent

WITHOUT_TOOLCHAIN = """
import importlib, pkgutil, sys

BLOCKED = (
    "litert", "ai_edge", "typer", "rich", "matplotlib", "transformers", "psutil", "llvmlite",
)
APART = (
    "hermes.cli", "hermes.terminal", "hermes.runners", "hermes.deploy", "hermes.kernels.",
)

class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0].startswith(BLOCKED):
            raise ImportError(f"{name} is blocked")

sys.meta_path.insert(0, Block())
import hermes

imported = []
for module in pkgutil.walk_packages(hermes.__path__, "hermes.", onerror=lambda name: None):
    if not module.name.startswith(APART):
        importlib.import_module(module.name)
        imported.append(module.name)
import numpy as np
from hermes.rewrite.rotate import Rotation

rotated = Rotation(192).rows(np.eye(192))
assert np.abs(rotated @ rotated.T - np.eye(192)).max() < 1e-12
print(len(imported), rotated[5].tolist())
"""

HELP = """
import sys
from hermes.cli import main
try:
    main(["--help"])
except SystemExit as leaving:
    assert not leaving.code, leaving.code
import json
print(json.dumps(sorted({name.split(".")[0] for name in sys.modules})))
"""

HEAVY = {
    "torch", "transformers", "matplotlib", "litert_torch", "ai_edge_litert", "ai_edge_quantizer",
    "litert_lm", "litert_lm_builder", "litert_converter", "converters", "numpy",
}  # fmt: skip


def test_the_tree_keeps_the_import_directions() -> None:
    assert import_violations(ROOT) == []


@pytest.mark.parametrize(
    ("path", "source", "reason"),
    [
        ("hermes/model.py", "import converters.bind", "only hermes.cli and converters may"),
        ("hermes/a/b.py", "def f():\n    from converters import bind", "only hermes.cli and"),
        ("hermes/a.py", "run('converters.graph:make_graph')", "only hermes.cli and converters may"),
        ("hermes/a.py", "import litert_torch", "only converters may"),
        ("hermes/a.py", "from ai_edge_quantizer import quantizer", "only converters may"),
        ("hermes/cli.py", "import litert_lm_builder as b", "only converters may"),
        ("hermes/a.py", "from litert_converter.mlir import ir", "only converters may"),
        ("scripts/a.py", "import litert_torch", "only converters may"),
        ("scripts/a.py", "from converters.pipeline import convert", "only hermes.cli and"),
        ("converters/a.py", "from hermes import cli", "only scripts may"),
        ("hermes/report/a.py", "from ..cli import main", "only scripts may"),
        ("hermes/report/__init__.py", "from ..cli import main", "only scripts may"),
        ("hermes/a.py", "from . import cli", "only scripts may"),
        ("converters/a.py", "import scripts.train_tiny", "nothing may"),
        ("hermes/a.py", "from tests.support import tiny_llama", "imports tests"),
    ],
)
def test_a_planted_import_is_seen(tmp_path: Path, path: str, source: str, reason: str) -> None:
    (tmp_path / path).parent.mkdir(parents=True)
    (tmp_path / path).write_text(source)
    found = import_violations(tmp_path)
    assert found
    assert all(reason in line for line in found)
    assert all(line.startswith(f"{path}:") for line in found)


def test_right_imports_are_not_reported(tmp_path: Path) -> None:
    for path, source in {
        "hermes/cli.py": "from converters.pipeline import convert\nimport hermes.errors",
        "hermes/a.py": '"""See `converters.lowerings`."""\nimport hermes.model, torch',
        "converters/a.py": "import litert_torch, converters.b\nfrom hermes.runners import child",
        "converters/graph.py": "run('converters.graph:make_graph')",
        "scripts/a.py": "from hermes.cli import main\nfrom hermes.model import build_model",
    }.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(source)
    assert import_violations(tmp_path) == []


def test_hermes_imports_without_the_toolchain() -> None:
    run = subprocess.run(
        [sys.executable, "-c", WITHOUT_TOOLCHAIN], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    count, numbers = run.stdout.split(" ", 1)
    assert int(count) > 50
    # Without machine code numpy rotates, by the same matrix.
    ours = Rotation(192).rows(np.eye(192))[5]
    assert np.abs(ours - json.loads(numbers)).max() < 1e-12


def test_help_is_light() -> None:
    """The goal is 0.5 s on a quiet machine; CPU seconds do not count what other processes use."""
    seconds = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
        run = subprocess.run(
            [sys.executable, "-c", HELP],
            capture_output=True,
            text=True,
            check=True,
            env=os.environ | {"NO_COLOR": "1"},
        )
        seconds.append(resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before)
        assert "convert" in run.stdout
        modules = json.loads(run.stdout.splitlines()[-1])
        assert not HEAVY & set(modules)
        if seconds[-1] < 1.0:
            break
    assert min(seconds) < 1.0, seconds
