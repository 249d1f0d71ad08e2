"""The work folder: what a conversion has finished, kept for a run that continues it.

One folder under the user's cache per key, and the key is a hash of everything that decides the
bound model: the content of the weights' files, the configuration, the recipe, the packages and this
code. So a finished stage is either exactly what would be made again, or is not found. Graphs are
kept apart (`converters.graph`), because they serve other weights too.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from converters.bind import BoundWeight
from converters.bundle_reader import hash_file
from converters.graph import graph_folder, graph_key
from converters.inputs import HashedFiles, weight_files
from converters.source import Source, SourceOptions
from hermes.recipe import Recipe
from hermes.rewrite import RewritableModel

_MODEL, _DONE, _LOCK = "model.tflite", "model.json", "lock"


@dataclass(frozen=True)
class FinishedModel:
    """A bound model: what became of its weights, its hash, and where in its file it begins."""

    weights: tuple[BoundWeight, ...]
    sha256: str
    offset: int


@dataclass(frozen=True)
class WorkFolder:
    """A locked folder that holds the bound model once it is finished."""

    path: Path

    @property
    def model(self) -> Path:
        """The file with the bound model, behind what a bundle has before it."""
        return self.path / _MODEL

    def finish_model(
        self, bound: tuple[BoundWeight, ...], bundle: Path, offset: int
    ) -> FinishedModel:
        """Keep the model that a bundle ends with, and mark it as complete.

        The file gets a second name here, so that nothing is copied: what comes before the model may
        be written again, the model is never. The mark appears with a rename, after everything else.
        """
        try:
            os.link(bundle, self.model)
        except OSError:  # Another disk, or one without links.
            shutil.copyfile(bundle, self.model)
        finished = FinishedModel(bound, hash_file(self.model, offset), offset)
        temporary = self.path / "mark"
        temporary.write_text(json.dumps(asdict(finished)), encoding="utf-8")
        temporary.replace(self.path / _DONE)
        return finished

    def finished_model(self) -> FinishedModel | None:
        """What an earlier run bound here, if it got to the end and nothing changed it since."""
        try:
            mark = json.loads((self.path / _DONE).read_text(encoding="utf-8"))
            weights = tuple(BoundWeight(**one) for one in mark["weights"])
            finished = FinishedModel(weights, str(mark["sha256"]), int(mark["offset"]))
            same = hash_file(self.model, finished.offset) == finished.sha256
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return finished if same else None

    def forget_model(self) -> None:
        """Before it is written again."""
        for name in (_DONE, _MODEL):
            (self.path / name).unlink(missing_ok=True)


@contextmanager
def work_folder(key: str) -> Iterator[WorkFolder]:
    """The folder of this key, locked; a fresh one that vanishes while another run works there.

    Leftovers of a killed run are removed, except a finished model.
    """
    folder = work_root() / key
    folder.mkdir(parents=True, exist_ok=True)
    lock = _lock(folder)
    if lock is None:
        with tempfile.TemporaryDirectory(prefix="busy-", dir=work_root()) as fresh:
            mine = _lock(Path(fresh))
            try:
                yield WorkFolder(Path(fresh))
            finally:
                if mine is not None:
                    os.close(mine)
        return
    try:
        _remove(entry for entry in folder.iterdir() if entry.name not in (_MODEL, _DONE, _LOCK))
        yield WorkFolder(folder)
    finally:
        _remove(entry for entry in folder.iterdir() if entry.name not in (_MODEL, _DONE, _LOCK))
        os.close(lock)


def work_root() -> Path:
    """Beside the kept graphs."""
    return graph_folder().parent / "work"


def clean(*, keep: str | None = None, graphs: bool = False) -> int:
    """Remove the work folders that no run uses, and the kept graphs on request; bytes freed.

    Args:
        keep: key of a folder that stays.
        graphs: remove the graphs as well.
    """
    freed = 0
    for folder in sorted(work_root().glob("*")) if work_root().is_dir() else []:
        lock = _lock(folder) if folder.name != keep else None
        if lock is not None:
            freed += _bytes(folder)
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)
    if graphs and graph_folder().is_dir():
        freed += _bytes(graph_folder())
        shutil.rmtree(graph_folder(), ignore_errors=True)
    return freed


def work_key(
    options: SourceOptions,
    source: Source,
    rewritten: RewritableModel,
    recipe: Recipe,
    files: HashedFiles,
) -> str:
    """Hash of everything that decides the bound model's bytes."""
    weights = weight_files(source.checkpoint)
    files.begin(weights)
    facts = {
        "files": [files.digest(file) for file in weights],
        "adapter": source.checkpoint.adapter,
        "weights": options.weights,
        "layout": source.mapped.layout,
        "config": source.mapped.config.to_dict(),
        "rewrites": list(recipe.rewrites),
        "calibration": rewritten.calibration,
        "rules": [asdict(rule) for rule in recipe.quantization],
        "graph": graph_key(rewritten.config, recipe.export, recipe.graph),
        "code": _code(),
    }
    text = json.dumps(facts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _code() -> str:
    """Hash of this program: any change of it may change the bytes."""
    root = Path(__file__).resolve().parent.parent
    digest = hashlib.sha256()
    for room in ("hermes", "converters"):
        for file in sorted((root / room).rglob("*.py")):
            digest.update(file.read_bytes())
    return digest.hexdigest()


def _lock(folder: Path) -> int | None:
    """Lock the folder until the descriptor is closed; None if another run holds it."""
    try:
        lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        return None
    return lock


def _remove(entries: Iterator[Path]) -> None:
    for entry in list(entries):
        if entry.is_dir():
            shutil.rmtree(entry, ignore_errors=True)
        else:
            entry.unlink(missing_ok=True)


def _bytes(folder: Path) -> int:
    """Of files that have no other name: a published bundle keeps its bytes."""
    found = [file.stat() for file in folder.rglob("*") if file.is_file()]
    return sum(one.st_size for one in found if one.st_nlink == 1)
