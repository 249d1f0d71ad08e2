"""A finished bundle of any exporter as the plain values that the lint rules look at."""

from __future__ import annotations

import mmap
import struct
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from converters.bundle_reader import Bundle, Section, read_bundle, section_bytes
from converters.integrity import check_integrity
from hermes.deploy.lint_facts import (
    BundleFacts,
    ConstantFact,
    SectionFact,
    SignatureFact,
    TensorFact,
    TokenizerFact,
)
from hermes.deploy.prompt_metadata import PromptMetadata
from hermes.errors import BadInputError
from hermes.runners.roles import POSITION_NAMES

_MAIN = "tf_lite_prefill_decode"
_TOKENIZERS = ("SP_Tokenizer", "HF_Tokenizer_Zlib")
_SCATTERS = ("STABLEHLO_SCATTER", "SCATTER_ND")
_PRODUCTS = ("FULLY_CONNECTED", "BATCH_MATMUL")
_READERS = (*_PRODUCTS, "EMBEDDING_LOOKUP", "GATHER")
_CACHE_PATTERN = "{}[._]*cache*"
_Damage = (struct.error, LookupError, TypeError, AttributeError, ValueError)


def describe(path: Path) -> BundleFacts:
    """Everything that lint looks at, from the file alone.

    What cannot be read becomes a fact; only a header that leads nowhere is an error.

    Raises:
        BadInputError: not a bundle.
    """
    integrity = check_integrity(path)
    bundle = read_bundle(path, hashes=False)
    model_problem = ""
    signatures: tuple[SignatureFact, ...] = ()
    constants: tuple[ConstantFact, ...] = ()
    try:
        signatures, constants = _read_model(bundle)
    except BadInputError as error:
        model_problem = error.found
    return BundleFacts(
        name=path.name,
        size=bundle.size,
        version=bundle.version,
        sections=tuple(SectionFact(s.kind, s.offset, s.size, s.entries) for s in bundle.sections),
        damage=integrity.problems,
        digest=integrity.digest or "",
        prompt=_prompt(bundle),
        tokenizers=tuple(
            _tokenizer(bundle, section)
            for section in bundle.sections
            if section.kind in _TOKENIZERS and section.entries.get("model_type", _MAIN) == _MAIN
        ),
        signatures=signatures,
        constants=constants,
        model_problem=model_problem,
        caches=tuple(sorted(found.name for found in path.parent.glob(_pattern(path)))),
    )


def context_of(path: Path) -> int:
    """Tokens that a conversation with the bundle may hold."""
    bundle = read_bundle(path, hashes=False)
    signatures, _ = _read_model(bundle)
    facts = BundleFacts(path.name, 0, (1, 0, 0), (), prompt=_prompt(bundle), signatures=signatures)
    return facts.context


def _pattern(path: Path) -> str:
    name = "".join(f"[{letter}]" if letter in "*?[" else letter for letter in path.name)
    return _CACHE_PATTERN.format(name)


def _prompt(bundle: Bundle) -> PromptMetadata | None:
    if all(section.kind != "LlmMetadataProto" for section in bundle.sections):
        return None
    return bundle.prompt


def _tokenizer(bundle: Bundle, section: Section) -> TokenizerFact:
    try:
        return TokenizerFact(section.kind, section_bytes(bundle, section))
    except BadInputError as error:
        return TokenizerFact(section.kind, problem=error.found)


def _read_model(
    bundle: Bundle,
) -> tuple[tuple[SignatureFact, ...], tuple[ConstantFact, ...]]:
    from ai_edge_litert import schema_py_generated as schema

    section = _main_model(bundle)
    with bundle.path.open("rb") as file:
        # Mapped whole: an mmap offset would have to be page aligned.
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    data = memoryview(mapped)[section.offset : section.offset + section.size]
    try:
        graph = _Graph(schema.Model.GetRootAs(data, 0), schema)
        return tuple(graph.signatures()), tuple(graph.constants())
    except _Damage as error:
        raise BadInputError(f"{bundle.path}: damaged model section: {error}") from error


def _main_model(bundle: Bundle) -> Section:
    """The language model itself: other exporters add embedders and encoders beside it."""
    models = [section for section in bundle.sections if section.kind == "TFLiteModel"]
    main = [section for section in models if section.entries.get("model_type") == _MAIN]
    return main[0] if main else bundle.section("TFLiteModel")


class _Graph:
    """The flatbuffer as the generated reader shows it."""

    def __init__(self, model: Any, schema: Any) -> None:
        self.model = model
        self._types = _names(schema.TensorType)
        operators = _names(schema.BuiltinOperator)
        self._codes = [
            operators.get(max(code.BuiltinCode(), code.DeprecatedBuiltinCode()), "unknown")
            for code in map(model.OperatorCodes, range(model.OperatorCodesLength()))
        ]

    def signatures(self) -> Iterator[SignatureFact]:
        """What the runtime may call."""
        for index in range(self.model.SignatureDefsLength()):
            signature = self.model.SignatureDefs(index)
            graph = self.model.Subgraphs(signature.SubgraphIndex())
            inputs = [signature.Inputs(i) for i in range(signature.InputsLength())]
            outputs = [signature.Outputs(i) for i in range(signature.OutputsLength())]
            read = tuple(self._tensor(graph, entry) for entry in inputs)
            written = tuple(self._tensor(graph, entry) for entry in outputs)
            shapes = {tensor.shape for tensor in (*read, *written) if tensor.is_cache}
            names: Counter[str] = Counter()
            scatters = 0
            for name, operator in self._operators(graph):
                names[name] += 1
                target = graph.Tensors(operator.Outputs(0)) if operator.OutputsLength() else None
                if name in _SCATTERS and target is not None and _shape(target) in shapes:
                    scatters += 1
            yield SignatureFact(
                signature.SignatureKey().decode(), read, written, dict(names), scatters
            )

    def constants(self) -> Iterator[ConstantFact]:
        """Matrices, each buffer once, with the operator that reads it.

        Of a table that is looked up and multiplied with it is the product, which packs it.
        """
        found: dict[int, ConstantFact] = {}
        for graph in map(self.model.Subgraphs, range(self.model.SubgraphsLength())):
            positions = self._positions(graph)
            stored = self._stored_small(graph)
            for name, operator in self._operators(graph):
                if name not in _READERS:
                    continue
                reads = [operator.Inputs(i) for i in range(operator.InputsLength())]
                for number in reads:
                    tensor = graph.Tensors(stored.get(number, number)) if number >= 0 else None
                    if tensor is None or tensor.ShapeLength() < 2:
                        continue
                    known = found.get(tensor.Buffer())
                    if known is None:
                        by_position = bool(positions.intersection(reads))
                        fact = self._constant(tensor, name, by_position, number in stored)
                        if fact is not None:
                            found[tensor.Buffer()] = fact
                    elif name in _PRODUCTS:
                        found[tensor.Buffer()] = replace(
                            known, operator=name, unpacked=number in stored
                        )
        yield from found.values()

    def _stored_small(self, graph: Any) -> dict[int, int]:
        """Float tensor -> the constant that DEQUANTIZE makes it of, once, when the model loads."""
        return {
            operator.Outputs(0): operator.Inputs(0)
            for name, operator in self._operators(graph)
            if name == "DEQUANTIZE" and operator.InputsLength() and operator.OutputsLength()
        }

    def _constant(
        self, tensor: Any, operator: str, by_position: bool, unpacked: bool
    ) -> ConstantFact | None:
        size = _stored_bytes(self.model.Buffers(tensor.Buffer()))
        scales = tensor.Quantization()
        if not size:
            return None
        return ConstantFact(
            name=tensor.Name().decode(errors="replace"),
            operator=operator,
            dtype=self._types[tensor.Type()],
            shape=_shape(tensor),
            size=size,
            scales=0 if scales is None else scales.ScaleLength(),
            by_position=by_position,
            unpacked=unpacked,
        )

    def _operators(self, graph: Any) -> Iterator[tuple[str, Any]]:
        for index in range(graph.OperatorsLength()):
            operator = graph.Operators(index)
            yield self._codes[operator.OpcodeIndex()], operator

    def _tensor(self, graph: Any, entry: Any) -> TensorFact:
        tensor = graph.Tensors(entry.TensorIndex())
        return TensorFact(entry.Name().decode(), self._types[tensor.Type()], _shape(tensor))

    def _positions(self, graph: Any) -> set[int]:
        """Integer tensors that follow from the positions; operators are in execution order."""
        found: set[int] = set()
        for index in range(self.model.SignatureDefsLength()):
            signature = self.model.SignatureDefs(index)
            if self.model.Subgraphs(signature.SubgraphIndex())._tab.Pos != graph._tab.Pos:
                continue
            entries = [signature.Inputs(i) for i in range(signature.InputsLength())]
            found |= {e.TensorIndex() for e in entries if e.Name().decode() in POSITION_NAMES}
        for _, operator in self._operators(graph):
            reads = {operator.Inputs(i) for i in range(operator.InputsLength())}
            if found & reads:
                writes = [operator.Outputs(i) for i in range(operator.OutputsLength())]
                found |= {i for i in writes if self._is_integer(graph.Tensors(i))}
        return found

    def _is_integer(self, tensor: Any) -> bool:
        return self._types[tensor.Type()] in ("int32", "int64")


def _names(enumeration: type) -> dict[int, str]:
    lower = enumeration.__name__ == "TensorType"
    return {
        value: name.lower() if lower else name
        for name, value in vars(enumeration).items()
        if isinstance(value, int)
    }


def _shape(tensor: Any) -> tuple[int, ...]:
    """The shape, with -1 where the signature leaves it open."""
    fixed = [tensor.Shape(axis) for axis in range(tensor.ShapeLength())]
    given = [tensor.ShapeSignature(axis) for axis in range(tensor.ShapeSignatureLength())]
    open_axes = given if len(given) == len(fixed) else fixed
    return tuple(-1 if sign < 0 else size for size, sign in zip(fixed, open_axes, strict=True))


def _stored_bytes(buffer: Any) -> int:
    # Big constants lie behind the flatbuffer: offset and size instead of data.
    return int(buffer.Size()) if buffer.Offset() > 1 else int(buffer.DataLength())
