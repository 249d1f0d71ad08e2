"""Speed of a bundle in LiteRT-LM, by the runtime's own counters, in a child process."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import cast

from hermes.runners.child import measure_in_child
from hermes.runners.litert_lm import NO_WEIGHT_CACHE


@dataclass(frozen=True)
class Speed:
    """One run of a fixed number of tokens.

    Attributes:
        prefill: tokens per second.
        decode: tokens per second.
        first_token_seconds: from the prompt to the first token.
        load_seconds: creating the engine and its session.
        peak_memory: resident bytes of the process, pages of mapped files included.
    """

    prefill: float
    decode: float
    first_token_seconds: float
    load_seconds: float
    peak_memory: int


def benchmark(
    path: str | Path,
    *,
    prefill_tokens: int = 256,
    decode_tokens: int = 128,
    threads: int = 2,
    cache_folder: str | Path | None = None,
    timeout: float = 600.0,
) -> Speed:
    """Feed and decode that many tokens once.

    Args:
        path: a .litertlm file.
        prefill_tokens: length of the prompt.
        decode_tokens: tokens generated after it.
        threads: of the CPU kernels.
        cache_folder: where the runtime keeps its packed weights; None packs them anew and keeps
            none. The runtime's own default would be a file beside the bundle.
        timeout: seconds for all of it.

    Raises:
        NativeToolError: the runtime died, hung or refused.
    """
    run = measure_in_child(
        "hermes.runners.benchmark:run_benchmark",
        str(path),
        prefill_tokens,
        decode_tokens,
        threads,
        NO_WEIGHT_CACHE if cache_folder is None else str(cache_folder),
        tool="LiteRT-LM runtime",
        timeout=timeout,
    )
    return Speed(*cast("tuple[float, float, float, float]", run.value), run.peak_memory)


def run_benchmark(
    path: str, prefill_tokens: int, decode_tokens: int, threads: int, cache: str
) -> tuple[float, float, float, float]:
    """The child's side."""
    import litert_lm

    info = litert_lm.Benchmark(
        model_path=path,
        backend=litert_lm.Backend.CPU(thread_count=threads),
        prefill_tokens=prefill_tokens,
        decode_tokens=decode_tokens,
        cache_dir=cache,
    ).run()
    return (
        float(info.last_prefill_tokens_per_second),
        float(info.last_decode_tokens_per_second),
        float(info.time_to_first_token_in_second),
        float(info.init_time_in_second),
    )
