"""What may become of a key that is not in the schema.

It means some of today's settings (`Legacy`), changes nothing here (`Ignored`) or asks for a feature
that is not here (`Refused`). The last two hold for all keys below it as well, unless one of those
has an entry of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Legacy:
    """A key of which only some values mean something here."""

    settings: Mapping[Any, Mapping[str, Any]]  # value -> today's key -> value
    why: str  # told when another value is found
    overrides: bool = False  # wins over today's keys; otherwise they must say the same


@dataclass(frozen=True)
class Ignored:
    """A key that changes nothing here, whatever its value."""

    why: str
    off: tuple[Any, ...] = (None,)  # values that ask for nothing, so that nothing is to be told


@dataclass(frozen=True)
class Refused:
    """A key of a feature that is not here."""

    why: str  # and what to do
    off: tuple[Any, ...] = (None, False, "", [], {})  # values that do not ask for it


Outcome = Legacy | Ignored | Refused


def only(value: Any, why: str) -> Legacy:
    """Allow one value, which is how things are here."""
    return Legacy({value: {}}, why)


def needs(key: str) -> Ignored:
    """Ignore the settings of a feature that is refused where it is asked for."""
    return Ignored(f"has a part only with {key}, which is refused here")
