"""Convert a training checkpoint into a .litertlm bundle: the same as `hermes convert`."""

from __future__ import annotations

import sys

from hermes.cli import main

if __name__ == "__main__":
    main(["convert", *sys.argv[1:]])
