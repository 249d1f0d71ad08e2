"""Hermes: from a training checkpoint to a checked LiteRT-LM bundle."""

__version__ = "0.1.0"
