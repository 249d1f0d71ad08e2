"""`hermes push` against a real adb and a real adbd, with real faults."""

from __future__ import annotations

import hashlib
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from real_adb import Device, obtain_adb, real_device, why_no_namespace

from hermes.cli import app, run_command
from hermes.deploy.adb import Adb, parse_devices
from hermes.deploy.adb import choose_device as choose
from hermes.deploy.push import Push
from hermes.errors import DeviceError, ResourceError, VerificationError

PORT = 5700
"""Outside 5555 to 5585, where adb looks for emulators by itself."""
SERIAL = f"localhost:{PORT}"


@pytest.fixture(scope="module")
def device(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Device]:
    reason = why_no_namespace()
    if reason:
        pytest.skip(reason)
    try:
        programs = obtain_adb()
    except ResourceError as error:
        pytest.skip(f"no real adb to test with: {error.found}")
    with real_device(programs, tmp_path_factory.mktemp("device")) as made:
        yield made


@pytest.fixture(scope="module")
def tiny_bundle(converted: Callable[[str], Path]) -> Path:
    return converted("int8")


@pytest.fixture
def phone(device: Device, monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    """One daemon that is connected, and this device's adb on the PATH."""
    monkeypatch.setenv("PATH", f"{device.bin}:{os.environ['PATH']}")
    device.connect(PORT)
    yield device
    device.forget()


@pytest.fixture
def there(tmp_path: Path) -> Path:
    """A folder on the device, which shares this machine's files."""
    return tmp_path / "phone"


def push(*arguments: str | Path) -> int:
    return run_command(app, ["push", *map(str, arguments)])


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def big_file(folder: Path, size: int) -> Path:
    """A file that takes long enough to send for something to happen."""
    path = folder / "big.litertlm"
    path.write_bytes(b"HERMES" * (size // 6))
    return path


def test_a_bundle_arrives_whole(phone: Device, tiny_bundle: Path, there: Path) -> None:
    assert push(tiny_bundle, "--dir", there) == 0
    assert names(there) == [tiny_bundle.name]
    assert (there / tiny_bundle.name).read_bytes() == tiny_bundle.read_bytes()


def test_the_same_bundle_is_not_sent_twice(phone: Device, tiny_bundle: Path, there: Path) -> None:
    assert Push(Adb(), tiny_bundle, str(there)).run().sent
    assert not Push(Adb(), tiny_bundle, str(there)).run().sent


def test_a_model_truncated_on_the_device_is_replaced(
    phone: Device, tiny_bundle: Path, there: Path
) -> None:
    assert push(tiny_bundle, "--dir", there) == 0
    os.truncate(there / tiny_bundle.name, 1000)
    assert push(tiny_bundle, "--dir", there) == 0
    assert (there / tiny_bundle.name).read_bytes() == tiny_bundle.read_bytes()


def test_old_weight_caches_go_and_other_files_stay(
    phone: Device, tiny_bundle: Path, there: Path
) -> None:
    there.mkdir()
    for name in (f"{tiny_bundle.name}_17_42.xnnpack_cache", "other.litertlm_1_2.xnnpack_cache"):
        (there / name).write_bytes(b"old")
    assert push(tiny_bundle, "--dir", there) == 0
    assert names(there) == sorted([tiny_bundle.name, "other.litertlm_1_2.xnnpack_cache"])


def test_names_that_a_shell_would_take_apart(
    phone: Device, tiny_bundle: Path, tmp_path: Path
) -> None:
    odd = tmp_path / "it's a; model $(x).litertlm"
    odd.write_bytes(tiny_bundle.read_bytes())
    folder = tmp_path / "my phone's"
    assert push(odd, "--dir", folder) == 0
    assert names(folder) == [odd.name]


def test_a_file_truncated_before_it_is_hashed(
    phone: Device, tiny_bundle: Path, there: Path
) -> None:
    there.mkdir()
    old = there / tiny_bundle.name
    old.write_bytes(b"the old model")
    sent = Push(Adb(), tiny_bundle, str(there))
    sent.prepare()
    sent.send()
    os.truncate(sent.part, 1000)
    with pytest.raises(VerificationError, match="arrived damaged"):
        sent.confirm()
    assert old.read_bytes() == b"the old model"


def test_a_damaged_bundle_is_not_pushed(
    phone: Device, tiny_bundle: Path, tmp_path: Path, there: Path
) -> None:
    damaged = tmp_path / "damaged.litertlm"
    damaged.write_bytes(tiny_bundle.read_bytes()[:5000])
    assert push(damaged, "--dir", there) == 3
    assert not there.exists()


@pytest.mark.parametrize("size", ["1m", "64k"])
def test_a_small_disk(
    phone: Device, there: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], size: str
) -> None:
    there.mkdir()
    phone.inside("mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(there))
    sent = Push(Adb(), big_file(tmp_path, 3_000_000), str(there))
    with pytest.raises(ResourceError, match="no room for") as raised:
        sent.run()
    assert raised.value.exit_code == 5
    assert phone.inside("ls", str(there)) == ""


def test_a_disk_that_fills_up_while_it_is_written(
    phone: Device, there: Path, tmp_path: Path
) -> None:
    there.mkdir()
    phone.inside("mount", "-t", "tmpfs", "-o", "size=1m", "none", str(there))
    phone.inside("sh", "-c", f"echo old > '{there}/big.litertlm'")
    sent = Push(Adb(), big_file(tmp_path, 3_000_000), str(there))
    # As if the room had been there when it was asked for.
    with pytest.raises(ResourceError, match="it is full"):
        sent.send()
    assert phone.inside("cat", f"{there}/big.litertlm") == "old\n"


def test_a_folder_that_cannot_be_written(
    phone: Device, tiny_bundle: Path, capsys: pytest.CaptureFixture[str], there: Path
) -> None:
    there.mkdir()
    phone.inside("mount", "-t", "tmpfs", "-o", "ro", "none", str(there))
    assert push(tiny_bundle, "--dir", there) == 8
    assert "cannot be written: " in capsys.readouterr().err
    assert push(tiny_bundle, "--dir", "/proc/hermes") == 8


def test_the_cable_pulled_in_mid_push(phone: Device, there: Path, tmp_path: Path) -> None:
    there.mkdir()
    source = big_file(tmp_path, 200_000_000)
    old = there / source.name
    old.write_bytes(b"the old model")
    sent = Push(Adb(), source, str(there))

    def pull() -> None:
        deadline = time.monotonic() + 60
        part = Path(sent.part)
        while time.monotonic() < deadline and not (part.exists() and part.stat().st_size):
            time.sleep(0.001)
        phone.pull_cables()

    puller = threading.Thread(target=pull)
    puller.start()
    with pytest.raises(DeviceError, match="the connection to localhost:5700 broke") as raised:
        sent.run()
    puller.join()
    assert raised.value.exit_code == 9
    assert old.read_bytes() == b"the old model"
    assert 0 < Path(sent.part).stat().st_size < source.stat().st_size
    phone.forget()
    phone.connect(PORT)
    assert Push(Adb(), source, str(there)).run().sent
    assert names(there) == [source.name]


def test_a_push_that_was_killed(phone: Device, there: Path, tmp_path: Path) -> None:
    """The client dies with SIGKILL, as when the computer does."""
    there.mkdir()
    source = big_file(tmp_path, 200_000_000)
    (there / source.name).write_bytes(b"the old model")
    part = there / f"{source.name}.part"
    sending = subprocess.Popen([phone.bin / "adb", "push", str(source), str(part)])
    while not (part.exists() and part.stat().st_size):
        time.sleep(0.001)
    sending.kill()
    sending.wait()
    assert (there / source.name).read_bytes() == b"the old model"
    assert Push(Adb(), source, str(there)).run().sent
    assert names(there) == [source.name]
    found = hashlib.sha256((there / source.name).read_bytes()).hexdigest()
    assert found == hashlib.sha256(source.read_bytes()).hexdigest()


def test_no_device(
    device: Device,
    tiny_bundle: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("PATH", f"{device.bin}:{os.environ['PATH']}")
    assert push(tiny_bundle) == 9
    assert "no device is connected" in capsys.readouterr().err


def test_a_device_that_went_offline(
    phone: Device, tiny_bundle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    phone.pull_cables()
    assert push(tiny_bundle) == 9
    assert SERIAL in capsys.readouterr().err


def test_several_devices(
    phone: Device, tiny_bundle: Path, there: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    phone.connect(PORT + 1)
    assert push(tiny_bundle, "--dir", there) == 2
    assert "--serial" in capsys.readouterr().err
    assert push(tiny_bundle, "--dir", there, "--serial", SERIAL) == 0
    assert push(tiny_bundle, "--serial", "emulator-5554") == 9
    assert "no device emulator-5554" in capsys.readouterr().err


def test_no_adb(
    tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    for name in ("ANDROID_HOME", "ANDROID_SDK_ROOT"):
        monkeypatch.delenv(name, raising=False)
    assert push(tiny_bundle) == 5
    assert "no adb on this machine" in capsys.readouterr().err


def test_prompt_without_a_runner(tiny_bundle: Path) -> None:
    assert push(tiny_bundle, "--prompt", "Hello") == 2


def test_a_device_that_has_not_authorized_this_computer() -> None:
    """Debian's daemon never asks; the listing is the one that Android's documentation shows."""
    devices = parse_devices("List of devices attached\n0123456789ABCDEF\tunauthorized\n\n")
    with pytest.raises(DeviceError, match="has not authorized this computer"):
        choose(devices, None)
