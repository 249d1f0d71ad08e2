"""Commands for a finished bundle: is it whole, will it work, talk to it, load it in an app."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from hermes.cli.application import AsJson, BundleFile, Debug, Threads, app
from hermes.errors import UsageError, VerificationError

_INTERRUPTED = 130


@app.command()
def check(bundle: BundleFile, as_json: AsJson = False, debug: Debug = False) -> None:
    """Compare every byte of a bundle with the hashes it carries; needs no checkpoint.

    It finds damage, not forgery: whoever changes a file on purpose can write new hashes.
    """
    from converters.integrity import check_integrity, check_readable
    from hermes.deploy.card import check_lines, demand_card, read_card

    found = check_integrity(bundle).demand()
    if not found.proven:
        check_readable(bundle)
    card = read_card(bundle)
    demand_card(bundle, card, found.digest)
    facts = found.facts(card)
    print(json.dumps(facts) if as_json else "\n".join(check_lines(facts)))


@app.command()
def chat(
    bundle: BundleFile,
    prompt: Annotated[
        str | None, typer.Option("--prompt", help="Answer this one message and leave.")
    ] = None,
    system: Annotated[str | None, typer.Option("--system", help="System message.")] = None,
    temperature: Annotated[
        float | None, typer.Option("--temperature", help="0 is greedy.", min=0.0)
    ] = None,
    top_k: Annotated[
        int | None, typer.Option("--top-k", help="Choose among this many tokens.", min=1)
    ] = None,
    top_p: Annotated[
        float | None, typer.Option("--top-p", help="Probability they share.", min=0.0, max=1.0)
    ] = None,
    seed: Annotated[int | None, typer.Option("--seed", help="Makes the choice repeatable.")] = None,
    max_tokens: Annotated[
        int | None, typer.Option("--max-tokens", help="Of one answer.", min=1)
    ] = None,
    lines: Annotated[
        bool, typer.Option("--lines", help="Piped input: one message a line, not one in all.")
    ] = False,
    threads: Threads = 2,
    debug: Debug = False,
) -> None:
    """Talk to a bundle through LiteRT-LM, with its own template; streaming.

    Without a sampling option the bundle's own sampler decides (greedy in bundles of Hermes); with
    one, the others are temperature 0.8, top-k 40, top-p 0.95 and seed 0. Piped input is one
    message; --lines makes each of its lines one, in one conversation.
    """
    from converters.anatomy import context_of
    from hermes.chat import Chat
    from hermes.runners.conversation import Conversation, choose_sampling

    context = context_of(bundle)
    sampling = choose_sampling(temperature, top_k, top_p, seed)
    if prompt is None and sys.stdin.isatty():
        print(f"loading {bundle.name}, context {context}; /help lists commands", file=sys.stderr)
    try:
        with Conversation(
            bundle, system=system, sampling=sampling, max_new_tokens=max_tokens, threads=threads
        ) as talker:
            session = Chat(talker, context)
            if prompt is not None:
                session.once(prompt)
            elif sys.stdin.isatty():
                session.terminal()
            elif lines:
                session.lines(iter(sys.stdin))
            else:
                session.once(sys.stdin.read())
    except KeyboardInterrupt:
        # The child process is gone already; there is nothing else to undo.
        raise typer.Exit(_INTERRUPTED) from None


@app.command()
def lint(
    bundle: Annotated[Path | None, typer.Argument(help="A .litertlm file.")] = None,
    rules: Annotated[bool, typer.Option("--rules", help="List every rule and leave.")] = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Say whether a bundle of any exporter will load and behave on a phone, by static rules.

    Exit code 6 if a rule of severity error does not hold.
    """
    from hermes.deploy.lint import lint as apply
    from hermes.deploy.lint import lint_lines, rules_as_json, rules_lines, verdict
    from hermes.deploy.lint_device import estimate, estimate_lines

    if rules:
        print(json.dumps(rules_as_json()) if as_json else "\n".join(rules_lines()))
        return
    if bundle is None:
        raise UsageError("no bundle given", expected="hermes lint BUNDLE, or hermes lint --rules")
    from converters.anatomy import describe

    facts = describe(bundle)
    found, taken = apply(facts), estimate(facts)
    if as_json:
        listed = [finding.to_dict() for finding in found]
        print(json.dumps({"path": str(bundle), "findings": listed, "device": taken.to_dict()}))
    else:
        print("\n".join([*lint_lines(found), *estimate_lines(taken), verdict(found)]))
    if any(finding.severity == "error" for finding in found):
        raise typer.Exit(VerificationError.exit_code)


@app.command()
def snippet(
    platform: Annotated[str, typer.Argument(help="android, ios or python.")],
    bundle: BundleFile,
    system: Annotated[str, typer.Option("--system", help="System message.")] = "",
    debug: Debug = False,
) -> None:
    """Print code that loads this bundle in an app, with its own facts filled in."""
    from converters.anatomy import describe
    from converters.bundle_reader import hash_file
    from hermes.deploy.snippet import app_facts
    from hermes.deploy.snippet import snippet as write

    facts = describe(bundle)
    digest = facts.digest or hash_file(bundle)
    print(write(platform, app_facts(bundle, facts, system, digest)), end="")
