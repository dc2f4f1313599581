"""What became of each key that was given, for users of verl and for old configs."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from mrl.config.aliases import VALUE_ALIASES, ignored_items, outcome, rename
from mrl.config.errors import ConfigError, Violation
from mrl.config.load import as_yaml, load_config, written
from mrl.config.outcomes import Ignored, Legacy, Refused

OUTCOMES = ("same", "renamed", "translated", "ignored", "refused")
_PREFIX = "actor_rollout_ref."
_DOTTED = re.compile(r"\w+(?:\.\w+)+|\w+")


@dataclass(frozen=True)
class Explained:
    """One key as it was given and what it came to."""

    given: str
    value: object
    key: str  # today's key, or the settings it stands for; "": none
    outcome: str  # of OUTCOMES; "same" may leave the prefix `actor_rollout_ref` out
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.outcome} {self.given}={as_yaml(self.value)}: {self.reason or self.key}"


def explain(
    path: str | Path | None, overrides: Sequence[str] = (), check: bool = True
) -> list[Explained]:
    """Say of every key of a config and its overrides what it comes to; refuses nothing itself.

    Args:
        check: find what is refused; needless for a config that was loaded.

    What is wrong with a key that was not given (its default does not fit) has a row of its own.
    Raises `ConfigError` for files that cannot be read.
    """
    given = written(path, overrides)
    refusals = [(v, _DOTTED.findall(v.key)) for v in (_find(path, overrides) if check else ())]
    rows, told = [], []
    for spelling, value in given:
        names = (spelling, rename(spelling))
        found = [v for v, keys in refusals if any(name in keys for name in names)]
        told += found
        rows.append(_explain(spelling, value, found))
    return rows + [
        Explained(v.key, v.value, v.key, "refused", _rule(v)) for v, _ in refusals if v not in told
    ]


def tell(rows: Iterable[Explained], reasons: bool = False) -> list[str]:
    """Say in a line what is not as it was given, with `reasons` a line for each ignored key."""
    rows = list(rows)
    counts = Counter(row.outcome for row in rows)
    parts = [f"{counts[name]} {name}" for name in ("renamed", "translated") if counts[name]]
    ignored = [row for row in rows if row.outcome == "ignored"]
    if ignored:
        names = ", ".join(row.given.removeprefix(_PREFIX) for row in ignored)
        parts.append(f"{len(ignored)} ignored" + ("" if reasons else f" ({names})"))
    if not parts:
        return []
    lines = [str(row) for row in ignored] if reasons else []
    return [f"keys: {', '.join(parts)}; mrl plan --explain says more", *lines]


def print_explained(rows: Iterable[Explained], console: Console | None = None) -> None:
    """Print a table of the keys, those that are not as they were given first."""
    table = Table(title="keys as given", title_justify="left", box=box.SIMPLE)
    for name in ("as given", "outcome", "today", "reason"):
        table.add_column(name, overflow="fold", no_wrap=name == "outcome")
    for row in sorted(rows, key=lambda row: -OUTCOMES.index(row.outcome)):
        cells = (f"{row.given}={as_yaml(row.value)}", row.outcome, row.key, row.reason)
        table.add_row(*(Text(cell) for cell in cells))
    (console or Console()).print(table)


def _find(path: str | Path | None, overrides: Sequence[str]) -> tuple[Violation, ...]:
    try:
        load_config(path, overrides)
    except ConfigError as error:
        return error.violations
    return ()


def _rule(violation: Violation) -> str:
    nearest = f"; nearest legal: {violation.nearest}" if violation.nearest else ""
    return violation.rule + nearest


def _explain(spelling: str, value: Any, refusals: Sequence[Violation]) -> Explained:
    key = rename(spelling)
    fate = outcome(key)
    if isinstance(fate, Ignored):
        return Explained(spelling, value, "", "ignored", fate.why)
    if refusals:
        reason = "; ".join(_rule(violation) for violation in refusals)
        return Explained(spelling, value, key, "refused", reason)
    if isinstance(fate, Refused):
        return Explained(spelling, value, "", "same", f"asks for nothing ({fate.why})")
    if isinstance(fate, Legacy):
        return _explain_legacy(spelling, value, fate)
    if items := ignored_items(key, value):
        reason = "; ".join(f"{item}: {why}" for item, why in items.items())
        return Explained(spelling, value, key, "ignored", reason)
    other = VALUE_ALIASES.get(key, {})
    if not isinstance(value, list | dict) and value in other:
        return Explained(spelling, value, f"{key}={as_yaml(other[value])}", "translated")
    same = key == spelling.removeprefix(_PREFIX)
    return Explained(spelling, value, key, "same" if same else "renamed")


def _explain_legacy(spelling: str, value: Any, legacy: Legacy) -> Explained:
    plain = value is None or isinstance(value, bool | int | float | str)
    settings = legacy.settings.get(value, {}) if plain else {}
    if not settings:
        return Explained(spelling, value, "", "same", f"as things are here ({legacy.why})")
    means = ", ".join(f"{key}={as_yaml(setting)}" for key, setting in settings.items())
    return Explained(spelling, value, means, "translated", legacy.why)
