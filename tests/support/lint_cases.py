"""For each lint rule the edit that breaks it in an otherwise clean bundle."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import broken_bundles as broken
import numpy as np
import toy_tokenizers
from ai_edge_litert import schema_py_generated as tfl
from broken_bundles import JSON, Pieces
from litert_lm_builder.runtime.proto import sampler_params_pb2

FLOAT16, INT8, INT32 = tfl.TensorType.FLOAT16, tfl.TensorType.INT8, tfl.TensorType.INT32
Edit = Callable[[Pieces], None]


def template(text: str) -> Edit:
    def edit(pieces: Pieces) -> None:
        pieces.metadata.jinja_prompt_template = text

    return edit


def start(*ids: int) -> Edit:
    return lambda pieces: pieces.metadata.start_token.token_ids.ids.extend(ids)


def stop(rule: int | str) -> Edit:
    def edit(pieces: Pieces) -> None:
        if isinstance(rule, str):
            pieces.metadata.stop_tokens.add().token_str = rule
        else:
            pieces.metadata.stop_tokens.add().token_ids.ids.append(rule)

    return edit


def sampling(kind: str, k: int) -> Edit:
    def edit(pieces: Pieces) -> None:
        parameters = pieces.metadata.sampler_params
        parameters.Clear()
        parameters.type = sampler_params_pb2.SamplerParameters.Type.Value(kind)
        if k:
            parameters.k = k

    return edit


def max_tokens(limit: int) -> Edit:
    def edit(pieces: Pieces) -> None:
        pieces.metadata.max_num_tokens = limit

    return edit


def tokenizer_json(**changes: object) -> Edit:
    """Replace parts of the tokenizer.json; a function gets the old part."""

    def edit(pieces: Pieces) -> None:
        settings = toy_tokenizers.byte_level_json(400)
        settings.update(changes)
        pieces.tokenizers = [(JSON, json.dumps(settings).encode())]

    return edit


def begin_by_processor(pieces: Pieces) -> None:
    single = [
        {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}},
    ]
    tokens = {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}}
    tokenizer_json(
        post_processor={
            "type": "TemplateProcessing",
            "single": single,
            "pair": [*single, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": tokens,
        }
    )(pieces)


def control_symbols(pieces: Pieces) -> None:
    data = toy_tokenizers.sentencepiece_model(320)
    pieces.tokenizers = [(broken.SENTENCEPIECE, data)]


def keys_of_prefill(pieces: Pieces, shape: list[int]) -> None:
    for output in (False, True):
        tensor = pieces.tensor("prefill_1", "kv_cache_k_0", output=output)
        tensor.shape = np.array(shape, np.int32)


def no_cache_in_prefill(pieces: Pieces) -> None:
    for name in ("kv_cache_k_0", "kv_cache_v_0"):
        for outputs in (False, True):
            pieces.rename("prefill_1", name, f"state_{name}", outputs=outputs)


def scatter(pieces: Pieces) -> None:
    code = tfl.OperatorCodeT()
    code.builtinCode = code.deprecatedBuiltinCode = tfl.BuiltinOperator.SCATTER_ND
    pieces.model.operatorCodes.append(code)
    pieces.subgraph("prefill_1").operators[0].opcodeIndex = len(pieces.model.operatorCodes) - 1


def open_mask(pieces: Pieces) -> None:
    mask = pieces.tensor("prefill_1", "mask")
    mask.shapeSignature = np.array([1, 1, 1, -1], np.int32)


def rename_signature(old: str, new: str) -> Edit:
    def edit(pieces: Pieces) -> None:
        pieces.definition(old).signatureKey = new.encode()

    return edit


def tensor_type(signature: str, name: str, kind: int, *, output: bool = False) -> Edit:
    def edit(pieces: Pieces) -> None:
        pieces.tensor(signature, name, output=output).type = kind

    return edit


def after(change: Callable[[Path], None]) -> Edit:
    return lambda pieces: pieces.after.append(change)


def minor_version(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[12:16] = (8).to_bytes(4, "little")
    path.write_bytes(data)


def set_field(name: str, value: object) -> Edit:
    return lambda pieces: setattr(pieces, name, value)


def two_integer_matrices(pieces: Pieces) -> None:
    """Beside the float table of the model."""
    for _ in range(2):
        pieces.add_matrix([64, 64], INT8, 64, "FULLY_CONNECTED")


def two_tokenizers(pieces: Pieces) -> None:
    pieces.tokenizers *= 2


CONTENT = "{% for m in messages %}{{ '<s>' + m.role + ':' + m.content + '</s>' }}{% endfor %}"
UPPER = broken.START.replace("m.role", "m.role.upper()") + broken.PARTS + broken.OPEN
BREAK = "{% for m in messages %}{% if m.role == 'x' %}{% break %}{% endif %}{% endfor %}"
BOS = "{{ bos_token }}" + broken.START + broken.PARTS + broken.OPEN
NO_END = broken.START + broken.PARTS.replace("</s>", "##") + broken.OPEN

# Rule -> the edit that breaks it, other rules that the same edit breaks, options of the clean one.
BREAKS: dict[str, tuple[Edit, set[str], dict[str, object]]] = {
    "file-name": (set_field("name", "model.bin"), set(), {}),
    "no-hashes": (lambda pieces: None, set(), {}),
    "no-model": (set_field("model", None), set(), {}),
    "no-metadata": (set_field("metadata", None), set(), {}),
    "alignment": (after(lambda path: broken.move_last_section(path, by=64)), set(), {}),
    "format-version": (after(minor_version), set(), {}),
    "runtime-version": (
        lambda pieces: setattr(pieces.metadata, "min_runtime_version", "0.99.0"), set(), {}
    ),
    "stale-cache": (
        after(lambda path: path.with_name(f"{path.name}_1_2.xnnpack_cache").touch()), set(), {}
    ),
    "no-decode": (rename_signature("decode", "step"), set(), {}),
    "no-prefill": (rename_signature("prefill_1", "fill_1"), set(), {}),
    "input-names": (lambda pieces: pieces.rename("decode", "tokens", "ids"), set(), {}),
    "no-cache": (no_cache_in_prefill, set(), {}),
    "cache-names": (
        lambda p: p.rename("decode", "kv_cache_k_0", "k_0", outputs=True), set(), {}
    ),
    "cache-type": (tensor_type("decode", "kv_cache_k_0", FLOAT16, output=True), set(), {}),
    "cache-shape": (lambda pieces: keys_of_prefill(pieces, [1, 1, 32, 4]), set(), {}),
    "open-shape": (open_mask, set(), {}),
    "logits": (lambda p: p.rename("decode", "logits", "scores", outputs=True), set(), {}),
    "mask-type": (tensor_type("decode", "mask", INT32), set(), {}),
    "scatter": (scatter, set(), {}),
    "context-end": (lambda pieces: None, set(), {"prefill": 8}),
    "prefill-too-long": (max_tokens(4), {"context-end", "max-tokens"}, {"prefill": 8}),
    "max-tokens": (max_tokens(128), set(), {}),
    "no-max-tokens": (max_tokens(0), set(), {}),
    "rotary-integers": (
        lambda p: p.add_matrix([64, 4], INT8, 64, "EMBEDDING_LOOKUP", "input_pos"), set(), {}
    ),
    "float-weights": (two_integer_matrices, set(), {}),
    "one-scale": (lambda p: p.add_matrix([8, 8], INT8, 1, "FULLY_CONNECTED"), set(), {}),
    "vocabulary": (lambda pieces: None, set(), {"vocab": 100}),
    "padded-vocabulary": (lambda pieces: None, set(), {"vocab": 140}),
    "tokenizer-count": (two_tokenizers, set(), {}),
    "tokenizer-damaged": (
        set_field("tokenizers", [(broken.SENTENCEPIECE, b"\x00garbage")]), set(), {}
    ),
    "tokenizer-type": (tokenizer_json(pre_tokenizer={"type": "Novel"}), set(), {"kind": JSON}),
    "tokenizer-cuts": (
        tokenizer_json(truncation={"max_length": 8, "strategy": "LongestFirst", "stride": 0,
                                   "direction": "Right"}), set(), {"kind": JSON}
    ),
    "no-stop-token": (
        lambda pieces: pieces.metadata.ClearField("stop_tokens"), {"turn-end"}, {}
    ),
    "stop-token": (stop(5000), set(), {}),
    "start-token": (start(5000), set(), {}),
    "start-sequence": (start(5, 6), set(), {}),
    "stop-suppressed": (
        lambda pieces: pieces.metadata.suppress_tokens.ids.append(2), set(), {}
    ),
    "suppressed-range": (
        lambda pieces: pieces.metadata.suppress_tokens.ids.append(128), set(), {}
    ),
    "sampler": (sampling("GREEDY", 1), set(), {}),
    "model-type": (lambda pieces: pieces.metadata.ClearField("llm_model_type"), set(), {}),
    "template-broken": (template("{% for m in messages %}{{ m.role }}"), set(), {}),
    "content-parts": (template(CONTENT), set(), {}),
    "template-engine": (template(UPPER), set(), {}),
    "empty-token-names": (template(BOS), set(), {}),
    "start-doubled": (start(1), set(), {}),
    "start-missing": (begin_by_processor, set(), {"kind": JSON}),
    "unmatched-specials": (control_symbols, {"turn-end"}, {"vocab": 320}),
    "turn-end": (template(NO_END), set(), {}),
}  # fmt: skip
