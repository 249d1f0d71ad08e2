"""The runtime's own engine renders the translated templates as transformers does the originals."""

from __future__ import annotations

import chat_templates
import pytest
import toy_tokenizers
from table_model import successor_table, write_table_model

from converters.bundle import BundleSpec, write_bundle
from hermes.runners.child import run_in_child
from hermes.tokenizer import PromptContract
from hermes.tokenizer.probes import PROBES
from hermes.tokenizer.sentencepiece import SentencePieceTokenizer
from hermes.tokenizer.template_check import compare

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
EVERY = {**chat_templates.TEXT, **chat_templates.PARTS_ONLY}


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("runtime")
    model = write_table_model(folder / "model.tflite", successor_table(128))
    tokenizer = SentencePieceTokenizer(toy_tokenizers.sentencepiece_model(), "toy")
    spec = BundleSpec(model, tokenizer, PromptContract(None, (2,)), 64)
    write_bundle(spec, folder / "bundle.litertlm")
    return str(folder / "bundle.litertlm")


def rendered(
    bundle: str, templates: list[str], probes: list[list[dict[str, str]]]
) -> list[list[str]]:
    return run_in_child("runtime_probe:render", bundle, templates, probes, timeout=120)


def test_equal_in_the_runtime(bundle: str) -> None:
    translated = {name: compare(template, TOKENS) for name, template in EVERY.items()}
    sources = [template.source for template in translated.values()]
    prompts = rendered(bundle, sources, list(PROBES.values()))
    for (name, template), found in zip(translated.items(), prompts, strict=True):
        # The runtime gives an empty prompt where the template refuses.
        assert found == [template.prompts.get(probe, "") for probe in PROBES], name


def test_the_original_fails_there(bundle: str) -> None:
    """Why translation is needed: contents are lists, so adding one to a string fails."""
    assert rendered(bundle, [chat_templates.CHATML], [PROBES["user"]]) == [[""]]


# What the runtime's engine makes of constructs whose difference the translation handles: an
# expression, its value in transformers, its value in the runtime ('' is a failure).
DIFFERENCES = [
    ("'aB'.upper()", "AB", ""),
    ("{'a': 1}.get('a')", "1", ""),
    ("'a,b'.split(',')|length", "2", ""),
    ("'%s' % 'a'", "a", ""),
    ("none is none", "True", "false"),
    ("nothing is none", "False", "true"),
    ("'a' is sequence", "True", "false"),
    ("true", "True", "true"),
    ("+1", "1", ""),
    ("''|default('d', boolean=true)", "d", ""),
    ("bos_token is defined", "False", "true"),
    ("{'a': 1}|tojson(indent=1)", '{\n "a": 1\n}', ""),
]


def test_the_differences_are_still_there(bundle: str) -> None:
    """If one vanishes with a new runtime, the translation can be made simpler."""
    from hermes.tokenizer.jinja_environment import render

    message = {"role": "user", "content": "x"}
    templates = ["{{ " + expression + " }}" for expression, _, _ in DIFFERENCES]
    found = rendered(bundle, templates, [[message]])
    for template, (expression, reference, runtime), prompts in zip(
        templates, DIFFERENCES, found, strict=True
    ):
        assert render(template, [message], {}) == reference, expression
        assert prompts == [runtime], expression


def test_nul_ends_a_prompt_in_the_runtime(bundle: str) -> None:
    """The reason why no probe contains U+0000."""
    messages = [{"role": "user", "content": "a\0b"}]
    template = "{{ messages[0].content[0].text }}"
    assert rendered(bundle, [template], [messages]) == [["a"]]
