"""`python -m hermes.cli`."""

from hermes.cli import main

if __name__ == "__main__":
    main()
