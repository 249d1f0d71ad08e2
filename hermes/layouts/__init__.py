"""Names and conventions of training codebases, as tables, and the engine that applies them.

A new codebase is one file with one table, listed in `registry.py`, and one oracle test:

    MINE = Layout(
        name="mine",
        title="my trainer",
        rules=decoder_rules(
            embedding="tok", final_norm="out_norm", head="out", layer="blocks.{}.",
            attention_norm="n1", qkv="attn.qkv", o="attn.proj",
            mlp_norm="n2", gate="ff.g", up="ff.u", down="ff.d",
        ),
        pairing="interleaved",
    )

`decoder_rules` writes a rule for every weight and bias; anything it does not cover is a `Rule` with
an operation of `operations.py`. Both directions follow from the table. What only the code knows
goes into `constants`, with a test against the codebase's own formulas: shapes cannot show a wrong
pairing.
"""

from hermes.layouts.mapping import MappedModel, map_checkpoint
from hermes.layouts.registry import LAYOUTS

__all__ = ["LAYOUTS", "MappedModel", "map_checkpoint"]
