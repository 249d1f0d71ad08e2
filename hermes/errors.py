"""What can go wrong, as exceptions that know their exit code.

Every message says what was found, what was expected and what to do. The command line prints the
message of a `HermesError` and exits with its code; any other exception is a defect of Hermes.
"""

from __future__ import annotations

from collections.abc import Sequence


class HermesError(Exception):
    """Base of all expected failures.

    Args:
        found: what was seen, with the file, key or field it was seen in.
        expected: what would have been right.
        todo: what the user can do about it.
        problems: several findings of the same stage, printed one a line under `found`.
    """

    exit_code = 1

    def __init__(
        self, found: str, *, expected: str = "", todo: str = "", problems: Sequence[str] = ()
    ) -> None:
        self.found = found
        self.expected = expected
        self.todo = todo
        self.problems = tuple(problems)
        lines = [found, *(f"  - {problem}" for problem in self.problems)]
        if expected:
            lines.append(f"  expected: {expected}")
        if todo:
            lines.append(f"  what to do: {todo}")
        super().__init__("\n".join(lines))


class UsageError(HermesError):
    """The command line or a recipe asks for something that makes no sense."""

    exit_code = 2


class BadInputError(HermesError):
    """A file is missing, damaged, incomplete or contradicts itself."""

    exit_code = 3


class UnsupportedModelError(HermesError):
    """The model computes something that Hermes does not implement."""

    exit_code = 4


class ResourceError(HermesError):
    """Not enough memory, disk or time."""

    exit_code = 5


class VerificationError(HermesError):
    """A rung of the ladder is red."""

    exit_code = 6


class NativeToolError(HermesError):
    """The native converter or runtime died, hung or refused."""

    exit_code = 7


class TargetError(HermesError):
    """The output exists already or another run is writing it."""

    exit_code = 8


class DeviceError(HermesError):
    """A device is missing, refuses, or was lost on the way."""

    exit_code = 9
