"""The guides name rules and commands that exist, and code that the snippets print."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hermes.deploy.lint import all_rules

DOCS = Path(__file__).resolve().parents[2] / "docs"
GUIDES = ("android.md", "ios.md", "troubleshooting.md")


def test_every_rule_named_in_the_guides_exists() -> None:
    rules = {rule.name for rule in all_rules()}
    text = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
    named = {
        name
        for listed in re.findall(r"lint ((?:`[a-z-]+`(?:, )?)+)", text)
        for name in re.findall(r"`([a-z-]+)`", listed)
    }
    assert len(named) > 25
    assert named <= rules


@pytest.mark.parametrize("guide", GUIDES)
def test_every_command_named_in_the_guides_exists(guide: str) -> None:
    from typer.main import get_command

    from hermes.cli import app

    known = set(get_command(app).commands)  # type: ignore[attr-defined]
    text = (DOCS / guide).read_text(encoding="utf-8")
    named = set(re.findall(r"`hermes ([a-z]+)", text)) | set(
        re.findall(r"^hermes (\w+)", text, re.M)
    )
    assert named <= known


@pytest.mark.parametrize("guide", GUIDES)
def test_what_was_not_tried_is_said_and_links_between_guides_lead_somewhere(guide: str) -> None:
    text = (DOCS / guide).read_text(encoding="utf-8")
    assert guide == "troubleshooting.md" or "**Not tried here:" in text
    for target in re.findall(r"\]\(([\w-]+\.md)\)", text):
        assert (DOCS / target).is_file()


@pytest.mark.parametrize(("guide", "language"), [("android.md", "android"), ("ios.md", "ios")])
def test_the_guides_calls_are_those_of_the_snippet(guide: str, language: str) -> None:
    from hermes.deploy.snippet import LANGUAGES

    code = "".join(re.findall(r"```(?:kotlin|swift)\n(.*?)```", (DOCS / guide).read_text(), re.S))
    calls = set(re.findall(r"\b([A-Za-z]+)(?:\(|:| = )", code))
    wanted = {"modelPath", "backend", "maxNumTokens", "cacheDir", "samplerConfig", "EngineConfig"}
    assert wanted <= calls
    assert wanted <= set(re.findall(r"\w+", LANGUAGES[language][0]))
