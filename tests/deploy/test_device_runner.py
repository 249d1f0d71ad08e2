"""What is read from the programs on the device."""

from __future__ import annotations

from hermes.deploy.device_runner import DeviceSpeed, read_speed
from hermes.deploy.push import available_bytes

REPORT = """BenchmarkInfo:
  Time to first token: 1.25 s
  Prefill Turns (Total 1 turns):
      Prefill Speed: 310.50 tokens/sec.
  Decode Turns (Total 1 turns):
      Decode Speed: 47.25 tokens/sec.
"""
TOYBOX = """Filesystem       1024-blocks     Used Available Capacity Mounted on
/dev/block/dm-40   112149500 45113884  66904544      41% /data
"""


def test_the_figures_of_a_benchmark_report() -> None:
    assert read_speed(REPORT) == DeviceSpeed(310.5, 47.25, 1.25)


def test_a_report_without_figures() -> None:
    assert read_speed("I0000 loaded the model") == DeviceSpeed(None, None, None)


def test_room_on_the_device() -> None:
    assert available_bytes(TOYBOX) == 66904544 * 1024
    assert available_bytes("") is None
    assert available_bytes("df: no such option\n") is None
