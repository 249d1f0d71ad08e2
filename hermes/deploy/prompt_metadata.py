"""What a bundle tells the runtime about prompts, as plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

TokenRule = tuple[int, ...] | str
"""Ids, or a spelling that the runtime tokenizes."""


@dataclass(frozen=True)
class PromptMetadata:
    """What the bundle tells the runtime about prompts; ids as tuples, spellings as text."""

    start_token: TokenRule | None = None
    stop_tokens: tuple[TokenRule, ...] = ()
    chat_template: str | None = None
    max_num_tokens: int = 0
    suppress_tokens: tuple[int, ...] = ()
    model_type: str = ""
    sampler: Mapping[str, float] = field(default_factory=dict)
    prompt_affixes: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    min_runtime_version: str = ""

    @property
    def start_token_id(self) -> int | None:
        """The one id that the runtime feeds first: of a sequence it takes only the first."""
        rule = self.start_token
        return rule[0] if isinstance(rule, tuple) and rule else None

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """The stop rules that are a single id."""
        return tuple(r[0] for r in self.stop_tokens if isinstance(r, tuple) and len(r) == 1)
