"""Why models that take embeddings and return hidden states are refused: what LiteRT-LM does.

A decoder with an `embeddings` input runs only with a table from ids to embeddings in the same
bundle, and only with logits as its output. Nothing can feed it embeddings from outside.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from embedding_model import write_bundle_around, write_embedder, write_embedding_decoder
from table_model import successor_table

from hermes.errors import NativeToolError
from hermes.runners.child import run_in_child

VOCABULARY = 128


def run(folder: Path, output: str, *, embedder: bool) -> str:
    decoder = write_embedding_decoder(folder / "decoder.tflite", VOCABULARY, output)
    table = None
    if embedder:
        table = write_embedder(folder / "embedder.tflite", successor_table(VOCABULARY))
    bundle = write_bundle_around(decoder, table, folder / "probe.litertlm")
    # The native library may take its process with it.
    return str(run_in_child("runtime_probe:generate", str(bundle), "the cat", 6, timeout=120))


def test_embeddings_come_from_the_bundles_own_table(tmp_path: Path) -> None:
    assert run(tmp_path, "logits", embedder=True)


def test_without_a_table_no_prompt_is_taken(tmp_path: Path) -> None:
    with pytest.raises(NativeToolError, match="run_prefill"):
        run(tmp_path, "logits", embedder=False)


def test_hidden_states_instead_of_logits_do_not_open(tmp_path: Path) -> None:
    with pytest.raises(NativeToolError, match="Failed to create"):
        run(tmp_path, "hidden", embedder=True)


def test_no_call_of_a_session_takes_embeddings() -> None:
    import litert_lm

    fed = [name for name in dir(litert_lm.Session) if "embed" in name.lower()]
    assert fed == []
