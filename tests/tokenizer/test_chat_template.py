"""Chat templates: the reference equals transformers, the translation equals the reference."""

from __future__ import annotations

import json
import time
from pathlib import Path

import chat_templates
import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from hermes.errors import BadInputError, UnsupportedModelError
from hermes.tokenizer.huggingface import read_tokenizer_json
from hermes.tokenizer.jinja_dialect import Rewritten, rewrite
from hermes.tokenizer.jinja_environment import render
from hermes.tokenizer.probes import PROBES, in_parts
from hermes.tokenizer.template import find_template, prepare_chat_template, special_tokens
from hermes.tokenizer.template_check import compare

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
EVERY = {**chat_templates.TEXT, **chat_templates.PARTS_ONLY}


def transformers_prompt(template: str, messages: object, prompted: bool) -> str | None:
    """The prompt of transformers' own renderer, None where the template refuses."""
    try:
        prompts, _ = render_jinja_template(
            [messages], chat_template=template, add_generation_prompt=prompted, **TOKENS
        )
    except Exception:
        return None
    return str(prompts[0])


def our_prompt(template: str, messages: object, prompted: bool) -> str | None:
    try:
        return render(template, messages, TOKENS, add_generation_prompt=prompted)
    except Exception:
        return None


@pytest.mark.parametrize("name", EVERY)
def test_reference_equals_transformers(name: str) -> None:
    template = EVERY[name]
    for messages in PROBES.values():
        for form in (messages, in_parts(messages)):
            for prompted in (True, False):
                wanted = transformers_prompt(template, form, prompted)
                assert our_prompt(template, form, prompted) == wanted


@pytest.mark.parametrize("name", chat_templates.TEXT)
def test_translation_equals_transformers_for_text_and_parts(name: str) -> None:
    template = chat_templates.TEXT[name]
    translated = compare(template, TOKENS)
    assert translated.original == template
    for probe, messages in PROBES.items():
        wanted = transformers_prompt(template, messages, True)
        assert our_prompt(translated.source, messages, True) == wanted
        assert our_prompt(translated.source, in_parts(messages), True) == wanted
        assert translated.prompts.get(probe) == wanted
        assert (probe in translated.refusals) == (wanted is None)


@pytest.mark.parametrize("name", chat_templates.PARTS_ONLY)
def test_template_that_wants_parts(name: str) -> None:
    template = chat_templates.PARTS_ONLY[name]
    translated = compare(template, TOKENS)
    assert any("parts only" in note for note in translated.notes)
    for probe, messages in PROBES.items():
        wanted = transformers_prompt(template, in_parts(messages), True)
        assert translated.prompts[probe] == wanted
        assert our_prompt(translated.source, in_parts(messages), True) == wanted


def test_turn_ends() -> None:
    ends = {"chatml": "<|im_end|>\n", "instruct": " </s>", "no system": "<end>\n"}
    for name, end in ends.items():
        assert compare(chat_templates.TEXT[name], TOKENS).turn_end == end


def test_refusals_and_tool_branches_become_notes() -> None:
    notes = compare(chat_templates.NO_SYSTEM, TOKENS).notes
    assert any("System role not supported" in note for note in notes)
    notes = compare(chat_templates.THINKING, TOKENS).notes
    assert any("line 4" in note and "tojson" in note for note in notes)


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ messages[0].content }}\n\n{{ messages[0].role.find('s') }}", ["line 3", ".find()"]),
        ("{{ messages[0].content }}{{ 'a'.zfill(3) }}", ["line 1", ".zfill()"]),
        ("{{ messages[0].content }}{{ 'a b' | wordcount }}", ["line 1", "wordcount"]),
        ("{{ messages[0].content }}{{ {'a': 1} | tojson(indent=1) }}", ["tojson"]),
        ("{{ messages[0].content }}\n{% import 'x' as y %}", ["line 2", "import"]),
        ("{{ messages[0].content }}\n{% include 'x' %}", ["line 2", "include"]),
        ("{{ messages | map(attribute='content') | join }}", ["renders differently"]),
        (
            "{% for m in messages %}{% if 1 %}{% if 1 %}{% break %}{% endif %}{% endif %}"
            "{{ m.content }}{% endfor %}{{ messages[0].content }}",
            ["break"],
        ),
    ],
)
def test_what_cannot_be_translated_is_named(template: str, words: list[str]) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        compare(template, TOKENS)
    assert all(word in str(caught.value) for word in words)


@pytest.mark.parametrize(
    ("template", "word"),
    [
        ("{% for m in messages %}{{ m.content }}", "line 1"),
        ("{{ 'never the message' }}", "plain user message"),
        ("{{ raise_exception('always') }}", "always"),
        ("", "plain user message"),
        ("{{ messages[0].content }}\n\n{% nonsense %}", "line 3"),
        ("{{ messages[0].content }}" + "x" * 300_000, "characters"),
        ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "RecursionError"),
    ],
)
def test_broken_templates(template: str, word: str) -> None:
    with pytest.raises(BadInputError) as caught:
        prepare_chat_template(template, TOKENS)
    assert word in str(caught.value)


@pytest.mark.parametrize(
    "attack",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.__init__.__globals__ }}",
        "{% for x in range(99999) %}{% for y in range(99999) %}{% endfor %}{% endfor %}",
        "{{ 'a' * 10000000000 }}",
        "{% set ns = namespace(a='x' * 1000) %}{% for i in range(60) %}"
        "{% set ns.a = ns.a + ns.a %}{% endfor %}",
        "{{ cycler.__init__.__globals__.os.system('touch hacked') }}",
    ],
)
def test_hostile_templates_are_stopped(
    attack: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import hermes.tokenizer.template as template_module

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(template_module, "_SECONDS", 3.0)
    started = time.monotonic()
    with pytest.raises((BadInputError, UnsupportedModelError)):
        prepare_chat_template(attack + "{{ messages[0].content }}", TOKENS)
    assert time.monotonic() - started < 15
    assert list(tmp_path.iterdir()) == []


def test_translation_that_drops_something_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: a translator that leaves contents as lists, run in this process."""
    from hermes.tokenizer import jinja_dialect

    original = jinja_dialect.rewrite

    def forgetful(source: str, tokens: object, join_parts: bool) -> Rewritten:
        return original(source, {}, join_parts=False)

    assert compare(chat_templates.CHATML, TOKENS).source
    monkeypatch.setattr(jinja_dialect, "rewrite", forgetful)
    with pytest.raises(UnsupportedModelError, match="renders differently"):
        compare(chat_templates.CHATML, TOKENS)


def test_in_a_child_process_the_same() -> None:
    for name in ("chatml", "instruct"):
        template = chat_templates.TEXT[name]
        assert prepare_chat_template(template, TOKENS) == compare(template, TOKENS)


def test_translation_is_stable() -> None:
    for template in chat_templates.TEXT.values():
        once = rewrite(template, TOKENS, join_parts=True).source
        assert compare(once, TOKENS).prompts == (compare(template, TOKENS).prompts)


def test_where_templates_are_found(tmp_path: Path) -> None:
    config = tmp_path / "tokenizer_config.json"
    files = {"tokenizer_config.json": config}
    config.write_text("{}")
    assert find_template(files) is None
    assert find_template({}, {"tokenizer.chat_template": "G"}) == (
        "G",
        "tokenizer.chat_template",
    )
    config.write_text(json.dumps({"chat_template": "T"}))
    found = find_template(files, {"tokenizer.chat_template": "G"})
    assert found is not None
    assert found[0] == "T"
    named = [{"name": "rag", "template": "R"}, {"name": "default", "template": "D"}]
    config.write_text(json.dumps({"chat_template": named}))
    found = find_template(files)
    assert found is not None
    assert found[0] == "D"
    config.write_text(json.dumps({"chat_template": named[:1]}))
    with pytest.raises(BadInputError, match="rag"):
        find_template(files)
    jinja = tmp_path / "chat_template.jinja"
    jinja.write_text("J")
    found = find_template({**files, "chat_template.jinja": jinja})
    assert found == ("J", str(jinja))


def test_special_token_texts(tmp_path: Path) -> None:
    import toy_tokenizers

    tokenizer = read_tokenizer_json(json.dumps(toy_tokenizers.byte_level_json()).encode(), "toy")
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"bos_token": None, "eos_token": {"content": "<|im_end|>"}}))
    metadata = {"tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.padding_token_id": 9999}
    assert special_tokens({"tokenizer_config.json": config}, metadata, tokenizer) == {
        "eos_token": "<|im_end|>",
        "bos_token": "<|im_start|>",
    }
