"""Print what llama.cpp's quantizations keep of a model, on the texts of `hermes eval`.

llama.cpp's server tells the log probabilities of the likeliest tokens only; what is left goes to
the others as the float model shares it, which makes the least of their part of the divergence.

The float model is the GGUF file's own, dequantized. Of it, files of other types are written with
the package `gguf`, which knows no K-quants: matrices in the type, tables in Q8_0. With
`--quantizer` they come from llama.cpp's own quantizer, which chooses a type for each tensor.
llama.cpp runs in an environment of its own, which has `xllamacpp`; see docs/quantization.md.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter
from gguf.quants import dequantize, quantize

from hermes.assets import assets_folder
from hermes.checkpoint import open_checkpoint
from hermes.layouts import map_checkpoint
from hermes.runners.interface import Logits
from hermes.runners.layerwise import LayerwiseScorer
from hermes.tokenizer import prompt_contract, tokenizer_from_gguf
from hermes.verify.metrics import compare

TYPES = ("Q8_0", "Q5_0", "Q4_1", "Q4_0")
TABLES = ("token_embd.weight", "output.weight")

LLAMA = """
import array, json, sys
import xllamacpp
path, context, vocabulary, told = sys.argv[1], *map(int, sys.argv[2:5])
params = xllamacpp.CommonParams()
params.model.path, params.n_ctx, params.n_parallel, params.warmup = path, context, 1, False
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 2
server = xllamacpp.Server(params)
for line in sys.stdin:
    ids = json.loads(line)
    for end in range(1, len(ids) + 1):
        answer = server.handle_completions({
            "prompt": ids[:end], "n_predict": 1, "n_probs": told, "cache_prompt": True,
            "temperature": 0, "samplers": [],
        })
        answer = answer if isinstance(answer, dict) else json.loads(answer)
        row = array.array("f", [-float("inf")]) * vocabulary
        for entry in answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]:
            row[entry["id"]] = entry["logprob"]
        sys.stdout.buffer.write(row.tobytes())
        sys.stdout.buffer.flush()
"""
"""A row of log probabilities after each token, float32, on standard output; -inf: not told."""
TOLD = 2000
"""Tokens per row; all 49,152 of them would take the server a second."""

QUANTIZER = """
import ctypes, sys
import llama_cpp
source, kind, target = sys.argv[1:]
params = llama_cpp.llama_model_quantize_default_params()
params.ftype = getattr(llama_cpp, "LLAMA_FTYPE_MOSTLY_" + kind)
params.allow_requantize = True
files = source.encode(), target.encode()
sys.exit(llama_cpp.llama_model_quantize(*files, ctypes.byref(params)))
"""


class LlamaModel:
    """A GGUF file in llama.cpp."""

    def __init__(self, python: Path, path: Path, context: int, vocabulary: int) -> None:
        self._vocabulary = vocabulary
        words = [str(python), "-c", LLAMA, str(path), str(context), str(vocabulary), str(TOLD)]
        self._process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )

    def score(self, ids: Sequence[int]) -> Iterator[Logits]:
        """Log probabilities [vocab] after each id."""
        stdin, stdout = self._process.stdin, self._process.stdout
        if stdin is None or stdout is None:
            raise SystemExit("llama.cpp has no standard streams")
        stdin.write(json.dumps(list(ids)).encode() + b"\n")
        stdin.flush()
        for _ in ids:
            row = stdout.read(4 * self._vocabulary)
            if len(row) < 4 * self._vocabulary:
                raise SystemExit(f"llama.cpp ended with {self._process.wait()} and no answer")
            yield np.frombuffer(row, dtype=np.float32)

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()


def completed(row: Logits, reference: Logits) -> Logits:
    """The row with what it leaves to tokens not told, in the reference's proportions."""
    untold = np.isneginf(row)
    rest = max(1.0 - float(np.exp(row[~untold], dtype=np.float64).sum()), 1e-9)
    tail = reference[untold].astype(np.float64)
    peak = tail.max()
    spread = tail - peak - np.log(np.exp(tail - peak).sum())
    full = row.copy()
    full[untold] = np.log(rest) + spread
    return full


def requantized(source: Path, kind: str, target: Path) -> Path:
    """The same model with matrices of another type."""
    reader, writer = GGUFReader(source), GGUFWriter(target, "llama")
    for key, field in reader.fields.items():
        if key.startswith("GGUF.") or key in ("general.architecture", "general.file_type"):
            continue
        if field.types[0] == GGUFValueType.ARRAY:
            writer.add_array(key, field.contents())
        else:
            writer.add_key_value(key, field.contents(), field.types[0])
    for tensor in reader.tensors:
        shape = tuple(int(length) for length in tensor.shape[::-1])
        values = dequantize(tensor.data, tensor.tensor_type).reshape(shape).astype(np.float32)
        if values.ndim == 1:
            writer.add_tensor(tensor.name, values)
        else:
            chosen = GGMLQuantizationType["Q8_0" if tensor.name in TABLES else kind]
            writer.add_tensor(tensor.name, quantize(values, chosen), raw_dtype=chosen)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def quantized(python: Path, source: Path, kind: str, target: Path) -> Path:
    """The same model in the mix of types that llama.cpp's quantizer makes of it."""
    words = [str(python), "-c", QUANTIZER, str(source), kind, str(target)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode or not target.exists():
        raise SystemExit(f"llama.cpp's quantizer made no {kind}:\n{done.stderr[-2000:]}")
    return target


def mix(path: Path) -> str:
    """The types of a file's tensors by the megabytes they take, largest first."""
    sizes: Counter[str] = Counter()
    for tensor in GGUFReader(path).tensors:
        sizes[tensor.tensor_type.name] += int(tensor.n_bytes)
    return ", ".join(f"{kind} {size / 1e6:.1f}" for kind, size in sizes.most_common())


def main() -> None:
    """Parse, measure, print a row per type."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("checkpoint", type=Path, help="a GGUF file")
    parser.add_argument("--llama-python", type=Path, required=True, help="Python with xllamacpp")
    parser.add_argument("--types", nargs="*", default=list(TYPES))
    parser.add_argument("--quantizer", type=Path, help="Python with llama-cpp-python: makes them")
    parser.add_argument("--gguf", nargs="*", type=Path, default=[], help="files to measure as well")
    parser.add_argument("--text", nargs="*", type=Path, help="default: the two shipped ones")
    parser.add_argument("--positions", type=int, default=1024, help="tokens of each text")
    given = parser.parse_args()
    checkpoint = open_checkpoint(given.checkpoint)
    mapped = map_checkpoint(checkpoint)
    if checkpoint.gguf_metadata is None:
        parser.error(f"{given.checkpoint} is no GGUF file")
    tokenizer = tokenizer_from_gguf(checkpoint.gguf_metadata)
    start = prompt_contract(tokenizer, checkpoint, mapped.config).start_token_id
    reference = LayerwiseScorer(mapped.config, mapped.weights)
    shipped = assets_folder() / "eval"
    texts, wanted = {}, {}
    for text in given.text or (shipped / "english.txt", shipped / "technical.txt"):
        ids = [] if start is None else [start]
        texts[text] = [*ids, *tokenizer.encode(text.read_text("utf-8"))][: given.positions]
        wanted[text] = list(reference.score(texts[text]))
    print(f"{'type':<24}{'MB':>7}  {'text':<16}{'KL':>9}{'top-1':>8}{'perplexity':>12}")
    with tempfile.TemporaryDirectory(prefix="bench-llama-") as folder:
        files = []
        for kind in given.types:
            words = given.checkpoint, kind, Path(folder) / f"{kind}.gguf"
            python = given.quantizer
            files.append(quantized(python, *words) if python else requantized(*words))
        for file in (*files, *given.gguf):
            print(f"{file.stem}: MB of {mix(file)}", flush=True)
            model = LlamaModel(
                given.llama_python, file, given.positions + 8, mapped.config.vocab_size
            )
            for text, ids in texts.items():
                rows = map(completed, model.score(ids), wanted[text])
                found = compare(wanted[text], rows, [*ids[1:], None])
                print(
                    f"{file.stem:<24}{file.stat().st_size / 1e6:>7.0f}  {text.name:<16}"
                    f"{found.kl.mean():>9.5f}{found.top1.mean():>8.1%}"
                    f"{found.perplexities()[1].value:>12.3f}",
                    flush=True,
                )
            model.close()


if __name__ == "__main__":
    main()
