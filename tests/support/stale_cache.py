"""The runtime as an app would start it, with its own weight cache beside the bundle."""

from __future__ import annotations


def answer_with_weight_cache(path: str, prompt: str, count: int) -> str:
    """What LiteRT-LM says with its default cache; writes the cache if there is none."""
    import litert_lm

    engine = litert_lm.Engine(path, backend=litert_lm.Backend.CPU(thread_count=1))
    greedy = litert_lm.SamplerConfig(top_k=1, top_p=1.0, temperature=1.0, seed=0)
    with engine.create_session(
        apply_prompt_template=False, sampler_config=greedy, max_output_tokens=count
    ) as session:
        session.run_prefill([prompt])
        return "".join(session.run_decode().texts[:1])
