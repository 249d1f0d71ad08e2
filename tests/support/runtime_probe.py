"""Questions to the real runtime; run these in a child process, the native library can abort."""

from __future__ import annotations

from collections.abc import Sequence


def _engine(bundle: str) -> object:
    import litert_lm

    return litert_lm.Engine(bundle, cache_dir=":nocache")


def tokenize(bundle: str, texts: Sequence[str]) -> list[list[int]]:
    engine = _engine(bundle)
    return [engine.tokenize(text) for text in texts]  # type: ignore[attr-defined]


def tokenize_all(bundles: Sequence[str], texts: Sequence[str]) -> list[list[list[int]]]:
    return [tokenize(bundle, texts) for bundle in bundles]


def detokenize(bundle: str, sequences: Sequence[Sequence[int]]) -> list[str | None]:
    engine, texts = _engine(bundle), []
    for ids in sequences:
        try:
            texts.append(engine.detokenize(list(ids)))  # type: ignore[attr-defined]
        except (RuntimeError, UnicodeDecodeError):
            texts.append(None)
    return texts


def generate(bundle: str, prompt: str, limit: int = 20) -> str:
    """Greedy text of a raw session."""
    engine = _engine(bundle)
    session = engine.create_session(  # type: ignore[attr-defined]
        apply_prompt_template=False, max_output_tokens=limit
    )
    session.run_prefill([prompt])
    return str(session.run_decode().texts[0])


def special_ids(bundle: str) -> tuple[int | None, list[list[int]]]:
    """Start token and stop sequences as the runtime understood them."""
    engine = _engine(bundle)
    return engine.bos_token_id, engine.eos_token_ids  # type: ignore[attr-defined]


def render(
    bundle: str, templates: Sequence[str | None], conversations: Sequence[list[dict[str, object]]]
) -> list[list[str]]:
    """The runtime's own prompt for the last message after the others; '' where it fails.

    None as a template means the bundle's own. One list per template.
    """
    engine = _engine(bundle)

    def prompt(template: str | None, messages: list[dict[str, object]]) -> str:
        conversation = engine.create_conversation(  # type: ignore[attr-defined]
            messages=messages[:-1] or None, chat_template=template
        )
        return str(conversation.render_message_to_string(messages[-1]))

    return [[prompt(template, messages) for messages in conversations] for template in templates]


def stream(bundle: str, prompt: str, limit: int = 20) -> list[str]:
    """The chunks of a streamed greedy answer."""
    session = _engine(bundle).create_session(  # type: ignore[attr-defined]
        apply_prompt_template=False, max_output_tokens=limit
    )
    session.run_prefill([prompt])
    return [text for response in session.run_decode_async() for text in response.texts]


def tokens_fed(bundle: str, message: str) -> tuple[str, int]:
    """A conversation's first prompt, and the tokens in the cache after one answer token."""
    conversation = _engine(bundle).create_conversation(  # type: ignore[attr-defined]
        max_output_tokens=1
    )
    prompt = str(conversation.render_message_to_string(message))
    conversation.send_message(message)
    return prompt, int(conversation.token_count)
