"""The files beside a checkpoint that say what its prompt looks like, for one that moves."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from hermes.config import HermesConfig
from hermes.tokenizer.interface import PromptContract, Tokenizer
from hermes.tokenizer.opening import MODEL_NAMES, read_json_object
from hermes.tokenizer.stop_tokens import PromptSources

_SETTINGS = "tokenizer_config.json"
_GENERATION = "generation_config.json"


def copied_files(
    checkpoint: PromptSources, config: HermesConfig, contract: PromptContract | None
) -> dict[str, bytes]:
    """Tokenizer files and generation settings as they are, by names that `open_checkpoint` knows.

    What only the old configuration said (several enders, add_bos_token) moves into them.

    Args:
        checkpoint: where the model lay.
        config: the moved model's; of several enders it keeps one.
        contract: what the old place means, or None if it is not usable.
    """
    files = {
        "tokenizer.model" if name in MODEL_NAMES else name: path.read_bytes()
        for name, path in checkpoint.tokenizer_files.items()
    }
    flag = (checkpoint.config or {}).get("add_bos_token")
    if isinstance(flag, bool):
        settings = _settings_in(checkpoint.tokenizer_files)
        if "add_bos_token" not in settings:
            files[_SETTINGS] = _as_json({**settings, "add_bos_token": flag})
    generation = dict(checkpoint.generation_config or {})
    enders = _enders_beside(generation, config, contract, ("config",))
    if enders is not None:
        generation["eos_token_id"] = enders
    if generation:
        files[_GENERATION] = _as_json(generation)
    return files


def rebuilt_files(
    metadata: Mapping[str, object],
    tokenizer: Tokenizer,
    texts: Mapping[str, str],
    config: HermesConfig,
    contract: PromptContract,
) -> dict[str, bytes]:
    """What a GGUF file's metadata says about the prompt, as the files of a Hugging Face folder.

    Args:
        metadata: of the GGUF file.
        tokenizer: rebuilt from it.
        texts: its special tokens by transformers' names.
        config: of the model.
        contract: made from the same metadata.
    """
    flag = metadata.get("tokenizer.ggml.add_bos_token")
    settings: dict[str, object] = {
        **texts,
        # Without a flag the decision was a convention of GGUF; from here on it is written down.
        "add_bos_token": flag if isinstance(flag, bool) else contract.start_token_id is not None,
        "clean_up_tokenization_spaces": False,
        "model_max_length": config.max_seq_len,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    if contract.original_template is not None:
        settings["chat_template"] = contract.original_template
    name = "tokenizer.json"
    if tokenizer.kind == "sentencepiece":
        name, settings["tokenizer_class"] = "tokenizer.model", "LlamaTokenizer"
    files = {name: tokenizer.data, _SETTINGS: _as_json(settings)}
    generation: dict[str, object] = {}
    if config.bos_token_id is not None:
        generation["bos_token_id"] = config.bos_token_id
    enders = _enders_beside(
        {},
        config,
        contract,
        tuple(f"tokenizer.ggml.{key}_token_id" for key in ("eos", "eot", "eom")),
    )
    generation["eos_token_id"] = config.eos_token_id if enders is None else enders
    return {**files, _GENERATION: _as_json(generation)}


def _enders_beside(
    generation: Mapping[str, object],
    config: HermesConfig,
    contract: PromptContract | None,
    origins: tuple[str, ...],
) -> list[int] | None:
    """All enders, if one of these origins names one that neither of the others keeps."""
    if contract is None:
        return None
    said = generation.get("eos_token_id")
    kept = set(said if isinstance(said, list) else [said]) | {config.eos_token_id}
    named = {token for token, by in contract.stop_sources.items() if set(origins) & set(by)}
    if named <= kept:
        return None
    return sorted(named | {token for token in kept if isinstance(token, int)})


def _settings_in(files: Mapping[str, Path]) -> dict[str, object]:
    return read_json_object(files[_SETTINGS]) if _SETTINGS in files else {}


def _as_json(values: Mapping[str, object]) -> bytes:
    return (json.dumps(values, indent=2, ensure_ascii=False) + "\n").encode()
