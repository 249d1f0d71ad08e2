"""Two messages to a bundle in the real runtime; run it in a child process, it may abort."""

from __future__ import annotations


def talk(bundle: str) -> list[str]:
    import litert_lm

    engine = litert_lm.Engine(
        bundle, backend=litert_lm.Backend.CPU(thread_count=1), cache_dir=":nocache"
    )
    conversation = engine.create_conversation(max_output_tokens=6)
    return [str(conversation.send_message(text)) for text in ("the cat sat", "and")]
