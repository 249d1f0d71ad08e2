"""All layout tables, in the order in which equal matches are preferred."""

from hermes.layouts.fused import HUGGINGFACE_FUSED
from hermes.layouts.gguf import GGUF_LLAMA, GGUF_QWEN
from hermes.layouts.hermes import HERMES
from hermes.layouts.huggingface import HUGGINGFACE, HUGGINGFACE_BARE
from hermes.layouts.interleaved import INTERLEAVED
from hermes.layouts.meta import GPT_FAST, META
from hermes.layouts.nanovlm import NANOVLM
from hermes.layouts.table import Layout

LAYOUTS: tuple[Layout, ...] = (
    HERMES,
    HUGGINGFACE,
    HUGGINGFACE_BARE,
    HUGGINGFACE_FUSED,
    NANOVLM,
    INTERLEAVED,
    META,
    GPT_FAST,
    GGUF_LLAMA,
    GGUF_QWEN,
)


def layout_named(name: str) -> Layout:
    """The table of that name; KeyError if there is none."""
    return {layout.name: layout for layout in LAYOUTS}[name]
