"""Flatbuffers as other exporters write them: other names, masks, layouts and lengths.

The computation is that of `static_llama`; what surrounds it differs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from static_llama import Fault, StaticLlama
from torch import Tensor, nn

from converters.flatbuffer import pack_model, read_model

_CLOSED = -1e30


@dataclass(frozen=True)
class Form:
    """How an exporter spells the signatures.

    Attributes:
        mask: element type of the mask, or none: then the graph makes it from the positions.
        names: our name -> theirs; cache names by prefix.
        prefill: name of the one prefill signature.
        rows_first: cache as (1, slots, heads, width) for keys and values.
        prefill_logits: prefill computes logits too.
    """

    mask: Literal["float32", "float16", "bool", "none"] = "float32"
    names: Mapping[str, str] = field(default_factory=dict)
    prefill: str = "prefill_8"
    rows_first: bool = False
    prefill_logits: bool = False


OTHER_NAMES = {
    "tokens": "token_ids",
    "input_pos": "positions",
    "mask": "attn_mask",
    "kv_cache_k_": "k_cache_",
    "kv_cache_v_": "v_cache_",
}
FORMS = {
    "bool mask, other names, rows first": Form("bool", OTHER_NAMES, "prefill", True, True),
    "no mask": Form("none", {"kv_cache_k_": "k_cache_", "kv_cache_v_": "v_cache_"}),
    "half mask": Form("float16", {"tokens": "token_ids"}, "prefill_long"),
}


class Foreign(nn.Module):
    """A `StaticLlama` behind another exporter's inputs."""

    def __init__(self, inner: StaticLlama, form: Form, context: int) -> None:
        super().__init__()
        self.inner, self.form = inner, form
        self.register_buffer("slots", torch.arange(context, dtype=torch.int32))

    def forward(
        self,
        tokens: Tensor,
        input_pos: Tensor,
        kv_cache: dict[str, Tensor],
        mask: Tensor | None = None,
    ) -> dict[str, Tensor]:
        if mask is None:
            mask = (self.slots[None] <= input_pos[:, None])[None, None]
        if mask.dtype == torch.bool:
            mask = torch.where(mask, 0.0, _CLOSED)
        outputs = self.inner(tokens, input_pos, mask.float(), self._turned(kv_cache, inwards=True))
        cache = {name: outputs[f"kv_cache_{name}"] for name in kv_cache}
        turned = self._turned(cache, inwards=False)
        return {**outputs, **{f"kv_cache_{name}": value for name, value in turned.items()}}

    def _turned(self, cache: dict[str, Tensor], *, inwards: bool) -> dict[str, Tensor]:
        """Keys and values between (1, slots, heads, width) and `StaticLlama`'s own layouts."""
        if not self.form.rows_first:
            return cache
        axes = {("k", True): (0, 2, 1, 3), ("v", True): (0, 2, 3, 1)}
        axes |= {("k", False): (0, 2, 1, 3), ("v", False): (0, 3, 1, 2)}
        return {name: value.permute(axes[name[0], inwards]) for name, value in cache.items()}


def write_foreign(
    weights: Mapping[str, Tensor],
    config: Mapping[str, Any],
    target: Path,
    form: Form,
    *,
    context: int = 64,
    fault: Fault = "none",
    prefill_fault: Fault | None = None,
) -> Path:
    """Trace and write a float32 .tflite in another exporter's form; one prefill of 8 rows."""
    import litert_torch

    dim, heads = config["head_dim"], config["num_key_value_heads"]
    shapes = {"k": (1, heads, context, dim), "v": (1, heads, dim, context)}
    if form.rows_first:
        shapes = dict.fromkeys("kv", (1, context, heads, dim))
    cache = {
        f"{kind}_{index}": torch.zeros(shapes[kind])
        for index in range(config["num_hidden_layers"])
        for kind in "kv"
    }
    converter = litert_torch.Converter()
    for name, length in ((form.prefill, 8), ("decode", 1)):
        logits = length == 1 or form.prefill_logits
        wrong = fault if length == 1 or prefill_fault is None else prefill_fault
        inner = StaticLlama(weights, config, context, with_logits=logits, fault=wrong)
        sample: dict[str, Any] = {
            "tokens": torch.zeros(1, length, dtype=torch.int32),
            "input_pos": torch.arange(length, dtype=torch.int32),
            "kv_cache": dict(cache),
        }
        if form.mask != "none":
            kind = getattr(torch, form.mask)
            sample["mask"] = torch.zeros(1, 1, length, context, dtype=kind)
        module = Foreign(inner, form, context).eval()
        converter = converter.add_signature(name, module, sample_kwargs=sample)
    converter.convert().export(str(target))
    _rename(target, dict(form.names))
    return target


def _rename(path: Path, names: Mapping[str, str]) -> None:
    """Other names for the tensors of all signatures; a name that ends in _ is a prefix."""
    model = read_model(path)
    for signature in model.signatureDefs:
        for entry in [*signature.inputs, *signature.outputs]:
            name = entry.name.decode()
            for ours, theirs in names.items():
                if name == ours or (ours.endswith("_") and name.startswith(ours)):
                    entry.name = name.replace(ours, theirs, 1).encode()
    path.write_bytes(pack_model(model))
