"""Verify a finished bundle against the checkpoint it was made from."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

from converters.bundle import Bundle, read_bundle
from converters.float_models import available_memory, held_in_memory, too_big_for_float
from converters.inspection import read_signatures
from converters.machine import describe_machine
from converters.pipeline import RECIPE_KEY, RECIPE_TEXT_KEY, describe_source
from converters.proof import ProofOptions, prove
from converters.source import Source, SourceOptions, open_source, rewrite_source
from hermes.errors import BadInputError, NativeToolError
from hermes.progress import OnProgress, Progress, silent
from hermes.recipe import ExportShapes, Recipe
from hermes.recipe_file import load_recipe, read_recipe_text, recipe_names
from hermes.report.check import Report
from hermes.rewrite import RewritableModel
from hermes.runners.interpreters import interpreter_for
from hermes.runners.roles import decode_roles, prefill_roles


def verify_bundle(
    bundle: Path,
    options: SourceOptions,
    recipe: str | None,
    proof: ProofOptions,
    on_progress: OnProgress = silent,
) -> tuple[Report, NativeToolError | None]:
    """Climb the ladder with a bundle that may come from anywhere.

    What another exporter has made is judged by what it does: its graph is not compared with ours.

    Args:
        bundle: the .litertlm file.
        options: the checkpoint.
        recipe: whose limits to hold; the bundle's own recipe if None, `int8` if it has none.
        proof: texts and threads.
        on_progress: told what is running.

    Returns:
        The report, and the death of a native library if there was one.
    """
    interpreter_for(proof.runtime)
    on_progress(Progress("opening bundle and checkpoint"))
    opened = read_bundle(bundle)
    source = _held(open_source(options), proof.memory)
    chosen, ours = _recipe_of(opened, recipe), RECIPE_KEY in opened.metadata
    rewritten = RewritableModel(source.mapped.config, source.mapped.weights)
    if ours:
        rewritten = rewrite_source(source, chosen)
    with tempfile.TemporaryDirectory(prefix="hermes-verify-") as folder:
        work = Path(folder)
        outcome = prove(source, rewritten, chosen, bundle, work, proof, on_progress, ours=ours)
    sections = [
        {"kind": section.kind, "size": section.size, "sha256": section.sha256}
        for section in opened.sections
    ]
    outcome.report.facts.update(
        describe_source(source),
        recipe=chosen.to_dict(),
        bundle={"path": str(bundle), "bytes": opened.size, "sections": sections},
        machine=describe_machine(),
    )
    return outcome.report, outcome.died


def _held(source: Source, memory: int | None) -> Source:
    """With its weights kept in memory once they are read, where there is room for one more copy."""
    mapped, free = source.mapped, available_memory() if memory is None else memory
    if too_big_for_float(mapped.config, free // 2):
        return source
    return replace(source, mapped=replace(mapped, weights=held_in_memory(mapped.weights)))


def _recipe_of(bundle: Bundle, name: str | None) -> Recipe:
    """The recipe with the shapes that the bundle really has."""
    named, text = bundle.metadata.get(RECIPE_KEY), bundle.metadata.get(RECIPE_TEXT_KEY)
    if text is not None:
        recipe = read_recipe_text(str(text), f"{bundle.path}: {RECIPE_TEXT_KEY}")
        if name is not None:
            recipe = replace(recipe, limits=load_recipe(name).limits)
    else:
        recipe = load_recipe(name or (str(named) if named in recipe_names() else "int8"))
    signatures = read_signatures(bundle)
    decode, prefill = decode_roles(signatures, str(bundle.path)), prefill_roles(signatures)
    if not prefill:
        raise BadInputError(f"{bundle.path}: no prefill signature", expected="at least one")
    lengths = tuple(roles.length for roles in prefill)
    return replace(recipe, export=ExportShapes(decode.capacity, lengths))
