"""Names and conventions of training codebases, as tables, and the engine that applies them."""

from hermes.layouts.mapping import MappedModel, map_checkpoint
from hermes.layouts.registry import LAYOUTS

__all__ = ["LAYOUTS", "MappedModel", "map_checkpoint"]
