"""`hermes snippet`: the Python code runs; Kotlin and Swift carry the bundle's facts."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import broken_bundles as broken
import pytest

from converters.anatomy import describe
from converters.integrity import check_integrity
from hermes.cli import app, run_command
from hermes.deploy.lint_device import estimate
from hermes.runners.litert_lm import LiteRtLmRunner


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    capsys.readouterr()
    assert run_command(app, ["snippet", *words]) == 0
    return capsys.readouterr().out


def test_the_python_snippet_answers_as_the_runtime_does(
    embedded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = tmp_path / "talk.py"
    code.write_text(printed(capsys, "python", str(embedded)), encoding="utf-8")
    with LiteRtLmRunner(embedded) as runtime:
        turns = runtime.chat(["Who's there?"], 200)
    done = subprocess.run(
        [sys.executable, str(code), "Who's there?"],
        capture_output=True,
        text=True,
        env={**os.environ, "HOME": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "".join(turn.generation.text + "\n" for turn in turns)
    tag = str(check_integrity(embedded).digest)[:12]
    (packed,) = (tmp_path / ".cache" / f"litertlm-{tag}").iterdir()
    estimated = estimate(describe(embedded)).weight_cache
    assert 0.95 < packed.stat().st_size / estimated < 1.15
    assert not list(embedded.parent.glob("*cache_*"))


def test_the_system_message_reaches_the_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The table model says the successor of the last token, whatever came before."""
    bundle = broken.write(broken.clean(tmp_path), tmp_path)
    hostile = "Say \"no\"\\ to $this {and} that\n'quote' \u00e9\U0001f60a"
    code = printed(capsys, "python", str(bundle), "--system", hostile)
    (tmp_path / "talk.py").write_text(
        code.replace("    for message", "    print(conversation.render_message_to_string('Hi'))\n"
                     "    for message"),
        encoding="utf-8",
    )  # fmt: skip
    done = subprocess.run(
        [sys.executable, str(tmp_path / "talk.py"), "the cat", "and"],
        capture_output=True,
        text=True,
        env={**os.environ, "HOME": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr
    assert hostile in done.stdout
    # The prompt ends in `<s>`, and the token after that stops: two empty answers.
    assert done.stdout.endswith("\n\n\n")


@pytest.mark.parametrize("platform", ["android", "ios"])
def test_facts_are_filled_in(
    platform: str, embedded: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = printed(capsys, platform, str(embedded), "--system", 'Be "brief", $5')
    tag = str(check_integrity(embedded).digest)[:12]
    for fact in (embedded.name, "128", '2 ("</s>")', f"litertlm-{tag}", "Int8Model", "0.18.1"):
        assert fact in code
    price = {"android": r"\$5", "ios": "$5"}[platform]
    assert f'"Be \\"brief\\", {price}"' in code
    assert "no chat template" in code
    assert not re.search(r"@\w+@|^[?!](system|template)", code, re.MULTILINE)
    assert all(code.count(left) == code.count(right) for left, right in ("()", "{}", "[]"))
    without = printed(capsys, platform, str(embedded))
    assert "ystemInstruction" not in without
    assert "systemMessage" not in without


def test_a_bundle_of_another_exporter(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bundle = broken.write(broken.clean(tmp_path), tmp_path)
    code = printed(capsys, "android", str(bundle))
    assert "no chat template" not in code
    assert "maxNumTokens = 64" in code
    assert re.search(r"litertlm-[0-9a-f]{12}", code)


def test_an_unknown_platform_is_a_usage_error(tmp_path: Path) -> None:
    bundle = broken.write(broken.clean(tmp_path), tmp_path)
    assert run_command(app, ["snippet", "symbian", str(bundle)]) == 2
    assert run_command(app, ["snippet", "python", str(tmp_path / "absent.litertlm")]) == 3
