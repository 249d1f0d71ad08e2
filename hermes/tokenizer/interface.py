"""What the rest of Hermes knows about a tokenizer and about the prompt around it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol


class Tokenizer(Protocol):
    """A tokenizer exactly as the runtime will use it.

    Attributes:
        kind: the section type it becomes in the bundle.
        vocab_size: highest id + 1.
        data: the bytes that go into the bundle: a SentencePiece model proto or a tokenizer.json
            without truncation and padding.
        origin: where it was read from, for messages.
    """

    @property
    def kind(self) -> Literal["sentencepiece", "huggingface"]: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def data(self) -> bytes: ...
    @property
    def origin(self) -> str: ...
    @property
    def special_pieces(self) -> Mapping[str, int]:
        """Added, control and user-defined tokens: spelling to id."""
        ...

    @property
    def begin_id(self) -> int | None:
        """Begin-of-text id that the tokenizer file itself names."""
        ...

    @property
    def end_id(self) -> int | None:
        """End-of-text id that the tokenizer file itself names."""
        ...

    def leading_ids(self) -> list[int]:
        """Ids that the tokenizer file's own post-processing puts before any text."""
        ...

    def encode(self, text: str) -> list[int]:
        """Ids as `engine.tokenize` gives them: special tokens in the text count, nothing is added.

        SentencePiece control symbols are the exception: the library never matches them in text.
        """
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text of the ids; incomplete UTF-8 becomes U+FFFD."""
        ...

    def token_id(self, piece: str) -> int | None:
        """Id of exactly this piece, None if there is none."""
        ...

    def piece(self, token_id: int) -> str:
        """Spelling of one id; `""` for an id inside the range that nothing is assigned to."""
        ...


@dataclass(frozen=True)
class PromptContract:
    """What surrounds the text that the model sees, and what ends its answer.

    Attributes:
        start_token_id: fed once before everything else by the runtime; None where the model was
            trained without it or where the chat template prints it itself.
        stop_token_ids: every id that ends an answer, ascending.
        stop_sources: for each of them, who named it.
        chat_template: in a form that the runtime's template engine renders; None for a model
            without one.
        original_template: as found beside the checkpoint.
        notes: decisions worth a line in the report.
        prompts: what the original template makes of each conversation in `probes.PROBES`, with the
            assistant's turn opened; those that it refuses are absent.
    """

    start_token_id: int | None
    stop_token_ids: tuple[int, ...]
    stop_sources: dict[int, list[str]] = field(default_factory=dict)
    chat_template: str | None = None
    original_template: str | None = None
    notes: list[str] = field(default_factory=list)
    prompts: Mapping[str, str] = field(default_factory=dict)
