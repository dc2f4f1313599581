"""Entries of a part: what is measured, what the planner says of it, and the file that keeps it."""

from __future__ import annotations

import json
import re
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import record
from benchmarks.roofline import device_name
from mrl.checkpoint.atomic import write_atomically
from mrl.config import ConfigError
from mrl.workers.group import WorkerError

Result = dict[str, Any]
Numbers = Mapping[str, float]  # by quantity, whose name ends in its unit


@dataclass(frozen=True)
class Entry:
    """One measurement."""

    name: str
    check: Callable[[], object]  # raises ConfigError where the model cannot be laid out so
    measure: Callable[[], Result]
    measured: Callable[[Mapping[str, Any]], Numbers]  # of what `measure` gave
    planned: Callable[[], Numbers]  # the same quantities, by the planner


class Kept:
    """The entries of a part in a JSON file, saved after each; one that is done is not repeated."""

    def __init__(self, path: Path) -> None:
        """Read what earlier calls left."""
        self.path = path
        self.entries: dict[str, Result] = json.loads(path.read_text()) if path.exists() else {}

    def lacking(self, entries: Sequence[Entry]) -> list[Entry]:
        """List the entries that are not there, and those that failed."""
        return [e for e in entries if "failed" in self.entries.get(e.name, {"failed": ""})]

    def enter(self, entry: Entry) -> bool:
        """Measure an entry, or note why it is left out or failed; gives whether it is done."""
        start = time.monotonic()
        try:
            entry.check()
            found = entry.measure()
        except ConfigError as error:
            found = {"left_out": _plain("; ".join(map(str, error.violations)))}
        except (WorkerError, ValueError, RuntimeError) as error:
            found = {"failed": _plain(str(error))[-6000:]}
        known = record.environment()
        found["measured_on"] = {
            "device": device_name(known),
            "commit": known["commit"],
            "date": known["date"],
            "wall_s": round(time.monotonic() - start, 1),
        }
        self.entries[entry.name] = found
        write_atomically(self.path, json.dumps(self.entries, indent=1))
        return "failed" not in found


def _plain(text: str) -> str:
    """Leave out the names of temporary folders."""
    return re.sub(rf"{re.escape(tempfile.gettempdir())}/[^/\s]+/", "", text)


def run_entries(kept: Kept, entries: Sequence[Entry], until: float) -> list[str]:
    """Measure what is lacking, starting none after `until` (monotonic); names what is left."""
    lacking = kept.lacking(entries)
    for index, entry in enumerate(lacking):
        if time.monotonic() > until:
            return [late.name for late in lacking[index:]]
        kept.enter(entry)
        print(f"  {entry.name}: {_shown(entry, kept.entries[entry.name])}", flush=True)
    return []


def beside_plan(kept: Kept, entries: Sequence[Entry]) -> dict[str, Any]:
    """Set each quantity's prediction beside its measurement (None where there is none yet)."""
    table = {}
    for entry in entries:
        found = kept.entries.get(entry.name, {"failed": ""})
        if "left_out" in found:
            continue
        try:
            entry.check()
        except ConfigError:
            continue
        planned = entry.planned()
        measured = {} if "failed" in found else entry.measured(found)
        table[entry.name] = {name: _beside(planned[name], measured.get(name)) for name in planned}
    return table


def _beside(planned: float, measured: float | None) -> dict[str, float | None]:
    ratio = planned / measured if measured else None
    return {"planned": planned, "measured": measured, "ratio": ratio}


def _shown(entry: Entry, found: Result) -> str:
    for state in ("left_out", "failed"):
        if state in found:
            return f"{state.replace('_', ' ')}: {found[state][-300:]}"
    numbers = ", ".join(f"{name} {value:.4g}" for name, value in entry.measured(found).items())
    return f"{numbers} ({found['measured_on']['wall_s']:.0f} s in all)"
