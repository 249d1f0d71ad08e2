"""Let LiteRT-LM itself answer with a bundle: continue a raw text, or reply to a chat message."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from hermes.errors import HermesError
from hermes.runners.litert_lm import LiteRtLmRunner


def main(arguments: list[str] | None = None) -> int:
    """Print the prompt and what the runtime makes of it, greedily."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundle", type=Path)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--continue", dest="text", help=r"raw text to continue; \n is a line break")
    what.add_argument("--chat", dest="message", help="user message for the bundle's chat template")
    parser.add_argument("--tokens", type=int, default=64, help="at most this many new tokens")
    given = parser.parse_args(arguments)
    try:
        with LiteRtLmRunner(given.bundle, threads=2) as runtime:
            if given.text is not None:
                text = given.text.replace(r"\n", "\n")
                print(text + runtime.generate(text, given.tokens).text)
            else:
                (turn,) = runtime.chat([given.message], given.tokens)
                print(f"> {given.message}\n{turn.generation.text}")
    except HermesError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
