"""A tokenizer of 128 pieces and a .litertlm around a tiny flatbuffer, for runtime tests."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

SENTENCES = [
    "the cat sat on the mat and the dog sat on the cat",
    "a quick brown fox jumps over the lazy dog in the morning",
    "seven wizards boxed five dozen jugs of liquor by the quay",
    "how vexingly quick daft zebras jump when the sun is up",
]
CHAT_TEMPLATE = (
    "{% for message in messages %}<s>{{ message.role }}:"
    "{% for part in message.content %}{{ part.text }}{% endfor %}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>{% endif %}"
)


def train_sentencepiece() -> bytes:
    """A model proto with exactly 128 pieces; `<s>` and `</s>` match in text."""
    import sentencepiece

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(SENTENCES * 10),
        model_writer=model,
        vocab_size=128,
        model_type="bpe",
        bos_id=-1,
        eos_id=-1,
        user_defined_symbols=["<s>", "</s>"],
        minloglevel=2,
    )
    return model.getvalue()


def write_bundle(
    flatbuffer: Path,
    target: Path,
    *,
    stop_ids: Sequence[int] = (2,),
    stop_texts: Sequence[str] = (),
    start_id: int | None = None,
    start_text: str | None = None,
    template: str | None = CHAT_TEMPLATE,
    max_num_tokens: int = 64,
) -> Path:
    """A .litertlm with the tokenizer of `train_sentencepiece`."""
    from litert_lm_builder import litertlm_builder as builder
    from litert_lm_builder.runtime.proto import llm_metadata_pb2

    metadata = llm_metadata_pb2.LlmMetadata(max_num_tokens=max_num_tokens)
    metadata.llm_model_type.generic_model.SetInParent()
    for stop in stop_ids:
        metadata.stop_tokens.add().token_ids.ids.append(stop)
    for text in stop_texts:
        metadata.stop_tokens.add().token_str = text
    if start_text is not None:
        metadata.start_token.token_str = start_text
    if start_id is not None:
        metadata.start_token.token_ids.ids.append(start_id)
    if template is not None:
        metadata.jinja_prompt_template = template
    metadata_path = target.with_suffix(".metadata.pb")
    metadata_path.write_bytes(metadata.SerializeToString())
    tokenizer_path = target.with_suffix(".spm.model")
    tokenizer_path.write_bytes(train_sentencepiece())
    writer = builder.LitertLmFileBuilder()
    writer.add_system_metadata(builder.Metadata("Authors", "test", builder.DType.STRING))
    writer.add_llm_metadata(str(metadata_path))
    writer.add_sentencepiece_tokenizer(str(tokenizer_path))
    writer.add_tflite_model(str(flatbuffer), builder.TfLiteModelType.PREFILL_DECODE)
    with target.open("wb") as stream:
        writer.build(stream)
    return target
