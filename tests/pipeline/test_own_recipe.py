"""A bundle carries its whole recipe: it is verified with the rewrites that it was made with."""

from __future__ import annotations

from pathlib import Path

import pytest

from converters.bundle import read_bundle
from converters.pipeline import RECIPE_TEXT_KEY
from hermes.assets import assets_folder
from hermes.cli import app, run_command
from hermes.recipe_file import load_recipe, read_recipe_text

CHECKPOINT = str(assets_folder() / "tiny")
RECIPE = """
rewrites = ["fold_norm_gains", "mix_down_input"]
[export]
context = 64
prefill = [1, 8]
[[quantization]]
tensors = "*"
[limits]
positions = 64
"""


def test_a_recipe_of_ones_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own, bundle = tmp_path / "own.toml", tmp_path / "own.litertlm"
    own.write_text(RECIPE)
    arguments = [CHECKPOINT, "-o", str(bundle), "--recipe", str(own), "--no-verify"]
    assert run_command(app, ["convert", *arguments]) == 0
    inside = read_recipe_text(str(read_bundle(bundle).metadata[RECIPE_TEXT_KEY]), "inside")
    assert inside == load_recipe(own)
    own.unlink()
    assert run_command(app, ["verify", str(bundle), "--against", CHECKPOINT]) == 0
    # Another recipe's limits may be asked for; the rewrites stay the bundle's own.
    strict = tmp_path / "strict.toml"
    strict.write_text("[limits]\npositions = 32\nkl_mean = 1e-9\n")
    arguments = [str(bundle), "--against", CHECKPOINT, "--recipe", str(strict)]
    capsys.readouterr()
    assert run_command(app, ["verify", *arguments]) == 6
    assert "first red rung 5" in capsys.readouterr().err
