"""Sets of files with an index (report B06) and folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from mapped_logits import logits_of, mapped, write_config
from safetensors.torch import save_file
from tiny_llama import PROMPT_IDS, largest_gap, reference_logits, tiny_config, tiny_weights

from hermes.checkpoint import open_checkpoint
from hermes.errors import BadInputError

CONFIG = tiny_config(tie_word_embeddings=False)
WEIGHTS = tiny_weights(CONFIG)
EXPECTED = reference_logits(WEIGHTS, CONFIG, PROMPT_IDS)
FIRST, SECOND = (f"model-0000{number}-of-00002.safetensors" for number in (1, 2))


def write_set(folder: Path, **changes: str) -> dict[str, str]:
    """Ten tensors in the first file, eleven in the second; `changes` edits the index."""
    names = list(WEIGHTS)
    half = len(names) // 2
    save_file({name: WEIGHTS[name] for name in names[:half]}, folder / FIRST)
    save_file({name: WEIGHTS[name] for name in names[half:]}, folder / SECOND)
    weight_map = {name: FIRST if i < half else SECOND for i, name in enumerate(names)} | changes
    write_index(folder, {"metadata": {}, "weight_map": weight_map})
    write_config(folder, CONFIG)
    return weight_map


def write_index(folder: Path, content: Any) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps(content))


def refused(folder: Path, *words: str) -> None:
    with pytest.raises(BadInputError) as caught:
        open_checkpoint(folder)
    for word in words:
        assert word in str(caught.value)


def test_complete_set(tmp_path: Path) -> None:
    write_set(tmp_path)
    for path in (tmp_path, tmp_path / "model.safetensors.index.json"):
        assert largest_gap(logits_of(mapped(path)), EXPECTED) < 1e-4


def test_torch_set(tmp_path: Path) -> None:
    names = list(WEIGHTS)
    weight_map = {}
    for number, part in enumerate((names[:8], names[8:])):
        file = f"pytorch_model-0000{number + 1}-of-00002.bin"
        torch.save({name: WEIGHTS[name] for name in part}, tmp_path / file)
        weight_map |= dict.fromkeys(part, file)
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    write_config(tmp_path, CONFIG)
    assert largest_gap(logits_of(mapped(tmp_path)), EXPECTED) < 1e-4


def test_b06_missing_shard(tmp_path: Path) -> None:
    write_set(tmp_path)
    (tmp_path / SECOND).unlink()
    refused(tmp_path, SECOND, "11 tensors")


def test_b06_truncated_shard(tmp_path: Path) -> None:
    write_set(tmp_path)
    data = (tmp_path / SECOND).read_bytes()
    (tmp_path / SECOND).write_bytes(data[: len(data) // 2])
    refused(tmp_path, SECOND, "ends at byte")


def test_b06_name_that_the_shard_does_not_hold(tmp_path: Path) -> None:
    write_set(tmp_path, **{"model.extra.weight": SECOND})
    refused(tmp_path, f"{SECOND} does not hold model.extra.weight")


def test_all_faults_in_one_message(tmp_path: Path) -> None:
    write_set(tmp_path, **{"a.weight": "../a.safetensors", "b.weight": FIRST})
    (tmp_path / SECOND).unlink()
    refused(tmp_path, "../a.safetensors", "does not hold b.weight", f"{SECOND} is missing")


@pytest.mark.parametrize("entry", ["../{0}", "/etc/{0}", "sub/../../{0}", "..\\{0}", "a\0b"])
def test_entries_that_leave_the_folder(tmp_path: Path, entry: str) -> None:
    folder = tmp_path / "set"
    folder.mkdir()
    write_set(folder, **{"model.norm.weight": entry.format(SECOND)})
    save_file(WEIGHTS, tmp_path / SECOND)
    refused(folder, "leaves the folder")


def test_link_that_leaves_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    folder.mkdir()
    write_set(folder)
    (folder / SECOND).rename(tmp_path / "elsewhere.safetensors")
    (folder / SECOND).symlink_to(tmp_path / "elsewhere.safetensors")
    refused(folder, "link that leaves")


def test_links_of_the_hugging_face_cache(tmp_path: Path) -> None:
    snapshot, blobs = tmp_path / "snapshots" / "abc", tmp_path / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    write_set(snapshot)
    for name in (FIRST, SECOND):
        (snapshot / name).rename(blobs / f"blob-{name}")
        (snapshot / name).symlink_to(blobs / f"blob-{name}")
    assert largest_gap(logits_of(mapped(snapshot)), EXPECTED) < 1e-4


def test_stray_files_are_not_mixed_in(tmp_path: Path) -> None:
    write_set(tmp_path)
    stray = {name: value * 2 for name, value in WEIGHTS.items()}
    save_file(stray, tmp_path / "model-00003-of-00003.safetensors")
    save_file({**dict(list(WEIGHTS.items())[:10]), "old.weight": torch.ones(2)}, tmp_path / FIRST)
    opened = open_checkpoint(tmp_path)
    assert (f"{FIRST}: old.weight", "not listed in the index") in opened.ignored
    assert any("model-00003-of-00003" in note for note in opened.notes)
    assert largest_gap(logits_of(mapped(tmp_path)), EXPECTED) < 1e-4


@pytest.mark.parametrize(
    "content", [{}, {"weight_map": {}}, {"weight_map": [1]}, {"weight_map": {"a": 3}}, [1]]
)
def test_damaged_index(tmp_path: Path, content: Any) -> None:
    write_index(tmp_path, content)
    refused(tmp_path, "model.safetensors.index.json")


def test_shards_without_index(tmp_path: Path) -> None:
    write_set(tmp_path)
    (tmp_path / "model.safetensors.index.json").unlink()
    refused(tmp_path, "no index")


def test_folder_without_or_with_several_weight_files(tmp_path: Path) -> None:
    refused(tmp_path, "no weight file")
    torch.save(WEIGHTS, tmp_path / "a.pt")
    torch.save({"state": torch.ones(1)}, tmp_path / "optimizer.pt")
    write_config(tmp_path, CONFIG)
    assert largest_gap(logits_of(mapped(tmp_path)), EXPECTED) < 1e-4
    torch.save(WEIGHTS, tmp_path / "b.pt")
    refused(tmp_path, "2 weight files", "a.pt", "b.pt")


def test_distributed_checkpoints_are_named(tmp_path: Path) -> None:
    (tmp_path / "__0_0.distcp").write_bytes(b"x")
    refused(tmp_path, "a distributed checkpoint of 1 parts", "dcp_to_torch")


def test_companion_files(tmp_path: Path) -> None:
    torch.save(WEIGHTS, tmp_path / "last.pt")
    write_config(tmp_path, CONFIG)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    (tmp_path / "tokenizer.json").write_text("{}")
    opened = open_checkpoint(tmp_path / "last.pt")
    assert opened.config == CONFIG
    assert opened.config_origin == "config.json"
    assert opened.generation_config == {"eos_token_id": [1, 2]}
    assert opened.tokenizer_files == {"tokenizer.json": tmp_path / "tokenizer.json"}


def test_damaged_config_names_the_file(tmp_path: Path) -> None:
    torch.save(WEIGHTS, tmp_path / "last.pt")
    (tmp_path / "config.json").write_text('{"hidden_size": 64')
    refused(tmp_path, "config.json", "not readable as JSON")


def test_missing_path() -> None:
    with pytest.raises(BadInputError, match="no such file"):
        open_checkpoint(Path("does-not-exist.pt"))
