"""Commands for a finished bundle: is it whole, will it work, talk to it, load it in an app."""

from __future__ import annotations

import json

from hermes.cli.application import AsJson, BundleFile, Debug, app


@app.command()
def check(bundle: BundleFile, as_json: AsJson = False, debug: Debug = False) -> None:
    """Compare every byte of a bundle with the hashes it carries; needs no checkpoint."""
    from converters.integrity import check_integrity, check_readable
    from hermes.deploy.card import check_lines, demand_card, read_card

    found = check_integrity(bundle).demand()
    if not found.proven:
        check_readable(bundle)
    card = read_card(bundle)
    demand_card(bundle, card, found.digest)
    facts = found.facts(card)
    print(json.dumps(facts) if as_json else "\n".join(check_lines(facts)))
