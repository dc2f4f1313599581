"""What became of each key that was given, for users of verl and for old configs."""

from __future__ import annotations

import os
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import wrap
from typing import Any

from rich.console import Console
from rich.text import Text

from mrl.config.aliases import VALUE_ALIASES, ignored_items, outcome, rename
from mrl.config.errors import ConfigError, Violation
from mrl.config.load import as_yaml, load_config, written
from mrl.config.outcomes import Ignored, Legacy, Refused
from mrl.config.schema import Config
from mrl.config.secrets import masked

# With what each means, in the order in which they are printed.
OUTCOMES = {
    "refused": "asks for what is not here; the run does not start",
    "ignored": "changes nothing here",
    "translated": "stands for other settings here",
    "renamed": "has another name here",
    "same": "is as it was given",
}
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
        return masked(
            f"{self.outcome} {self.given}={as_yaml(self.value)}: {self.reason or self.key}"
        )

    @property
    def setting(self) -> str:
        """Write it as an override, without the prefix that every actor key of verl has."""
        return masked(f"{self.given.removeprefix(_PREFIX)}={as_yaml(self.value)}")


def load_told(
    path: str | Path | None, overrides: Sequence[str] = (), reasons: bool = False
) -> Config:
    """Load a config as `load_config` does and say on stderr which keys are not as given.

    Every command that takes a config loads it here. Only rank 0 of a launcher speaks; with
    `reasons` each ignored key has a line of its own.
    """
    config = load_config(path, overrides)
    if os.environ.get("RANK", "0") == "0":
        for line in tell(explain(path, overrides, check=False), reasons):
            print(line, file=sys.stderr)
    return config


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
    """Print the keys by what becomes of them, the refused first, equal reasons once."""
    console = console or Console()
    by_outcome: dict[str, list[Explained]] = defaultdict(list)
    for row in rows:
        by_outcome[row.outcome].append(row)
    counts = ", ".join(f"{len(by_outcome[name])} {name}" for name in OUTCOMES if by_outcome[name])
    console.print(Text(f"keys as given (without {_PREFIX}): {counts}", style="bold"))
    for name, meaning in OUTCOMES.items():
        found = by_outcome[name]
        if not found:
            continue
        console.print(Text.assemble((f"\n{name}", "bold"), f": {meaning}"))
        for text, indent in _same(found) if name == "same" else _lines(found):
            # a long key goes past the edge rather than break: it is there to be copied
            lines = wrap(
                text, console.width - indent, break_long_words=False, break_on_hyphens=False
            )
            for line in lines:
                console.print(Text(" " * indent + line), soft_wrap=True)


def _same(rows: Sequence[Explained]) -> Iterator[tuple[str, int]]:
    """Name the keys that are as given, then those that are so whatever a config says."""
    plain = [row for row in rows if not row.reason]
    if plain:
        yield " ".join(row.setting for row in plain), 2
    yield from _lines([row for row in rows if row.reason])


def _lines(rows: Sequence[Explained]) -> Iterator[tuple[str, int]]:
    """Give (text, indentation): settings with an arrow, or a reason below all that share it."""
    by_reason: dict[str, list[str]] = defaultdict(list)
    for row in rows:
        if row.reason:
            by_reason[row.reason].append(row.setting)
        else:
            yield f"{row.setting} -> {row.key}", 2
    for reason, settings in by_reason.items():
        yield from ((setting, 2) for setting in settings)
        yield reason, 6


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
        if value in fate.off:
            return Explained(spelling, value, "", "same", "off, as always here")
        return Explained(spelling, value, "", "ignored", fate.why)
    if refusals:
        reason = "; ".join(_rule(violation) for violation in refusals)
        return Explained(spelling, value, key, "refused", reason)
    if isinstance(fate, Refused):
        return Explained(spelling, value, "", "same", "off, as always here")
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
    if settings:
        means = " ".join(f"{key}={as_yaml(setting)}" for key, setting in settings.items())
        return Explained(spelling, value, means, "translated")
    always = not any(legacy.settings.values())
    reason = f"always so here: {legacy.why}" if always else "sets nothing"
    return Explained(spelling, value, "", "same", reason)
