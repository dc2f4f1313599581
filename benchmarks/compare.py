"""Compare two records of a benchmark, figure by figure: the older one is the baseline.

mrl bench compare OLD.json NEW.json
mrl bench compare NEW.json              against the committed file of that name
mrl bench compare A B --across          although hardware, versions or sizes differ

Ends with 1 when a figure's median is worse than the baseline's by more than --limit percent.
"""

from __future__ import annotations

import argparse
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.figures import Figure, Record
from benchmarks.record import RESULTS, ROOT

_LIMIT = 5.0  # percent
_WIDE = 200  # columns where nobody looks


@dataclass(frozen=True, slots=True)
class Change:
    """A figure of both records."""

    old: Figure
    new: Figure

    @property
    def gain(self) -> float:
        """Give how many times better the new one is."""
        return self.new.gain(self.old)

    @property
    def overlaps(self) -> bool:
        """Say whether the repeats of both meet: the change may be noise."""
        return self.old.min <= self.new.max and self.new.min <= self.old.max

    def is_regression(self, limit: float) -> bool:
        """Say whether it is worse by more than a part `limit` of the older value."""
        loss = 1 / self.gain - 1 if self.gain else float("inf")
        loss = 1 - self.gain if self.new.better == "higher" else loss
        return loss > limit


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two records side by side."""

    changes: tuple[Change, ...]
    lost: tuple[str, ...]  # figures of the baseline that were not measured again
    added: tuple[str, ...]

    @classmethod
    def of(cls, old: Record, new: Record) -> Comparison:
        """Match figures by name. Raises ValueError where none match."""
        before = {figure.name: figure for figure in old.figures}
        after = {figure.name: figure for figure in new.figures}
        both = [name for name in before if name in after]
        if not both:
            raise ValueError(f"{old.name} and {new.name} have no figure in common")
        for name in both:
            kinds = [(f.unit, f.better) for f in (before[name], after[name])]
            if kinds[0] != kinds[1]:
                raise ValueError(f"{name} is in {kinds[0]} in {old.name}, in {kinds[1]} in the new")
        return cls(
            tuple(Change(before[name], after[name]) for name in both),
            tuple(name for name in before if name not in after),
            tuple(name for name in after if name not in before),
        )

    def regressions(self, limit: float) -> list[Change]:
        """List what is worse by more than a part `limit`."""
        return [change for change in self.changes if change.is_regression(limit)]


def differences(old: Record, new: Record) -> Iterator[str]:
    """Say what makes a comparison unfair: other hardware, versions or sizes of the run."""
    for what, a, b in (
        ("hardware", old.hardware, new.hardware),
        ("driver", *(_drivers(record) for record in (old, new))),
        ("smoke", *(bool(record.result.get("smoke")) for record in (old, new))),
    ):
        if a != b:
            yield f"{what}: {a} against {b}"
    before, after = (record.environment["versions"] for record in (old, new))
    for package in sorted({*before, *after}):
        if before.get(package) != after.get(package):
            yield f"{package}: {before.get(package, 'none')} against {after.get(package, 'none')}"


def _drivers(record: Record) -> Any:
    return sorted({gpu["driver_version"] for gpu in record.environment["gpus"]})


def baseline_of(path: Path) -> Record:
    """Read the committed record of a file's name. Raises ValueError where there is none."""
    name = (RESULTS / path.name).relative_to(ROOT).as_posix()
    command = ["git", "show", f"HEAD:{name}"]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if shown.returncode == 0:
        return Record.parse(shown.stdout, f"the committed {name}")
    if (RESULTS / path.name).is_file() and path.resolve() != RESULTS / path.name:
        return Record.read(RESULTS / path.name)  # a copy of the tree without git
    known = ", ".join(sorted(file.name for file in RESULTS.glob("*.json")))
    raise ValueError(f"no committed {name}; give OLD.json and NEW.json. There are: {known}")


def show(comparison: Comparison, limit: float, console: Console) -> None:
    """Print a row a figure."""
    table = Table("figure", "old", "new", "unit", "new / old", "", "repeats")
    for change in comparison.changes:
        old, new = change.old, change.new
        ratio = f"{new.value / old.value:.3f}" if old.value else "-"
        table.add_row(
            old.name, _value(old), _value(new), new.unit, ratio, _verdict(change, limit),
            f"{old.repeats}, {new.repeats}",
        )  # fmt: skip
    console.print(table)
    for kind, names in (("not measured again", comparison.lost), ("new", comparison.added)):
        if names:
            console.print(f"{kind}: {', '.join(names)}")


def _value(figure: Figure) -> str:
    return f"{figure.value:.4g} ({figure.min:.4g} to {figure.max:.4g})"


def _verdict(change: Change, limit: float) -> str:
    noise = ", spreads meet" if change.overlaps else ""
    if change.is_regression(limit):
        return f"[red]worse{noise}[/red]"
    return f"[green]better{noise}[/green]" if change.gain > 1 + limit else "alike"


def main(args: Sequence[str], console: Console | None = None) -> int:
    """Compare; gives the exit status. Raises ValueError for records that are not comparable."""
    parser = argparse.ArgumentParser(
        prog="mrl bench compare",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE.json")
    parser.add_argument(
        "--limit", type=float, default=_LIMIT, metavar="PERCENT", help="default %(default)s"
    )
    parser.add_argument("--across", action="store_true", help="hardware or versions may differ")
    options = parser.parse_args(list(args))
    if len(options.files) > 2:
        parser.error(f"expected OLD.json NEW.json, got {len(options.files)} files")
    new = Record.read(options.files[-1])
    old = (
        Record.read(options.files[0]) if len(options.files) == 2 else baseline_of(options.files[0])
    )
    found = Comparison.of(old, new)
    console = console or Console()
    if not console.is_terminal:
        console.width = max(console.width, _WIDE)
    if unlike := list(differences(old, new)):
        told = "; ".join(unlike)
        if not options.across:
            raise ValueError(f"not comparable: {told}. --across compares all the same")
        console.print(f"[yellow]not alike: {told}[/yellow]")
    show(found, options.limit / 100, console)
    worse = found.regressions(options.limit / 100)
    console.print(f"{len(worse)} of {len(found.changes)} figures worse by over {options.limit:g} %")
    return 1 if worse else 0
