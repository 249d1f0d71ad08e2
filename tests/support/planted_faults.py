"""Planted faults: each builder returns a function that gives the first red rung.

Each climbs the real ladder with the real object of its stage and the neighbour it is compared
with; what a stage does not touch is left out, and what only a wrong export could do is played by
the numpy model of `cached_llama`, which can be wrong on purpose. `opening` stands for a file that
is refused before the first rung.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from cached_llama import CachedLlama, Fault
from small_checkpoints import small_model, write_checkpoint, write_recipe
from tiny_bundle import train_sentencepiece
from tiny_llama import PROMPT_IDS, reference_logits
from torch import Tensor

from converters.bind import bind_weights
from converters.bundle import BundleSpec, extract_section, read_bundle, write_bundle
from converters.float_models import reference_model
from converters.graph import Graph, obtain_graph
from converters.proof import text_ids
from converters.source import Source, SourceOptions, choose_recipe, open_source, rewrite_source
from hermes.cli import app, run_command
from hermes.recipe import QuantizationRule, Recipe
from hermes.rewrite import RewritableModel
from hermes.runners.exportable import ExportableRunner
from hermes.runners.flatbuffer import FlatbufferRunner
from hermes.runners.litert_lm import LiteRtLmRunner
from hermes.runners.reference import ReferenceRunner
from hermes.tokenizer.sentencepiece import SentencePieceTokenizer
from hermes.verify.golden import Golden
from hermes.verify.ladder import climb
from hermes.verify.ladder_input import LadderInput
from hermes.verify.prompt import check_prompt
from hermes.verify.runtime import RuntimeData

Weights = dict[str, Tensor]
Config = dict[str, Any]
Rung = int | Literal["opening"]

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)


@dataclass(frozen=True)
class World:
    """What all cases share: one checkpoint, its bundle and the bundle's model."""

    folder: Path
    source: Source
    chat: Source
    recipe: Recipe
    rewritten: RewritableModel
    graph: Graph
    bundle: Path
    model: Path

    def reference(self, source: Source | None = None) -> ReferenceRunner:
        mapped = (source or self.source).mapped
        return ReferenceRunner(reference_model(mapped.config, mapped.weights))

    def text(self) -> list[int]:
        return text_ids(self.source, None, self.recipe.limits.positions)


def build_world(folder: Path) -> World:
    """Convert the shared checkpoint once, without the ladder."""
    checkpoint = write_checkpoint(folder / "plain", *small_model())
    source = open_source(SourceOptions(checkpoint))
    recipe_file = write_recipe(folder / "small.toml")
    recipe = choose_recipe(str(recipe_file), source, None, ())
    rewritten = rewrite_source(source, recipe)
    bundle, model = folder / "small.litertlm", folder / "model.tflite"
    arguments = [str(checkpoint), "-o", str(bundle), "--recipe", str(recipe_file), "--no-verify"]
    assert run_command(app, ["convert", *arguments]) == 0
    opened = read_bundle(bundle)
    extract_section(opened, opened.section("TFLiteModel"), model)
    graph = obtain_graph(rewritten.config, recipe.export, recipe.graph, folder)
    chat = open_source(SourceOptions(_chat_checkpoint(folder / "chat")))
    return World(folder, source, chat, recipe, rewritten, graph, bundle, model)


def _chat_checkpoint(folder: Path) -> Path:
    """The same weights with a tokenizer that knows <s> in text, and a chat template."""
    write_checkpoint(folder, *small_model())
    settings = {"add_bos_token": True, "bos_token": "<s>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "tokenizer.model").write_bytes(train_sentencepiece())
    return folder


Case = Callable[[World, Path], Rung | None]


def first_red(given: LadderInput) -> int | None:
    """The rung that the verdict names."""
    report = climb(given).report
    return None if report.first_red is None else report.first_red.rung


# Rungs 0 and 1: the checkpoint is read otherwise than the training code meant it.


def misread(change: Callable[[Config, Weights], object], **training: Any) -> Case:
    """The training code ran on the right weights; the checkpoint that is read was changed."""

    def run(world: World, folder: Path) -> Rung | None:
        config, weights = small_model()
        golden = reference_logits(weights, config, PROMPT_IDS, **training)
        change(config, weights)
        source = open_source(SourceOptions(write_checkpoint(folder / "read", config, weights)))
        given = LadderInput(
            limits=world.recipe.limits,
            mapped=source.mapped,
            source_keys=list(source.checkpoint.tensors),
            golden=Golden((list(PROMPT_IDS),), (golden.numpy(),), "float64"),
            reference=world.reference(source),
        )
        return first_red(given)

    return run


def swap(one: str, two: str) -> Callable[[Config, Weights], object]:
    def change(config: Config, weights: Weights) -> None:
        first, second = f"model.layers.{one}.weight", f"model.layers.{two}.weight"
        weights[first], weights[second] = weights[second], weights[first]

    return change


def each(name: str, operation: Callable[[Tensor], Tensor]) -> Callable[[Config, Weights], object]:
    def change(config: Config, weights: Weights) -> None:
        for key in [key for key in weights if name in key]:
            weights[key] = operation(weights[key]).contiguous()

    return change


def permuted(rows: Tensor) -> Tensor:
    """Pairs to halves, done to rows that already are halves (16 wide heads)."""
    return rows.view(-1, 8, 2, 64).transpose(1, 2).reshape(rows.shape)


def heads_reversed(rows: Tensor) -> Tensor:
    return rows.view(2, 16, 64).flip(0).reshape(32, 64)


def tied(config: Config, weights: Weights) -> None:
    del weights["lm_head.weight"]
    config["tie_word_embeddings"] = True


def untied(config: Config, weights: Weights) -> None:
    weights["lm_head.weight"] = weights["lm_head.weight"].roll(1, 0)


def setting(**fields: Any) -> Callable[[Config, Weights], object]:
    return lambda config, weights: config.update(fields)


def unaccounted(world: World, folder: Path) -> Rung | None:
    keys = [*world.source.checkpoint.tensors, "model.layers.0.self_attn.q_proj.lora_A.weight"]
    mapped = world.source.mapped
    return first_red(LadderInput(world.recipe.limits, mapped=mapped, source_keys=keys))


# Rung 2: the rewritten weights are another function.


def wrong_rewrite(world: World, folder: Path) -> Rung | None:
    weights = _swapped(world.rewritten.weights)
    built = ReferenceRunner(reference_model(world.rewritten.config, weights))
    given = LadderInput(
        world.recipe.limits, text_ids=world.text(), reference=world.reference(), rewritten=built
    )
    return first_red(given)


def _swapped(weights: Mapping[str, Any]) -> dict[str, Any]:
    one, two = "layers.0.mlp.gate_proj.weight", "layers.1.mlp.gate_proj.weight"
    return {**weights, one: weights[two].renamed(one), two: weights[one].renamed(two)}


# Rungs 3 and 4: the export computes something else for some way of feeding.


def exported(fault: Fault) -> Case:
    """The exportable module, the files and the reference; only the export is wrong."""

    def run(world: World, folder: Path) -> Rung | None:
        return first_red(_exports(world, module=fault, file=fault))

    return run


def lowered(fault: Fault) -> Case:
    """The module is right, its file is not."""

    def run(world: World, folder: Path) -> Rung | None:
        return first_red(_exports(world, module="none", file=fault))

    return run


def _exports(world: World, *, module: Fault, file: Fault) -> LadderInput:
    config, weights = small_model()
    one, two = (
        CachedLlama(weights, config, prefill=(1, 8), fault=fault) for fault in (module, file)
    )
    return LadderInput(
        world.recipe.limits,
        text_ids=world.text(),
        reference=world.reference(),
        exportable=lambda: nullcontext(one),
        float_flatbuffer=lambda: nullcontext(two),
    )


def bound_in_wrong_order(world: World, folder: Path) -> Rung | None:
    """Two layers' constants exchanged while they are written into the real file."""
    rewritten, recipe = world.rewritten, world.recipe
    plain = replace(recipe, quantization=(QuantizationRule("*", "float32"),))
    target = folder / "float32.tflite"
    bind_weights(world.graph.path, rewritten.config, plain, _swapped(rewritten.weights), target)
    model = reference_model(rewritten.config, rewritten.weights)

    def module() -> ExportableRunner:
        return ExportableRunner(rewritten.config, recipe.export, recipe.graph, model.state_dict())

    given = LadderInput(
        recipe.limits,
        text_ids=world.text(),
        reference=ReferenceRunner(model),
        exportable=module,
        float_flatbuffer=lambda: FlatbufferRunner(target),
    )
    return first_red(given)


# Rung 5: too much is lost by quantization.


def quantized(
    granularity: Literal["channel", "tensor"], change: Callable[[Config, Weights], object]
) -> Case:
    """The real int8 file of changed weights against the reference of the unchanged ones."""

    def run(world: World, folder: Path) -> Rung | None:
        target = _bind_changed(world, folder, change, granularity)
        reference = world.reference()
        if granularity == "tensor":  # the change is the model's own, the fault is the rule
            reference = world.reference(open_source(SourceOptions(folder / "changed")))
        given = LadderInput(
            world.recipe.limits,
            text_ids=world.text(),
            reference=reference,
            flatbuffer=lambda: FlatbufferRunner(target),
        )
        return first_red(given)

    return run


def _bind_changed(
    world: World,
    folder: Path,
    change: Callable[[Config, Weights], object],
    granularity: Literal["channel", "tensor"] = "channel",
) -> Path:
    config, weights = small_model()
    change(config, weights)
    source = open_source(SourceOptions(write_checkpoint(folder / "changed", config, weights)))
    recipe = replace(world.recipe, quantization=(QuantizationRule("*", "int8", granularity),))
    rewritten = rewrite_source(source, recipe)
    target = folder / "changed.tflite"
    bind_weights(world.graph.path, rewritten.config, recipe, rewritten.weights, target)
    return target


def four_bits(values: Tensor) -> Tensor:
    scale = values.abs().amax(1, keepdim=True) / 7
    return (values / scale).round() * scale


# Rung 6: the bundle says something else to the runtime than training did.


def prompted(change: Callable[[BundleSpec], BundleSpec], *, chat: bool = False) -> Case:
    """The shared model in a bundle that was written with one wrong word, in the real runtime."""

    def run(world: World, folder: Path) -> Rung | None:
        source = world.chat if chat else world.source
        context = world.recipe.export.context
        right = BundleSpec(world.model, source.tokenizer, source.contract, context)
        target = folder / "prompted.litertlm"
        write_bundle(change(right), target)
        prompt = read_bundle(target).prompt

        def rung_6() -> list[Any]:
            return check_prompt(
                lambda: LiteRtLmRunner(target),
                source.tokenizer,
                source.contract,
                source.suppressed,
                prompt,
                world.recipe.export,
            )

        return first_red(LadderInput(world.recipe.limits, tokenizer_rung=rung_6))

    return run


def contract(**fields: Any) -> Callable[[BundleSpec], BundleSpec]:
    return lambda spec: replace(spec, contract=replace(spec.contract, **fields))


def spaced(spec: BundleSpec) -> BundleSpec:
    template = spec.contract.chat_template
    assert template is not None
    return contract(chat_template=template + "{{ ' ' }}")(spec)


def unadapted(spec: BundleSpec) -> BundleSpec:
    """As it stands in the checkpoint: it adds the content to a string, the runtime has a list."""
    return contract(chat_template=TEMPLATE.replace("{{ bos_token }}", "<s>"))(spec)


def lossy(spec: BundleSpec) -> BundleSpec:
    """The pieces are kept, the merge order is not."""
    from sentencepiece import sentencepiece_model_pb2

    proto = sentencepiece_model_pb2.ModelProto()
    proto.ParseFromString(spec.tokenizer.data)
    for piece in proto.pieces:
        if piece.type == piece.NORMAL:
            piece.score = -1000.0 - piece.score
    data = proto.SerializeToString()
    return replace(spec, tokenizer=SentencePieceTokenizer(data, "rebuilt"))


def other_tokenizer(spec: BundleSpec) -> BundleSpec:
    return replace(spec, tokenizer=SentencePieceTokenizer(train_sentencepiece(), "other"))


# Rung 7: the runtime runs another model than the one that was measured.


def other_model_in_the_runtime(world: World, folder: Path) -> Rung | None:
    other = _bind_changed(world, folder, swap("0.mlp.up_proj", "1.mlp.up_proj"))
    target = folder / "other.litertlm"
    contract = world.source.contract
    write_bundle(BundleSpec(other, world.source.tokenizer, contract, 64), target)
    given = LadderInput(
        world.recipe.limits,
        flatbuffer=lambda: FlatbufferRunner(world.model),
        runtime=lambda: LiteRtLmRunner(target),
        runtime_data=RuntimeData(("the cat",), None, 12, contract.start_token_id, (2,)),
    )
    return first_red(given)


def same(config: Config, weights: Weights) -> None:
    """No change."""


def outliers(config: Config, weights: Weights) -> None:
    """A few large rows, as trained models have them."""
    for layer in range(2):
        weights[f"model.layers.{layer}.mlp.down_proj.weight"][0] *= 40
        weights[f"model.layers.{layer}.self_attn.q_proj.weight"][3] *= 40
    weights["model.embed_tokens.weight"][50] *= 60
