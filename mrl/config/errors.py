"""What is wrong with a config, all of it at once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from mrl.config.secrets import masked


@dataclass(frozen=True)
class Violation:
    """One broken rule."""

    key: str  # dotted; several keys that share the value are joined with " and "
    value: object  # as found
    rule: str
    nearest: str = ""  # the nearest legal value or spelling

    def __str__(self) -> str:
        text = f"{self.key} = {self.value!r}: {self.rule}"
        return masked(f"{text}; nearest legal: {self.nearest}" if self.nearest else text)


class ConfigError(ValueError):
    """Raised with every violation found, not only the first."""

    def __init__(self, violations: Iterable[Violation]) -> None:
        self.violations = tuple(violations)
        count = len(self.violations)
        head = "config refused: " if count == 1 else f"config refused, {count} violations:"
        lines = [str(v) for v in self.violations]
        super().__init__(head + lines[0] if count == 1 else "\n  ".join([head, *lines]))

    def __reduce__(self) -> tuple[type[ConfigError], tuple[tuple[Violation, ...]]]:
        return type(self), (self.violations,)


def raise_any(violations: Iterable[Violation]) -> None:
    """Raise `ConfigError` when there is at least one violation."""
    found = tuple(violations)
    if found:
        raise ConfigError(found)
