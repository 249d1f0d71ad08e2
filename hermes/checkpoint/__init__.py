"""Checkpoint files of every container kind, opened lazily and without running anything in them."""

from hermes.checkpoint.opening import open_checkpoint
from hermes.checkpoint.source import Checkpoint, LazyTensor

__all__ = ["Checkpoint", "LazyTensor", "open_checkpoint"]
