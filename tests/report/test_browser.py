"""The page in a real headless browser: table and plots are really painted."""

from __future__ import annotations

import math
import shutil
import subprocess
import zlib
from itertools import pairwise
from pathlib import Path

import pytest

from hermes.report.check import Report, at_least, at_most, equals, holds
from hermes.report.writers import write_report

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on the PATH")
WIDTH, HEIGHT = 1000, 3000
SERIES = {
    "KL by position": [abs(math.sin(i)) / 50 + 1e-5 for i in range(200)],
    "logit difference by position, exportable module from reference": [1e-5] * 64,
    "difference by layer, float flatbuffer from exportable module": [1e-6, 3e-6, 1e-5],
    "agreement along the generation": [1.0, 1.0, 0.75],
}


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    report = Report(
        checks=[
            equals("parameters missing", 0, 0, 0),
            at_most("mean KL", 5, 0.01, 0.03, "200 positions"),
            at_least("top-1 agreement", 5, 0.5, 0.9, "200 positions"),
            holds("the chat template renders", 7, True, "yes", "<b>bold</b>"),
        ],
        skipped={1: "no golden logits"},
        facts={"config": {"vocab_size": {"value": 128, "source": "shape of embed_tokens"}}},
        series=SERIES,
    )
    write_report(report, folder)
    return folder / "report.html"


def browse(page: Path, folder: Path, *arguments: str) -> str:
    assert CHROMIUM is not None
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
    flags += ["--disable-sync", "--no-first-run", f"--user-data-dir={folder / 'profile'}"]
    flags += [
        "--force-device-scale-factor=1",
        "--hide-scrollbars",
        f"--window-size={WIDTH},{HEIGHT}",
    ]
    done = subprocess.run(
        [CHROMIUM, *flags, *arguments, page.as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=folder,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_plots_and_table_are_in_the_browsers_document(page: Path, tmp_path: Path) -> None:
    document = browse(page, tmp_path, "--dump-dom")
    assert document.count("<svg") == len(SERIES) + 1  # and the distribution of KL
    assert document.count("<polyline") == len(SERIES)
    assert document.count('class="bar"') == 40
    assert "first red rung 5" in document
    for name in ("mean KL", "top-1 agreement", "&lt;b&gt;bold&lt;/b&gt;", *SERIES):
        assert name in document


def test_lines_bars_and_verdict_are_painted(page: Path, tmp_path: Path) -> None:
    picture = tmp_path / "page.png"
    browse(page, tmp_path, f"--screenshot={picture}")
    width, rows = read_png(picture.read_bytes())
    assert width == WIDTH
    # The verdict's red and the plots' blue, in the light scheme of the page.
    red = count(rows, (0xB4, 0x23, 0x18))
    blue = [y for y, pixels in enumerate(count(rows, (0x25, 0x63, 0xA8))) if pixels]
    assert sum(red) > 200
    assert len(blue) > 150
    # Five figures stand one below the other: blue occurs in as many separate places.
    places = 1 + sum(below - above > 40 for above, below in pairwise(blue))
    assert places >= len(SERIES)


def count(rows: list[bytes], colour: tuple[int, int, int]) -> list[int]:
    """Pixels of exactly this colour in each row."""
    wanted = bytes(colour)
    return [sum(row[x : x + 3] == wanted for x in range(0, len(row), 3)) for row in rows]


def read_png(data: bytes) -> tuple[int, list[bytes]]:
    """Width and RGB rows of an 8-bit PNG (the format's chunk and filter rules)."""
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    position, packed, width, channels = 8, b"", 0, 0
    while position < len(data):
        size = int.from_bytes(data[position : position + 4], "big")
        kind, body = data[position + 4 : position + 8], data[position + 8 : position + 8 + size]
        if kind == b"IHDR":
            width, channels = int.from_bytes(body[:4], "big"), {2: 3, 6: 4}[body[9]]
        if kind == b"IDAT":
            packed += body
        position += 12 + size
    raw, stride = zlib.decompress(packed), width * channels
    rows, before = [], bytearray(stride)
    for start in range(0, len(raw), stride + 1):
        row = unfilter(raw[start], bytearray(raw[start + 1 : start + 1 + stride]), before, channels)
        rows.append(b"".join(bytes(row[x : x + 3]) for x in range(0, stride, channels)))
        before = row
    return width, rows


def unfilter(kind: int, row: bytearray, above: bytearray, step: int) -> bytearray:
    """Undo one of PNG's five row filters."""
    for x in range(len(row)) if kind else ():
        left = row[x - step] if x >= step else 0
        corner = above[x - step] if x >= step else 0
        up = above[x]
        guess = left + up - corner
        nearest = min((left, up, corner), key=lambda value: abs(guess - value))
        row[x] = (row[x] + (left, up, (left + up) // 2, nearest)[kind - 1]) & 255
    return row
