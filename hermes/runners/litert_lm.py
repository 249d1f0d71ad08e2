"""TokenRunner over a .litertlm file: the real LiteRT-LM runtime, in a child process.

What litert-lm-api 0.18.1 gives, observed:
- A session takes text and returns text, never token ids. Streaming yields one chunk per token,
  except that incomplete UTF-8 is held back. Decoding again after the end fails.
- `run_prefill` of a list feeds its pieces tokenized one by one.
- `get_benchmark_info` (engine created with enable_benchmark) counts what was really fed: the
  prompt's tokens with the start token, and the decoded tokens with the stop token.
- With a start token, a prompt that begins with its spelling gets both: the token, then the spelling
  as one id, then the rest tokenized as a text of its own.
- A conversation's `token_count` is the sum of both over all turns.
- `render_message_to_string` renders preface and message together before the first message is sent.
- A template that fails renders as '' and makes `send_message` raise; the log has the reason.
- `max_output_tokens` of a session or conversation bounds each decode.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

from hermes.errors import BadInputError
from hermes.runners.child import Child
from hermes.runners.closing import Closing
from hermes.runners.interface import Generation, Message, Turn
from hermes.runners.process import Launcher

if TYPE_CHECKING:
    import litert_lm

NO_WEIGHT_CACHE = ":nocache"
"""The runtime's own cache of packed weights is keyed by name, time and size, not by content."""


@dataclass(frozen=True)
class RuntimeFacts:
    """What the loaded bundle says to the runtime."""

    start_token: int | None
    stop_tokens: tuple[tuple[int, ...], ...]
    load_seconds: float


class LiteRtLmRunner(Closing):
    """A bundle in LiteRT-LM on the CPU, decoding greedily.

    Args:
        path: a .litertlm file.
        threads: of the CPU kernels.
        max_num_tokens: length of the conversation; the bundle's own limit if None.
        timeout: seconds for loading and for each call.
        memory_limit: resident bytes of the child.
        launcher: another Python, e.g. one for another processor.

    Raises:
        NativeToolError: the runtime died, hung, or refused the bundle or a call.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        threads: int = 1,
        max_num_tokens: int | None = None,
        timeout: float = 600.0,
        memory_limit: int | None = None,
        launcher: Launcher | None = None,
    ) -> None:
        if not Path(path).is_file():
            raise BadInputError(f"{path}: no such file", expected="a .litertlm file")
        self.name = "LiteRT-LM"
        self._child = Child(
            "hermes.runners.litert_lm:Runtime",
            str(path),
            threads,
            max_num_tokens,
            tool="LiteRT-LM runtime",
            timeout=timeout,
            memory_limit=memory_limit,
            launcher=launcher,
        )
        facts: RuntimeFacts = self._child.call("facts")
        self.start_token = facts.start_token
        self.stop_tokens = facts.stop_tokens
        self.load_seconds = facts.load_seconds

    def tokenize(self, text: str) -> list[int]:
        """Ids of a text, special tokens honoured, no start token."""
        return cast("list[int]", self._child.call("tokenize", text))

    def detokenize(self, ids: Sequence[int]) -> str:
        """Text of ids."""
        return cast("str", self._child.call("detokenize", [int(token) for token in ids]))

    def generate(self, text: str, max_new_tokens: int) -> Generation:
        """Continue a raw text greedily in a fresh session, without any template."""
        return cast("Generation", self._child.call("generate", text, max_new_tokens))

    def render(self, messages: Sequence[Message]) -> str:
        """The prompt for a first turn that ends in `messages[-1]`; '' if the template fails."""
        return cast("str", self._child.call("render", [dict(item) for item in messages]))

    def chat(
        self, turns: Sequence[str], max_new_tokens: int, preface: Sequence[Message] = ()
    ) -> tuple[Turn, ...]:
        """Send user messages one after the other in one fresh conversation."""
        messages = [dict(item) for item in preface]
        replies = self._child.call("chat", list(turns), max_new_tokens, messages)
        return cast("tuple[Turn, ...]", replies)

    @property
    def peak_memory(self) -> int:
        """Largest resident size of the runtime's process, bytes."""
        return self._child.peak_memory

    @property
    def log(self) -> tuple[str, ...]:
        """The last lines that the runtime logged."""
        return self._child.output

    def close(self, kill: bool = False) -> None:
        """End the runtime's process."""
        self._child.close(kill)


class Runtime:
    """The child's side: one engine."""

    def __init__(self, path: str, threads: int, max_num_tokens: int | None) -> None:
        import litert_lm

        started = time.monotonic()
        self._engine: litert_lm.Engine = litert_lm.Engine(
            path,
            backend=litert_lm.Backend.CPU(thread_count=threads),
            max_num_tokens=max_num_tokens,
            cache_dir=NO_WEIGHT_CACHE,
            enable_benchmark=True,
        )
        self._load_seconds = time.monotonic() - started
        # Whatever sampler the bundle names: k = 1 is greedy.
        self._greedy = litert_lm.SamplerConfig(top_k=1, top_p=1.0, temperature=1.0, seed=0)

    def facts(self) -> RuntimeFacts:
        """Start and stop tokens as the runtime resolved them."""
        stops = tuple(tuple(ids) for ids in self._engine.eos_token_ids)
        return RuntimeFacts(self._engine.bos_token_id, stops, self._load_seconds)

    def tokenize(self, text: str) -> list[int]:
        """Ids of a text."""
        return list(self._engine.tokenize(text))

    def detokenize(self, ids: list[int]) -> str:
        """Text of ids."""
        return str(self._engine.detokenize(ids)) if ids else ""

    def generate(self, text: str, max_new_tokens: int) -> Generation:
        """One raw session: prefill, decode, counts."""
        with self._engine.create_session(
            apply_prompt_template=False,
            sampler_config=self._greedy,
            max_output_tokens=max_new_tokens,
        ) as session:
            started = time.monotonic()
            session.run_prefill([text])
            answer = session.run_decode()
            return _generation("".join(answer.texts[:1]), session, started)

    def render(self, messages: list[Message]) -> str:
        """Render in a conversation that is thrown away."""
        with self._conversation(messages[:-1], 1) as conversation:
            return str(conversation.render_message_to_string(messages[-1]))

    def chat(
        self, turns: list[str], max_new_tokens: int, preface: list[Message]
    ) -> tuple[Turn, ...]:
        """One conversation, all its turns."""
        answers = []
        with self._conversation(preface, max_new_tokens) as conversation:
            for text in turns:
                rendered = str(conversation.render_message_to_string(text))
                started = time.monotonic()
                reply = conversation.send_message(text).to_json()
                generation = _generation(text_of(reply), conversation, started)
                answers.append(Turn(rendered, generation, int(conversation.token_count)))
        return tuple(answers)

    def _conversation(
        self, preface: list[Message], max_new_tokens: int
    ) -> litert_lm.AbstractConversation:
        return self._engine.create_conversation(
            messages=preface or None,
            sampler_config=self._greedy,
            max_output_tokens=max_new_tokens,
        )


def _generation(
    text: str,
    source: litert_lm.AbstractSession | litert_lm.AbstractConversation,
    started: float,
) -> Generation:
    seconds = time.monotonic() - started
    info = source.get_benchmark_info()
    return Generation(
        text, int(info.last_prefill_token_count), int(info.last_decode_token_count), seconds
    )


def text_of(reply: Mapping[str, object]) -> str:
    """The text of a message, whose content is a text or a list of parts."""
    content = reply.get("content", "")
    if isinstance(content, str):
        return content
    parts = cast("Sequence[Mapping[str, object]]", content)
    return "".join(str(part["text"]) for part in parts if part.get("type") == "text")
