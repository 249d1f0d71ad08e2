"""Rung 8 on an emulated Arm64 processor: the same files in its LiteRT and LiteRT-LM."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hermes.deploy.device_rung import DeviceInput, DeviceResult, Pair, check_device
from hermes.deploy.sysroot import require_sysroot
from hermes.recipe import Recipe
from hermes.runners.flatbuffer import LITERT, FlatbufferRunner
from hermes.runners.litert_lm import LiteRtLmRunner
from hermes.verify.ladder_input import OpenLogits, OpenTokens
from hermes.verify.runtime import RuntimeData

NAME = "Arm64"
TIMEOUT = 1800.0
"""Seconds for one call: emulation costs a factor of ten to forty."""


@dataclass(frozen=True)
class Files:
    """What runs on both processors.

    Attributes:
        bundle: the .litertlm file, and `desktop` is it in LiteRT-LM here.
        unpacked: its model, and `here` is that in the interpreter here.
        floating: the float32 bound form; None if there is none.
    """

    bundle: Path
    desktop: OpenTokens
    unpacked: Path
    here: OpenLogits
    floating: Path | None


def arm64_rung(
    files: Files, recipe: Recipe, text_ids: Sequence[int], data: RuntimeData, threads: int
) -> Callable[[], DeviceResult]:
    """The rung as a function; the sysroot is looked for at once.

    Raises:
        ResourceError: there is no sysroot.
    """
    sysroot = require_sysroot()
    launcher = sysroot.launcher()
    arm64 = replace(LITERT, name=f"LiteRT interpreter on {NAME}", launcher=launcher)

    def there(path: Path) -> OpenLogits:
        return lambda: FlatbufferRunner(path, threads=threads, timeout=TIMEOUT, interpreter=arm64)

    def runtime() -> LiteRtLmRunner:
        return LiteRtLmRunner(files.bundle, threads=threads, timeout=TIMEOUT, launcher=launcher)

    floats, floating = None, files.floating
    if floating is not None:
        floats = Pair(lambda: FlatbufferRunner(floating, threads=threads), there(floating))
    given = DeviceInput(
        name=NAME,
        self_test=sysroot.check,
        floats=floats,
        bundled=Pair(files.here, there(files.unpacked)),
        quantized=any(rule.weights != "float32" for rule in recipe.quantization),
        runtime=runtime,
        desktop=files.desktop,
        data=data,
        text_ids=text_ids,
    )
    return lambda: check_device(given, recipe.limits)
