"""A LiteRT-LM command-line build on the device: generate there, and benchmark.

The options and the output are those of LiteRT-LM's own `litert_lm_advanced_main`, which its
repository builds for Android; the emulated device has a program of ours that takes the same ones
(`hermes.deploy.emulated_runner`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from hermes.deploy.adb import Adb, Done, quoted
from hermes.deploy.push import Push
from hermes.errors import NativeToolError

SECONDS = 1800.0
_ANSWER = "output: "
_SHOWN_LINES = 8
_FIGURES = {
    "prefill": r"Prefill Speed: ([\d.]+) tokens/sec",
    "decode": r"Decode Speed: ([\d.]+) tokens/sec",
    "first_token_seconds": r"Time to first token: ([\d.]+) s",
}


@dataclass(frozen=True)
class DeviceSpeed:
    """Tokens per second, and seconds to the first token; None where the runner did not say."""

    prefill: float | None
    decode: float | None
    first_token_seconds: float | None


class DeviceRunner:
    """The runner, pushed beside the model.

    Args:
        adb: the device.
        program: the command-line build here.
        folder: on the device.
        model: on the device.
    """

    def __init__(self, adb: Adb, program: Path, folder: str, model: str) -> None:
        self._adb = adb
        self._model = model
        self._program = Push(adb, program, folder).run().path
        adb.demand(f"chmod 755 {quoted(self._program)}", "make the runner executable")

    def generate(self, prompt: str, max_new_tokens: int) -> str:
        """Continue a raw text greedily, as the bundle's own sampling is.

        Raises:
            NativeToolError: the runner failed, or printed no answer.
        """
        done = self._run(
            "--use_session=true",
            f"--max_output_tokens={max_new_tokens}",
            f"--input_prompt={prompt}",
        )
        answer = done.output.partition(_ANSWER)
        if not answer[1]:
            raise self._failed(done, "printed no answer")
        return answer[2].removesuffix("\n")

    def benchmark(self, prefill_tokens: int, decode_tokens: int) -> DeviceSpeed:
        """Feed and decode that many tokens once."""
        done = self._run(
            "--benchmark=true",
            f"--benchmark_prefill_tokens={prefill_tokens}",
            f"--benchmark_decode_tokens={decode_tokens}",
        )
        return read_speed(done.output + done.errors)

    def _run(self, *options: str) -> Done:
        shared = ("--backend=cpu", f"--model_path={self._model}", "--async=false")
        words = [self._program, *shared, "--disable_cache=true", *options]
        done = self._adb.shell(" ".join(quoted(word) for word in words), SECONDS)
        if done.status != 0:
            raise self._failed(done, f"ended with status {done.status}")
        return done

    def _failed(self, done: Done, what: str) -> NativeToolError:
        lines = [line for line in (done.errors + done.output).splitlines() if line.strip()]
        return NativeToolError(
            f"the runner on {self._adb.serial} {what}",
            problems=[f"it printed: {line}" for line in lines[-_SHOWN_LINES:]],
            expected="a LiteRT-LM command-line build for the device's processor",
        )


def read_speed(printed: str) -> DeviceSpeed:
    """The figures of LiteRT-LM's benchmark report."""
    found = {name: re.search(pattern, printed) for name, pattern in _FIGURES.items()}
    values = {name: float(hit[1]) if hit else None for name, hit in found.items()}
    return DeviceSpeed(values["prefill"], values["decode"], values["first_token_seconds"])
