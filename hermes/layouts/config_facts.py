"""What a configuration says, each value with the place it was found at."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Facts:
    """Values by Hermes field name, and everything wrong with the configuration.

    Attributes:
        family: spelling of the configuration.
        values: field -> (value, source).
        problems: (word in the configuration, message) of contradictions and malformed values.
        refused: (word in the configuration, message) of maths that Hermes lacks.
        warnings: fields seen and not used.
        window: attention window, if there is one.
    """

    family: str = "huggingface"
    values: dict[str, tuple[object, str]] = field(default_factory=dict)
    problems: list[tuple[str, str]] = field(default_factory=list)
    refused: list[tuple[str, str]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    window: tuple[int, str] | None = None

    def set(self, name: str, value: object, source: str, *, quiet: bool = False) -> None:
        """Record a value; a second, different one is a problem.

        `quiet` values only fill a gap: a null never contradicts a number.
        """
        if name in self.values:
            known, where = self.values[name]
            if known != value and not quiet and known is not None:
                self.problem(name, f"{name} is {known!r} in {where} and {value!r} in {source}")
            if known is not None or quiet:
                return
        self.values[name] = (value, source)

    def problem(self, word: str, message: str) -> None:
        """Record a contradiction or a malformed value."""
        self.problems.append((word, message))

    def refuse(self, word: str, message: str) -> None:
        """Record maths that Hermes does not implement."""
        self.refused.append((word, message))

    def int_value(self, name: str) -> int | None:
        """An integer that was recorded, or None."""
        value = self.values.get(name, (None, ""))[0]
        return value if type(value) is int else None
