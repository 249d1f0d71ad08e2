"""Float-exact rewrites: other weights, the same function, easier to quantize."""

from hermes.rewrite.fold import fold_norm_gains
from hermes.rewrite.model import RewritableModel, rewrite_model
from hermes.rewrite.rotate import rotate_residual

__all__ = ["RewritableModel", "fold_norm_gains", "rewrite_model", "rotate_residual"]
