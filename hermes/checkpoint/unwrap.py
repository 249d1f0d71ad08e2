"""From the object a training script saved to one set of named tensors and its configuration."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from hermes.checkpoint.plain import MODEL_FIELDS, module_entries, plain_value
from hermes.checkpoint.prefixes import strip_wrappers
from hermes.checkpoint.source import LazyTensor
from hermes.checkpoint.tensor_pickle import ForeignObject, PickledTensor
from hermes.checkpoint.torch_tensors import MakeTensor
from hermes.errors import BadInputError, UnsupportedModelError

_MAX_DEPTH = 6
_TRAINING_STATE = re.compile(
    r"(optim|opt$|opt_state|(lr_)?sched|(grad_)?scaler|amp|rng|random|callbacks?$|loops?$"
    r"|sampler|(train|data)_?loader|native_amp)",
    re.IGNORECASE,
)
_AVERAGED = re.compile(r"(^|[_.-])(ema|swa|averaged?|shadow)([_.-]|\d|$)", re.IGNORECASE)
_USUAL_NAMES = ("", "state_dict", "model_state_dict", "model", "module", "weights", "params")
_CONFIG_NAMES = (
    "hermes_config",
    # Before `config`, which in nanoGPT-style scripts holds all settings of the training run.
    "model_config",
    "model_args",
    "config",
    "cfg",
    "args",
    "hparams",
    "hyper_parameters",
    "hyperparameters",
)


@dataclass
class Unwrapped:
    """One set of weights with everything that was decided on the way."""

    tensors: dict[str, LazyTensor]
    config: Mapping[str, object] | None = None
    config_origin: str = ""
    adapter: Mapping[str, object] | None = None
    ignored: list[tuple[str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass
class _WeightSet:
    path: tuple[str, ...]
    tensors: dict[str, PickledTensor]

    @property
    def name(self) -> str:
        return ".".join(self.path) or "the file's top level"

    @property
    def averaged(self) -> bool:
        return any(_AVERAGED.search(part) for part in self.path)


def unwrap(tree: object, make: MakeTensor, origin: str, weights: str | None) -> Unwrapped:
    """Find the weights in a saved object.

    Raises:
        BadInputError: no weights, several sets of which none is the obvious one, a set asked for
            that is not there, or colliding names.
        UnsupportedModelError: quantized tensors.
    """
    result = Unwrapped({})
    walk = _Walk(result.ignored)
    root = walk.enter(tree)
    if root is None:
        raise BadInputError(
            f"{origin}: holds a {type(tree).__name__}, not a dict of tensors",
            expected="a state_dict, alone or inside a dict",
            todo="save model.state_dict()",
        )
    sets = [part for found in walk.weight_sets(root, ()) for part in _split_averaged(found)]
    chosen = _choose(sets, origin, weights, result)
    lazy = {name: make(name, tensor) for name, tensor in chosen.tensors.items()}
    result.tensors, equal, notes = strip_wrappers(lazy)
    result.ignored += equal
    result.notes += walk.notes + notes
    result.config, result.config_origin = _find_config(root, chosen.path, origin)
    result.adapter = _find_adapter(root)
    return result


@dataclass
class _Walk:
    """Visits every container once; a pickle may be a graph that refers to itself."""

    ignored: list[tuple[str, str]]
    notes: list[str] = field(default_factory=list)
    seen: set[int] = field(default_factory=set)

    def enter(self, node: object) -> Mapping[object, object] | None:
        if isinstance(node, ForeignObject):
            entries = module_entries(node)
            if entries is not None:
                self.notes.append(
                    f"weights read from a pickled {node.class_name}; its code was not run"
                )
            return entries
        return node if isinstance(node, Mapping) else None

    def weight_sets(
        self, node: Mapping[object, object], path: tuple[str, ...]
    ) -> Iterator[_WeightSet]:
        if id(node) in self.seen or len(path) > _MAX_DEPTH:
            return
        self.seen.add(id(node))
        tensors: dict[str, PickledTensor] = {}
        others: list[tuple[str, object]] = []
        for key, value in node.items():
            if isinstance(value, PickledTensor):
                tensors[str(key)] = value
            else:
                others.append((str(key), value))
        is_set = any(tensor.shape for tensor in tensors.values())
        if is_set:
            yield _WeightSet(path, tensors)
        else:
            self.ignored += [(".".join((*path, key)), "a counter") for key in tensors]
        for key, value in others:
            yield from self._child(key, value, path, is_set)

    def _child(
        self, key: str, value: object, path: tuple[str, ...], in_set: bool
    ) -> Iterator[_WeightSet]:
        name = ".".join((*path, key))
        if isinstance(value, ForeignObject) and "tensor" in value.class_name.lower():
            raise _odd_tensor(name, value)
        child = self.enter(value)
        if _TRAINING_STATE.match(key):
            self.ignored.append((name, "training state, not weights"))
        elif child is not None:
            yield from self.weight_sets(child, (*path, key))
        elif in_set and not isinstance(value, (list, tuple)):
            self.ignored.append((name, f"{type(value).__name__}, not a tensor"))
        elif isinstance(value, (list, tuple)) and any(
            isinstance(item, PickledTensor) for item in value
        ):
            self.ignored.append((name, "a list of tensors without names"))


def _odd_tensor(name: str, value: ForeignObject) -> Exception:
    if "qtensor" in value.class_name:
        return UnsupportedModelError(
            f"{name}: already quantized ({value.class_name})",
            expected="float weights",
            todo="save the model before quantization; Hermes quantizes by its recipe",
        )
    return BadInputError(
        f"{name}: a {value.class_name}, not a plain tensor",
        expected="full, unsharded tensors",
        todo="gather the full state_dict where the model was trained, then save it",
    )


def _split_averaged(found: _WeightSet) -> list[_WeightSet]:
    """Averaged copies that lie in the same dict under a prefix such as `ema_model.`."""
    groups: dict[str, dict[str, PickledTensor]] = {}
    for name, tensor in found.tensors.items():
        root, _, rest = name.partition(".")
        group = root if rest and _AVERAGED.search(root) else ""
        groups.setdefault(group, {})[name.removeprefix(f"{group}.")] = tensor
    return [
        _WeightSet((*found.path, group) if group else found.path, tensors)
        for group, tensors in groups.items()
    ]


def _choose(
    sets: list[_WeightSet], origin: str, weights: str | None, result: Unwrapped
) -> _WeightSet:
    if not sets:
        raise BadInputError(
            f"{origin}: no weights in it",
            expected="a dict of named tensors",
            todo="save model.state_dict()",
        )
    fitting = _named(sets, weights) if weights else _obvious(sets)
    listing = [f"{found.name}: {len(found.tensors)} tensors" for found in sets]
    if len(fitting) != 1:
        wanted = f"a set called {weights!r}" if weights else "one set of weights"
        raise BadInputError(
            f"{origin}: {len(sets)} sets of weights, {wanted} cannot be told",
            problems=listing,
            todo="choose one by name with --weights NAME",
        )
    chosen = fitting[0]
    if len(sets) > 1:
        result.notes.append(f"weights used: {chosen.name}; choose another with --weights NAME")
        reason = f"another set of weights; {chosen.name} was used"
        result.ignored += [(found.name, reason) for found in sets if found is not chosen]
    return chosen


def _named(sets: list[_WeightSet], weights: str) -> list[_WeightSet]:
    exact = [found for found in sets if weights in (found.name, *found.path[-1:])]
    if exact:
        return exact
    if weights == "raw":
        return _obvious([found for found in sets if not found.averaged])
    return [found for found in sets if weights == "ema" and found.averaged]


def _obvious(sets: list[_WeightSet]) -> list[_WeightSet]:
    if len(sets) == 1:
        return sets
    raw = [found for found in sets if not found.averaged]
    if len(raw) == 1:
        return raw
    return [found for found in raw if (found.path or ("",))[-1] in _USUAL_NAMES]


def _find_config(
    root: Mapping[object, object], path: tuple[str, ...], origin: str
) -> tuple[Mapping[str, object] | None, str]:
    """The model configuration saved beside the weights, nearest container first."""
    nodes: list[Mapping[object, object]] = [root]
    for part in path:
        child = nodes[-1].get(part)
        if isinstance(child, Mapping):
            nodes.append(child)
    for depth, node in reversed(list(enumerate(nodes))):
        for name in _CONFIG_NAMES:
            value = plain_value(node.get(name))
            where = f"{origin}: " + ".".join((*path[:depth], name))
            for candidate, label in _nested(value, where):
                if MODEL_FIELDS & candidate.keys():
                    return candidate, label
    own = {str(key): plain_value(value) for key, value in root.items()}
    flat = {key: value for key, value in own.items() if isinstance(value, (int, float, str, bool))}
    if len(MODEL_FIELDS & flat.keys()) > 2:
        return flat, f"{origin}: top level"
    return None, ""


def _nested(value: object, where: str) -> Iterator[tuple[dict[str, object], str]]:
    if isinstance(value, dict):
        yield value, where
        for key, inner in value.items():
            if isinstance(inner, dict):
                yield inner, f"{where}.{key}"


def _find_adapter(root: Mapping[object, object]) -> Mapping[str, object] | None:
    """A LoRA configuration saved in the same file, as PEFT names it."""
    for name in ("peft_config", "lora_config", "adapter_config"):
        for candidate, _ in _nested(plain_value(root.get(name)), name):
            if "lora_alpha" in candidate:
                return candidate
    return None
