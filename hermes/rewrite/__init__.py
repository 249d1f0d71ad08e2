"""Float-exact rewrites: other weights, the same function, easier to quantize."""

from hermes.rewrite.model import RewritableModel, rewrite_model

__all__ = ["RewritableModel", "rewrite_model"]
