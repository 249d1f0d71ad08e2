"""HermesConfig: every number that decides what the model computes."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

from hermes.errors import BadInputError, UsageError


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are changed for contexts longer than the trained one.

    `linear` divides every frequency by `factor`. `llama3` divides the slow frequencies by `factor`,
    keeps the fast ones and blends between `low_freq_factor` and `high_freq_factor` wavelengths per
    `original_max_seq_len` positions (Llama 3.1, "Llama 3 Herd of Models", and transformers'
    `rope_type: llama3`).
    """

    kind: Literal["linear", "llama3"]
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_seq_len: int = 8192

    def problems(self) -> list[str]:
        """Everything that makes this scaling meaningless."""
        found = []
        if self.kind not in ("linear", "llama3"):
            found.append(f"rope_scaling.kind is {self.kind!r}, expected linear or llama3")
        if not (_is_number(self.factor) and self.factor > 0):
            found.append(f"rope_scaling.factor is {self.factor!r}, expected a number above 0")
        if self.kind == "llama3":
            if not (_is_number(self.low_freq_factor) and _is_number(self.high_freq_factor)):
                found.append("rope_scaling.low_freq_factor and high_freq_factor must be numbers")
            elif not 0 < self.low_freq_factor < self.high_freq_factor:
                found.append(
                    f"rope_scaling.low_freq_factor {self.low_freq_factor} and high_freq_factor "
                    f"{self.high_freq_factor}: expected 0 < low < high"
                )
            if not _is_int(self.original_max_seq_len) or self.original_max_seq_len < 1:
                found.append(
                    f"rope_scaling.original_max_seq_len is {self.original_max_seq_len!r}, "
                    "expected an integer above 0"
                )
        return found


@dataclass(frozen=True)
class HermesConfig:
    """Sizes and constants of one decoder-only model; immutable and always valid.

    The defaults are those of a model trained from scratch with this package. Reading a foreign
    checkpoint never uses them: `hermes.layouts` demands every field that changes the numbers.

    Attributes:
        vocab_size: rows of the embedding table.
        hidden_size: width of the residual stream.
        intermediate_size: width of the SwiGLU feed-forward.
        num_layers: decoder blocks.
        num_heads: query heads.
        num_kv_heads: key/value heads; divides `num_heads`.
        head_dim: width of one head; `hidden_size / num_heads` if left 0.
        max_seq_len: positions the model was trained for.
        rope_theta: base of the rotary frequencies.
        rms_norm_eps: added to the mean square inside every RMSNorm.
        tie_embeddings: the output head is the embedding table.
        attention_bias: q, k and v projections have biases.
        output_bias: the attention's output projection has a bias.
        mlp_bias: gate, up and down projections have biases.
        qk_norm: RMSNorm on every query and key head before the rotation (Qwen3).
        rope_scaling: change of the rotary frequencies, or None.
        rope_amplitude: factor on both rotary tables (nanoVLM's attention scaling).
        no_rope_layers: indices of layers that do not rotate (SmolLM3).
        pad_token_id: ignored by the loss; None if there is none.
        bos_token_id: start of text, or None.
        eos_token_id: end of text, or None.
    """

    vocab_size: int = 32000
    hidden_size: int = 512
    intermediate_size: int = 1376
    num_layers: int = 8
    num_heads: int = 8
    num_kv_heads: int = 4
    head_dim: int = 0
    max_seq_len: int = 2048
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6
    tie_embeddings: bool = True
    attention_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    rope_scaling: RopeScaling | None = None
    rope_amplitude: float = 1.0
    no_rope_layers: tuple[int, ...] = ()
    pad_token_id: int | None = 0
    bos_token_id: int | None = 1
    eos_token_id: int | None = 2

    def __post_init__(self) -> None:
        countable = _is_int(self.hidden_size) and _is_int(self.num_heads) and self.num_heads > 0
        if self.head_dim == 0 and countable and self.hidden_size % self.num_heads == 0:
            object.__setattr__(self, "head_dim", self.hidden_size // self.num_heads)
        if isinstance(self.no_rope_layers, list):
            object.__setattr__(self, "no_rope_layers", tuple(self.no_rope_layers))
        problems = self._problems()
        if problems:
            raise BadInputError(
                f"the model configuration has {len(problems)} problem(s)",
                problems=problems,
                todo="correct these fields in the config file or pass --config with right ones",
            )

    @property
    def num_query_groups(self) -> int:
        """Query heads that share one key/value head."""
        return self.num_heads // self.num_kv_heads

    def _problems(self) -> list[str]:
        found = self._size_problems() + self._number_problems()
        if found:
            return found
        if self.num_heads % self.num_kv_heads:
            found.append(
                f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}"
            )
        if self.head_dim % 2:
            found.append(f"head_dim {self.head_dim} is odd; rotary positions need pairs")
        for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
            value = getattr(self, name)
            if value is not None and not (_is_int(value) and 0 <= value < self.vocab_size):
                found.append(f"{name} is {value!r}, expected 0 to {self.vocab_size - 1} or null")
        bad = [i for i in self.no_rope_layers if not (_is_int(i) and 0 <= i < self.num_layers)]
        if bad:
            found.append(f"no_rope_layers names {bad}, expected 0 to {self.num_layers - 1}")
        if self.rope_scaling is not None:
            found.extend(self.rope_scaling.problems())
        return found

    def _size_problems(self) -> list[str]:
        found = []
        for name, most in _SIZE_LIMITS.items():
            value = getattr(self, name)
            if name == "head_dim" and value == 0:
                found.append(
                    f"head_dim is not given and hidden_size {self.hidden_size!r} is not a multiple "
                    f"of num_heads {self.num_heads!r}"
                )
            elif not _is_int(value) or not 1 <= value <= most:
                found.append(f"{name} is {value!r}, expected an integer from 1 to {most}")
        return found

    def _number_problems(self) -> list[str]:
        found = []
        for name in ("rope_theta", "rms_norm_eps", "rope_amplitude"):
            value = getattr(self, name)
            if not (_is_number(value) and value > 0):
                found.append(f"{name} is {value!r}, expected a finite number above 0")
        for name in ("tie_embeddings", "attention_bias", "output_bias", "mlp_bias", "qk_norm"):
            if not isinstance(getattr(self, name), bool):
                found.append(f"{name} is {getattr(self, name)!r}, expected true or false")
        if not isinstance(self.no_rope_layers, tuple):
            found.append(f"no_rope_layers is {self.no_rope_layers!r}, expected layer indices")
        if self.rope_scaling is not None and not isinstance(self.rope_scaling, RopeScaling):
            found.append(f"rope_scaling is {self.rope_scaling!r}, expected a RopeScaling")
        return found

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types; `from_dict` restores an equal config."""
        values = asdict(self)
        values["no_rope_layers"] = list(self.no_rope_layers)
        return values

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> HermesConfig:
        """Build from `to_dict`'s form; unknown fields are refused by name."""
        known = {field.name for field in fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise BadInputError(
                f"unknown configuration field(s): {', '.join(unknown)}",
                expected=f"only {', '.join(sorted(known))}",
                todo="remove or rename them",
            )
        arguments = dict(values)
        scaling = arguments.get("rope_scaling")
        if isinstance(scaling, Mapping):
            try:
                arguments["rope_scaling"] = RopeScaling(**scaling)
            except TypeError as error:
                raise BadInputError(
                    f"rope_scaling has unknown or missing fields: {dict(scaling)}",
                    expected=f"fields {[field.name for field in fields(RopeScaling)]}",
                    todo="correct rope_scaling",
                ) from error
        layers = arguments.get("no_rope_layers", ())
        if not isinstance(layers, (list, tuple)):
            raise BadInputError(f"no_rope_layers is {layers!r}", expected="a list of layer indices")
        return cls(**arguments)

    def to_json(self) -> str:
        """Indented JSON of `to_dict`."""
        return json.dumps(self.to_dict(), indent=2)

    @classmethod
    def from_json(cls, path: str | Path) -> HermesConfig:
        """Read a Hermes config file written by `to_json`."""
        path = Path(path)
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise BadInputError(f"{path}: not readable as JSON: {error}") from error
        if not isinstance(values, dict):
            raise BadInputError(f"{path}: holds a {type(values).__name__}", expected="an object")
        return cls.from_dict(values)

    @classmethod
    def preset(cls, name: str) -> HermesConfig:
        """A named shape, e.g. `HermesConfig.preset("smollm2-135m")`."""
        if name not in PRESETS:
            raise UsageError(
                f"no preset {name!r}", expected=f"one of {', '.join(PRESETS)}", todo="pick one"
            )
        return cls.from_dict(PRESETS[name])


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return False
    # math.isfinite raises for integers beyond every float.
    return -sys.float_info.max <= value <= sys.float_info.max


# Upper bounds catch absurd configs before anything is allocated; the largest models of this family
# (405 B parameters) stay well below them.
_SIZE_LIMITS = {
    "vocab_size": 2**21,
    "hidden_size": 2**16,
    "intermediate_size": 2**18,
    "num_layers": 1024,
    "num_heads": 1024,
    "num_kv_heads": 1024,
    "head_dim": 2048,
    "max_seq_len": 2**24,
}

PRESETS: dict[str, dict[str, Any]] = {
    "tiny": {
        "vocab_size": 1024,
        "hidden_size": 192,
        "intermediate_size": 448,
        "num_layers": 4,
        "num_heads": 4,
        "num_kv_heads": 2,
        "max_seq_len": 512,
        "rms_norm_eps": 1e-5,
    },
    "smollm2-135m": {
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_layers": 30,
        "num_heads": 9,
        "num_kv_heads": 3,
        "max_seq_len": 8192,
        "rope_theta": 100000.0,
        "rms_norm_eps": 1e-5,
        "pad_token_id": 2,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
}
