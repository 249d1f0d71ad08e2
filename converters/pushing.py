"""Carry a bundle to a device, let it speak there, and compare with what it says here."""

from __future__ import annotations

import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from converters.bundle import Bundle, extract_section, read_bundle
from hermes.assets import assets_folder
from hermes.deploy.adb import Adb
from hermes.deploy.device_rung import RUNG, TokenVerdict, judge_tokens, same_tokens
from hermes.deploy.device_runner import DeviceRunner
from hermes.deploy.push import DEFAULT_FOLDER, Push
from hermes.errors import UsageError
from hermes.progress import OnProgress, Progress, silent
from hermes.recipe import Limits
from hermes.report.check import Report, equals, measured
from hermes.runners.flatbuffer import FlatbufferRunner
from hermes.runners.interface import Generation
from hermes.runners.litert_lm import LiteRtLmRunner
from hermes.verify.runtime import RuntimeData

NEW_TOKENS = 32
BENCH_TOKENS = (128, 32)
"""Prefilled and decoded."""
_ABOUT = "getprop ro.product.model 2>/dev/null; getprop ro.build.version.release 2>/dev/null"


@dataclass(frozen=True)
class PushOptions:
    """What to do with the bundle.

    Attributes:
        bundle: the file here.
        serial: the device, if several are connected.
        folder: on the device.
        runner: a LiteRT-LM command-line build for the device, None to push only.
        prompt: what to ask there; a line of the shipped prompts if None.
        bench: measure the device's speed too.
        threads: of the kernels here.
    """

    bundle: Path
    serial: str | None = None
    folder: str = DEFAULT_FOLDER
    runner: Path | None = None
    prompt: str | None = None
    bench: bool = False
    threads: int = 2


def push_bundle(options: PushOptions, on_progress: OnProgress = silent) -> Report:
    """Push, and with a runner generate on both sides.

    Raises:
        HermesError: each way to fail with its own exit code; the old model on the device is whole.
    """
    if options.runner is None and (options.prompt is not None or options.bench):
        raise UsageError(
            "--prompt and --bench need something that runs on the device",
            todo="name a LiteRT-LM command-line build for it with --runner",
        )
    on_progress(Progress("reading the bundle"))
    opened = read_bundle(options.bundle)
    adb = Adb(options.serial)
    pushed = Push(adb, options.bundle, options.folder).run(on_progress)
    report = Report(facts={"device": _about(adb), "pushed": asdict(pushed)})
    size = options.bundle.stat().st_size
    report.checks.append(
        equals("bytes on the device with the right SHA-256", RUNG, pushed.size, size, pushed.path)
    )
    if options.runner is not None:
        on_progress(Progress("pushing the runner"))
        runner = DeviceRunner(adb, options.runner, options.folder, pushed.path)
        _speak(options, opened, runner, report, on_progress)
        if options.bench:
            on_progress(Progress("benchmark on the device"))
            _measure(runner, report)
    return report


def _speak(
    options: PushOptions,
    opened: Bundle,
    runner: DeviceRunner,
    report: Report,
    on_progress: OnProgress,
) -> None:
    """The same prompt there and here; a difference is judged by the bundle's own logits here."""
    data = _data(opened)
    question = options.prompt or _first_prompt()
    with LiteRtLmRunner(options.bundle, threads=options.threads) as here:
        chat = opened.prompt.chat_template is not None
        prompt = here.render([{"role": "user", "content": question}]) if chat else question
        on_progress(Progress("generating on the device"))
        said = Generation(runner.generate(prompt, NEW_TOKENS), 0, NEW_TOKENS, 0.0)
        wanted = here.generate(prompt, NEW_TOKENS)
        limits = Limits()
        if said.text == wanted.text:
            verdict = TokenVerdict(wanted.new_tokens, True, float("inf"), limits.clear_margin)
        else:
            with tempfile.TemporaryDirectory(prefix="hermes-push-") as folder:
                model = Path(folder) / "model.tflite"
                extract_section(opened, opened.section("TFLiteModel"), model)
                with FlatbufferRunner(model, threads=options.threads) as logits:
                    verdict = judge_tokens((here, logits), prompt, said, wanted, data, limits)
        report.checks.append(same_tokens(question, "the device", said.text, wanted, verdict))
        report.facts["answer"] = {
            "prompt": prompt,
            "device": said.text,
            "desktop": wanted.text,
            "device_ids": here.tokenize(said.text),
            "desktop_ids": here.tokenize(wanted.text),
        }


def _measure(runner: DeviceRunner, report: Report) -> None:
    speed = runner.benchmark(*BENCH_TOKENS)
    report.facts["benchmark"] = asdict(speed)
    for name, value in asdict(speed).items():
        if value is not None:
            label = name.replace("_", " ") + (" tokens/s" if name in ("prefill", "decode") else "")
            report.checks.append(measured(f"{label} on the device", RUNG, value))


def _data(opened: Bundle) -> RuntimeData:
    prompt = opened.prompt
    return RuntimeData(
        (), None, NEW_TOKENS, prompt.start_token_id, prompt.stop_token_ids, prompt.suppress_tokens
    )


def _first_prompt() -> str:
    return (assets_folder() / "prompts.txt").read_text(encoding="utf-8").splitlines()[0]


def _about(adb: Adb) -> dict[str, str]:
    """Model, version and processor, as far as the device tells."""
    processor = adb.demand("uname -m", "ask for the processor").strip()
    about = " ".join(adb.shell(_ABOUT).output.split())
    return {"serial": adb.serial, "processor": processor, "about": about}
