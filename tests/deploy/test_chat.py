"""`hermes chat` as people use it: in a real terminal, with a pipe, with one message."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pexpect
import pytest
from table_model import successor_table, write_table_model
from tiny_bundle import write_bundle

from hermes.runners.conversation import Conversation, Sampling, choose_sampling
from hermes.runners.litert_lm import LiteRtLmRunner

COMMAND = [sys.executable, "-m", "hermes.cli", "chat"]
QUOTE = "Double, double, toil and trouble;\n"
PROMPT = r"\n?> $"
LONG = "(?s).{300}"
COST = r"\[(stopped; )?(\d+) tokens at [\d.]+/s, prompt (\d+) at \d+/s, context (\d+) of (\d+)\]"


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Says one token after the other, for many seconds: 0 is its only stop token."""
    folder = tmp_path_factory.mktemp("endless")
    table = successor_table(128)
    table[127] = table[2]  # the last one goes back to 3, so that 0 never comes
    model = write_table_model(folder / "table.tflite", table, context=100_000)
    return write_bundle(model, folder / "endless.litertlm", stop_ids=[0], max_num_tokens=100_000)


@contextmanager
def terminal(bundle: Path, *options: str) -> Iterator[pexpect.spawn]:
    child = pexpect.spawn(
        COMMAND[0], [*COMMAND[1:], str(bundle), "--threads", "1", *options],
        encoding="utf-8", timeout=60, dimensions=(40, 200), env={**os.environ, "TERM": "dumb"},
    )  # fmt: skip
    try:
        yield child
    finally:
        child.close(force=True)


def ended_with(child: pexpect.spawn) -> int | None:
    child.expect(pexpect.EOF)
    child.wait()
    return child.exitstatus


def run(bundle: Path, *options: str, given: str | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, str(bundle), *options],
        input=given,
        stdin=subprocess.DEVNULL if given is None else None,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_a_conversation_in_a_terminal(embedded: Path) -> None:
    with LiteRtLmRunner(embedded) as runtime:
        first, second = runtime.chat(["What is the night?", "Who's there?"], 12)
    with terminal(embedded, "--max-tokens", "12") as child:
        child.expect(PROMPT)
        child.sendline("/help")
        child.expect("/reset .*Ctrl-C")
        child.expect(PROMPT)
        counts = []
        for message, turn in (("What is the night?", first), ("Who's there?", second)):
            child.sendline(message)
            child.expect(COST)
            shown = child.before.replace("\r\n", "\n").removeprefix(f"{message}\n")
            assert shown.rstrip("\n") == turn.generation.text.rstrip("\n")
            assert int(child.match[2]) == turn.generation.new_tokens
            counts.append(int(child.match[4]))
            child.expect(PROMPT)
        assert counts == [first.cache_tokens, second.cache_tokens]
        child.sendline("/reset")
        child.expect("begins anew")
        child.expect(PROMPT)
        child.sendline("What is the night?")
        child.expect(COST)
        assert int(child.match[4]) == first.cache_tokens
        child.expect(PROMPT)
        child.sendline("/nothing")
        child.expect("no such command: /nothing")
        child.expect(PROMPT)
        child.sendline("/quit")
        assert ended_with(child) == 0


def test_answers_appear_while_they_are_made(endless: Path) -> None:
    with terminal(endless) as child:
        child.expect(PROMPT)
        child.sendline("the cat")
        child.expect(LONG)
        assert child.isalive()
        assert "tokens at" not in child.before


def test_ctrl_c_stops_the_answer_and_keeps_the_conversation(endless: Path) -> None:
    with terminal(endless) as child:
        child.expect(PROMPT)
        child.sendline("the cat")
        child.expect(LONG)
        child.sendintr()
        child.expect(COST)
        assert child.match[1]
        said = int(child.match[2])
        assert said > 50
        child.expect(PROMPT)
        child.sendline("and")
        child.expect(LONG)
        child.sendintr()
        child.expect(COST)
        # What was said before is fed again, because a stopped conversation never answers again.
        assert int(child.match[3]) > said
        child.expect(PROMPT)
        child.sendeof()
        assert ended_with(child) == 0


def test_ctrl_c_twice_leaves(endless: Path) -> None:
    with terminal(endless) as child:
        child.expect(PROMPT)
        child.sendintr()
        child.expect("once more")
        child.expect(PROMPT)
        child.sendintr()
        assert ended_with(child) == 130
    with terminal(endless) as child:
        child.expect(PROMPT)
        child.sendline("the cat")
        child.expect(LONG)
        child.sendintr()
        child.expect(COST)
        child.sendintr()
        assert ended_with(child) == 130


def test_a_message_between_them_counts_anew(embedded: Path) -> None:
    with terminal(embedded, "--max-tokens", "4") as child:
        child.expect(PROMPT)
        child.sendintr()
        child.expect("once more")
        child.expect(PROMPT)
        child.sendline("Who?")
        child.expect(COST)
        child.expect(PROMPT)
        child.sendintr()
        child.expect("once more")
        child.expect(PROMPT)
        child.sendeof()
        assert ended_with(child) == 0


def test_the_end_of_the_context_is_said(embedded: Path) -> None:
    with terminal(embedded, "--seed", "1", "--temperature", "2", "--top-k", "900") as child:
        child.expect(PROMPT)
        child.sendline("word " * 300)
        child.expect(r"too long for the context of 128 tokens \(\d+ >= 128\)")
        child.expect(PROMPT)
        for _ in range(40):
            child.sendline("Go on, and on, and on, and on.")
            found = child.expect([COST + r"\r\n>", "context of 128 tokens is full; /reset"])
            if found == 1:
                break
        else:
            pytest.fail("128 tokens never became full")
        child.expect(PROMPT)
        child.sendline("More.")
        child.expect("no room is left for this message|too long for the context")
        child.sendline("/reset")
        child.expect("begins anew")
        child.sendline("Who?")
        child.expect(COST)


def test_one_message(embedded: Path) -> None:
    with LiteRtLmRunner(embedded) as runtime:
        (turn,) = runtime.chat([QUOTE], 16)
    done = run(embedded, "--prompt", QUOTE, "--max-tokens", "16")
    assert done.returncode == 0, done.stderr
    assert done.stdout == turn.generation.text + "\n"
    assert re.search(COST, done.stderr)


def test_piped_input_is_one_message_or_one_a_line(embedded: Path) -> None:
    with LiteRtLmRunner(embedded) as runtime:
        (whole,) = runtime.chat(["Who?\nWhat?\n"], 8)
        lines = runtime.chat(["Who?", "What?"], 8)
    once = run(embedded, "--max-tokens", "8", given="Who?\nWhat?\n")
    assert once.stdout == whole.generation.text + "\n"
    several = run(embedded, "--max-tokens", "8", "--lines", given="Who?\n\nWhat?\n")
    assert several.stdout == "".join(turn.generation.text + "\n" for turn in lines)


def test_too_long_a_message_is_bad_input(embedded: Path) -> None:
    done = run(embedded, "--prompt", "word " * 300)
    assert done.returncode == 3
    assert "too long for the context of 128 tokens" in done.stderr
    assert done.stdout == ""


def test_a_signal_ends_a_piped_answer(endless: Path) -> None:
    child = subprocess.Popen(
        [*COMMAND, str(endless), "--prompt", "the cat"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        # A test run in the background ignores the signal, and its children would too.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert child.stdout is not None
    assert child.stdout.read(100)
    child.send_signal(signal.SIGINT)
    child.communicate(timeout=120)
    assert child.returncode == 130


def test_not_a_bundle(tmp_path: Path) -> None:
    (tmp_path / "x.litertlm").write_bytes(b"nothing")
    done = run(tmp_path / "x.litertlm", "--prompt", "a")
    assert done.returncode == 3
    assert done.stderr.count("error:") == 1


def test_system_message_and_sampling(tmp_path: Path) -> None:
    """A model whose next token is one of 40 alike: only the seed decides."""
    table = np.zeros((128, 128), np.float32)
    table[:, 3:43] = 10
    model = write_table_model(tmp_path / "even.tflite", table, context=256)
    bundle = write_bundle(model, tmp_path / "even.litertlm", stop_ids=[0], max_num_tokens=256)

    def say(sampling: Sampling | None, system: str | None = None) -> tuple[str, int]:
        with Conversation(
            bundle, sampling=sampling, system=system, max_new_tokens=20, threads=1
        ) as talker:
            return "".join(talker.stream("the cat")), talker.last.prompt_tokens

    seeds = [say(Sampling(temperature=1.0, seed=seed))[0] for seed in (1, 1, 2)]
    assert seeds[0] == seeds[1] != seeds[2]
    greedy = [say(choose_sampling(0.0, None, None, seed))[0] for seed in (1, 2)]
    assert greedy[0] == greedy[1] == say(Sampling(top_k=1))[0]
    assert say(None, "a quick brown fox")[1] > say(None)[1]


def test_options_that_are_not_given_have_defaults() -> None:
    assert choose_sampling(None, None, None, None) is None
    assert choose_sampling(None, 5, None, None) == Sampling(0.8, 5, 0.95, 0)
