"""The emulated Arm64 processor: how it is set up, its self-test, and rung 8."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from arm64 import obtain_sysroot

from converters.bundle import extract_section, read_bundle
from converters.pipeline import ConvertOptions, convert
from converters.source import SourceOptions
from hermes.assets import assets_folder
from hermes.cli import app, run_command
from hermes.deploy.debian import RELEASE, DebianPackages, find_mirror, unpack
from hermes.deploy.device_rung import (
    Pair,
    TokenVerdict,
    compare_distributions,
    compare_floats,
    judge_tokens,
    same_tokens,
)
from hermes.deploy.probe import check_processor, judge, known_probe
from hermes.deploy.sysroot import Sysroot, find_sysroot
from hermes.errors import NativeToolError, ResourceError
from hermes.recipe import Limits
from hermes.runners.flatbuffer import FlatbufferRunner
from hermes.runners.interface import Generation, Logits
from hermes.runners.litert_lm import LiteRtLmRunner
from hermes.runners.process import this_python
from hermes.verify.runtime import RuntimeData

NOWHERE = "http://127.0.0.1:9/debian"
TEXT = list(range(5, 95))


@pytest.fixture(scope="module")
def sysroot() -> Sysroot:
    return obtain_sysroot()


@pytest.fixture(scope="module")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded model with a prefill that can be padded."""
    folder = tmp_path_factory.mktemp("embedded")
    source, target = SourceOptions(assets_folder() / "tiny"), folder / "int8.litertlm"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        convert(ConvertOptions(source, target, context=128, prefill=(1, 8), verify=False))
    return target


@pytest.fixture(scope="module")
def model(embedded: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The flatbuffer of the embedded bundle."""
    opened = read_bundle(embedded)
    target = tmp_path_factory.mktemp("model") / "int8.tflite"
    extract_section(opened, opened.section("TFLiteModel"), target)
    return target


def test_the_probe_is_right_here() -> None:
    figures = check_processor(this_python(), "this machine")
    assert figures["float_difference"] < 1e-4
    assert figures["int8_correlation"] > 0.9999


def test_the_emulated_core_passes(sysroot: Sysroot) -> None:
    assert sysroot.check()["float_difference"] < 1e-4


def test_an_emulated_core_that_computes_garbage_is_found(sysroot: Sysroot) -> None:
    """QEMU 7.2 with `-cpu max`: int8 products are wrong, without any error."""
    with pytest.raises(NativeToolError, match="the emulated max computes garbage"):
        sysroot.check("max")


def test_a_core_without_the_instructions_of_litert(sysroot: Sysroot) -> None:
    with pytest.raises(NativeToolError, match="SIGILL"):
        sysroot.check("cortex-a53")


def test_a_sysroot_that_shows_the_cpuinfo_of_this_machine(sysroot: Sysroot, tmp_path: Path) -> None:
    """The trap that the sysroot's own /proc/cpuinfo closes."""
    (tmp_path / "root").mkdir()
    for name in ("emulator", "site"):
        (tmp_path / name).symlink_to(sysroot.path / name)
    for entry in (sysroot.path / "root").iterdir():
        if entry.name != "proc":
            (tmp_path / "root" / entry.name).symlink_to(entry)
    with pytest.raises(NativeToolError, match="SIGSEGV"):
        Sysroot(tmp_path).check()


@pytest.mark.parametrize("wrong", ["float", "int8", "nan"])
def test_wrong_logits_are_garbage(wrong: str) -> None:
    known = known_probe()
    found, found_int8 = known.logits.astype(np.float32), known.int8_logits.astype(np.float32)
    judge(known, found, found_int8, "here")
    if wrong == "float":
        found[4, 319] += 2e-3
    elif wrong == "nan":
        found_int8[0, 0] = np.nan
    else:
        found_int8[1] = found_int8[1][::-1]
    with pytest.raises(NativeToolError, match="here computes garbage"):
        judge(known, found, found_int8, "here")


def test_setup_without_a_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert run_command(app, ["arm64", "setup", "--mirror", NOWHERE]) == 5
    said = capsys.readouterr().err
    assert f"could not fetch Debian packages from {NOWHERE}" in said
    assert "--mirror" in said
    assert find_sysroot() is None
    assert not (tmp_path / "hermes" / "arm64").exists()


def test_setup_is_done_once(sysroot: Sysroot) -> None:
    assert run_command(app, ["arm64", "setup", "--mirror", NOWHERE]) == 0
    assert find_sysroot() == sysroot


def test_a_sysroot_for_another_runtime_is_none(
    sysroot: Sysroot, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = tmp_path / "hermes" / "arm64"
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text(json.dumps(sysroot.manifest))
    assert find_sysroot() is not None
    older = str(sysroot.manifest["key"]).replace("litert-lm-api==", "litert-lm-api==0")
    (folder / "manifest.json").write_text(json.dumps({"key": older}))
    assert find_sysroot() is None
    (folder / "manifest.json").write_text("{")
    assert find_sysroot() is None


def test_verify_without_setup(
    embedded: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    checkpoint = str(assets_folder() / "tiny")
    command = ["verify", str(embedded), "--against", checkpoint, "--runtime", "arm64"]
    assert run_command(app, command) == 5
    assert "hermes arm64 setup" in capsys.readouterr().err


def test_packages_are_verified_and_not_fetched_twice(tmp_path: Path) -> None:
    packages = DebianPackages(tmp_path, "arm64")
    try:
        (package,) = packages.fetch(["libmd0"], dependencies=False)
    except ResourceError as error:
        pytest.skip(f"no Debian mirror: {error.found}")
    assert (package.name, package.architecture) == ("libmd0", "arm64")
    whole, fetched = package.path.read_bytes(), package.path.stat().st_ino
    packages.fetch(["libmd0"], dependencies=False)
    assert package.path.stat().st_ino == fetched
    package.path.write_bytes(whole[:100] + bytes([whole[100] ^ 1]) + whole[101:])
    left = tmp_path / "cache" / "archives" / "libmd0_0.1-1_arm64.deb"
    left.write_bytes(whole + b"an older version")
    packages.fetch(["libmd0"], dependencies=False)
    assert package.path.read_bytes() == whole
    assert list(left.parent.glob("*.deb")) == [package.path]
    unpack([package], tmp_path / "root")
    assert list((tmp_path / "root").glob("usr/lib/*/libmd.so.0"))


def test_the_mirror_that_was_asked_for(tmp_path: Path) -> None:
    DebianPackages(tmp_path, "arm64", "http://mirror.example/debian")
    sources = (tmp_path / "sources.list").read_text()
    assert f"http://mirror.example/debian {RELEASE} main" in sources
    assert find_mirror().startswith("http")


@pytest.mark.slow
def test_rung_8_of_the_embedded_model(sysroot: Sysroot, embedded: Path, tmp_path: Path) -> None:
    checkpoint = str(assets_folder() / "tiny")
    command = ["verify", str(embedded), "--against", checkpoint, "--runtime", "arm64"]
    assert run_command(app, [*command, "--report", str(tmp_path)]) == 0
    report = json.loads((tmp_path / "report.json").read_text())
    checks = {check["name"]: check for check in report["checks"] if check["rung"] == 8}
    tight = [name for name in checks if name.startswith("float logits on Arm64")]
    assert len(tight) == 2
    assert all(checks[name]["value"] < 1e-3 for name in tight)
    assert checks["mean KL, Arm64 from here"]["value"] < 0.01
    tokens = [check for name, check in checks.items() if name.startswith("greedy tokens")]
    assert len(tokens) >= 3
    assert any(check["value"] == check["limit"] == 16 for check in tokens)
    assert all(check["passed"] for check in tokens)


class Garbled(FlatbufferRunner):
    """A processor that adds noise to every logit."""

    noise = 0.0

    def step(self, token: int, position: int) -> Logits:
        logits = super().step(token, position)
        draw = np.random.default_rng(position)
        return logits + np.float32(self.noise) * draw.standard_normal(len(logits), np.float32)


def garbled(noise: float) -> Callable[[Path], FlatbufferRunner]:
    kind = type("Noisy", (Garbled,), {"noise": noise})
    return lambda path: kind(path)


def test_a_processor_with_other_float_logits(model: Path) -> None:
    def compare(noise: float) -> list[bool]:
        pair = Pair(lambda: FlatbufferRunner(model), lambda: garbled(noise)(model))
        return [check.passed for check in compare_floats(pair, TEXT, "there", Limits())]

    assert compare(0.0) == [True, True]
    assert compare(0.01) == [False, False]


def test_a_processor_with_another_distribution(model: Path) -> None:
    def red(noise: float) -> list[str]:
        pair = Pair(lambda: FlatbufferRunner(model), lambda: garbled(noise)(model))
        result = compare_distributions(pair, TEXT, "there", Limits())
        return [check.name for check in result.checks if not check.passed]

    assert red(0.01) == []
    assert red(2.0) == [
        "mean KL, there from here",
        "correlation of logits, there",
        "clear choices that differ on there",
    ]


def test_another_answer_is_judged_by_the_margin(embedded: Path, model: Path) -> None:
    data = RuntimeData((), None, 12, 1, (2,))
    with LiteRtLmRunner(embedded) as runtime, FlatbufferRunner(model) as logits:
        wanted = runtime.generate("MACBETH.\n", 12)

        def verdict(text: str, limits: Limits) -> TokenVerdict:
            said = Generation(text, wanted.prompt_tokens, wanted.new_tokens, 0.0)
            return judge_tokens((runtime, logits), "MACBETH.\n", said, wanted, data, limits)

        def passes(text: str, clear_margin: float) -> bool:
            found = verdict(text, replace(Limits(), clear_margin=clear_margin))
            return same_tokens("MACBETH.", "there", text, wanted, found).passed

        other = wanted.text[:-8] + "~" + wanted.text[-7:]
        assert passes(wanted.text, 0.0)
        assert not passes(other, 0.0)
        assert passes(other, 1e9)
        assert 0 < verdict(other, Limits()).agreed < wanted.new_tokens
        assert verdict("~", Limits()).agreed == 0
