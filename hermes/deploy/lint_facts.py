"""What the lint rules look at: a finished bundle as plain values.

`converters.anatomy` reads them from a file; tests write them by hand or into a file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from hermes.deploy.prompt_metadata import PromptMetadata
from hermes.runners.roles import (
    KEY_PREFIXES,
    MASK_NAMES,
    POSITION_NAMES,
    PREFILL,
    TOKEN_NAMES,
    VALUE_PREFIXES,
)
from hermes.signatures import DECODE

CACHE_PREFIXES = tuple(zip(KEY_PREFIXES, VALUE_PREFIXES, strict=True))


@dataclass(frozen=True)
class SectionFact:
    """One section: its kind, its bytes in the file, and its own keys."""

    kind: str
    offset: int
    size: int
    entries: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class TensorFact:
    """One input or output of a signature."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def is_cache(self) -> bool:
        """One of the tensors that the runtime carries from call to call."""
        return self.name.startswith(sum(CACHE_PREFIXES, ()))


@dataclass(frozen=True)
class SignatureFact:
    """One exported function.

    Attributes:
        operators: operator name -> how often it occurs.
        scatters: cache tensors that are written by scatter.
    """

    name: str
    inputs: tuple[TensorFact, ...]
    outputs: tuple[TensorFact, ...]
    operators: Mapping[str, int] = field(default_factory=dict)
    scatters: int = 0

    def input(self, names: tuple[str, ...]) -> TensorFact | None:
        """The input that goes by one of these names."""
        return next((tensor for tensor in self.inputs if tensor.name in names), None)

    @property
    def length(self) -> int:
        """Tokens of one call; 0 if nothing tells."""
        told = self.input(TOKEN_NAMES) or self.input(POSITION_NAMES)
        return told.shape[-1] if told is not None and told.shape else 0

    @property
    def cache(self) -> tuple[TensorFact, ...]:
        """Cache inputs."""
        return tuple(tensor for tensor in self.inputs if tensor.is_cache)


@dataclass(frozen=True)
class ConstantFact:
    """A matrix in the graph, each buffer once.

    Attributes:
        operator: that reads it.
        scales: 0 for a float one, 1 per tensor, else per channel.
        by_position: rows are looked up by position, as rotary tables are.
        unpacked: the runtime turns it into float32 when it loads the model.
    """

    name: str
    operator: str
    dtype: str
    shape: tuple[int, ...]
    size: int
    scales: int
    by_position: bool = False
    unpacked: bool = False


@dataclass(frozen=True)
class TokenizerFact:
    """A tokenizer section: its content decompressed, or why it cannot be read."""

    kind: str
    data: bytes = b""
    problem: str = ""


@dataclass(frozen=True)
class BundleFacts:
    """A whole bundle.

    Attributes:
        name: of the file.
        damage: parts that differ from their hashes.
        digest: hash of the whole, as the file carries it; "" without hashes.
        prompt: None without a metadata section.
        model_problem: why the graph cannot be read.
        caches: weight caches of the runtime that lie beside the file.
    """

    name: str
    size: int
    version: tuple[int, int, int]
    sections: tuple[SectionFact, ...]
    damage: tuple[str, ...] = ()
    digest: str = ""
    prompt: PromptMetadata | None = None
    tokenizers: tuple[TokenizerFact, ...] = ()
    signatures: tuple[SignatureFact, ...] = ()
    constants: tuple[ConstantFact, ...] = ()
    model_problem: str = ""
    caches: tuple[str, ...] = ()

    @property
    def decode(self) -> SignatureFact | None:
        """The signature that makes logits."""
        return next((entry for entry in self.signatures if entry.name == DECODE), None)

    @property
    def prefills(self) -> tuple[SignatureFact, ...]:
        """Prefill signatures, shortest first."""
        found = [entry for entry in self.signatures if entry.name.startswith(PREFILL)]
        return tuple(sorted(found, key=lambda entry: entry.length))

    @property
    def capacity(self) -> int:
        """Slots of the exported cache: the mask's last axis, else axis 2 of a key tensor; or 0."""
        decode = self.decode
        if decode is None:
            return 0
        mask = decode.input(MASK_NAMES)
        if mask is not None and mask.shape:
            return mask.shape[-1]
        keys = [tensor for tensor in decode.cache if "k_" in tensor.name and len(tensor.shape) > 2]
        return keys[0].shape[2] if keys else 0

    @property
    def context(self) -> int:
        """Tokens that a conversation may hold; 0 if nothing tells."""
        limit = 0 if self.prompt is None else self.prompt.max_num_tokens
        return min(filter(None, (self.capacity, limit)), default=0)

    @property
    def vocab_size(self) -> int:
        """Width of the logits; 0 without them."""
        outputs = () if self.decode is None else self.decode.outputs
        logits = [tensor for tensor in outputs if tensor.name == "logits"]
        return logits[0].shape[-1] if logits and logits[0].shape else 0
