"""Entries of a file that no rule of its layout uses: harmless, refused or unexplained."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from hermes.checkpoint.source import LazyTensor
from hermes.layouts.table import Layout

_QUANTIZED = re.compile(
    r".*\.(qweight|qzeros|scales|g_idx|absmax|quant_map|nested_absmax|nested_quant_map|SCB"
    r"|quant_state\..*|weight_scale|weight_scale_inv|input_scale|output_scale|weight_packed"
    r"|weight_format|weight_zero_point|weight_shape|_packed_params.*|zero_point)$"
)
_HARMLESS = (
    (r"(.*\.)?(criterion|loss|loss_fn|loss_func)(\..*)?", "part of the loss, not of the model"),
    (r"(.*\.)?(train|val|test|valid)?_?(metrics?|acc|accuracy|ppl|perplexity)(\..*)?", "a metric"),
    (r"(.*\.)?_extra_state", "state of the training precision"),
    (r"(.*\.)?position_ids", "position numbers"),
    (r"(.*\.)?masked_bias", "a constant of the mask"),
)
_COUNTS = ("int64", "int32", "int16", "int8", "uint8", "bool")
_REFUSED = (
    (
        r"(.*\.)?(vision_(encoder|tower|model)|visual|multi_modal_projector|mm_projector|MP"
        r"|image_newline|connector|modality_projector)(\..*)?",
        "part of a vision-language model; bring its language model alone",
    ),
    (r"(.*\.)?(score|classifier|v_head|value_head)\..*", "a head that is not a language model's"),
)
TABLES = re.compile(
    r"(.*\.)?(inv_freq|original_inv_freq|(rope_|freqs_)?(cos|sin)(_cached|_table)?|freqs_cis"
    r"|rope_freqs\.weight|rope\.freqs)$"
)
MASKS = re.compile(r"(.*\.)?(mask|causal_mask|attn_mask|attention_mask|tril|attn\.bias|bias_mask)$")


@dataclass
class Leftovers:
    """Unused entries by what becomes of them."""

    ignored: list[tuple[str, str]] = field(default_factory=list)
    tables: list[LazyTensor] = field(default_factory=list)
    masks: list[LazyTensor] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    surplus: list[str] = field(default_factory=list)


def sort_leftovers(
    names: Iterable[str], tensors: Mapping[str, LazyTensor], layout: Layout
) -> Leftovers:
    """Give every unused name a reason to be left out, or none."""
    result = Leftovers()
    for name in names:
        refusal = _reason(name, (*layout.refused, *_REFUSED))
        harmless = _reason(name, (*layout.ignored, *_HARMLESS))
        if refusal:
            result.refused.append(f"{name}: {refusal}")
        elif _QUANTIZED.fullmatch(name):
            result.refused.append(f"{name}: the weights are already quantized")
        elif TABLES.fullmatch(name):
            result.tables.append(tensors[name])
        elif MASKS.fullmatch(name):
            result.masks.append(tensors[name])
        elif tensors[name].numel == 1 and tensors[name].dtype in _COUNTS:
            result.ignored.append((tensors[name].name, "a counter"))
        elif harmless:
            result.ignored.append((tensors[name].name, harmless))
        else:
            shape = list(tensors[name].shape)
            result.surplus.append(f"{tensors[name].name} {shape}: no part of this layout uses it")
    return result


def _reason(name: str, patterns: Iterable[tuple[str, str]]) -> str | None:
    return next((why for pattern, why in patterns if re.fullmatch(pattern, name)), None)
