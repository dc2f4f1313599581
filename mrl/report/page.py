"""The report: one HTML file without anything to load."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import jinja2
from markupsafe import Markup, escape

from mrl.checkpoint.atomic import write_atomically
from mrl.config.load import as_yaml
from mrl.config.secrets import masked
from mrl.report.figures import Drawn, Phase, Timeline, drawn_figures, timeline
from mrl.report.planned import Compared, Expectation, arithmetic, expectation, seconds
from mrl.report.read import Run, changed, default_of, read_runs
from mrl.report.samples import FULL_GAP, Shown, samples
from mrl.report.svg import number, spark
from mrl.tracking.contract import metric_of
from mrl.tracking.findings import Finding
from mrl.tracking.status import FAILED, RUNNING, STOPPED

_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")  # of model output: not HTML
_ABSENT = "-"
_UNUSED = 1e-4  # of the time: a phase below it was only asked whether it has work


def write_report(folders: Sequence[Path], out: Path) -> tuple[Finding, ...]:
    """Write the report of a run, or of several in one; gives the warnings of all.

    Raises FileNotFoundError for a folder that is no run folder.
    """
    runs = read_runs(folders)
    text = _CONTROL.sub("\ufffd", _template().render(page=_Page.of(runs)))
    # a lone surrogate of model output has no UTF-8
    write_atomically(out, text.encode("utf-8", "replace").decode("utf-8"))
    return tuple(finding for run in runs for finding in run.findings)


def report_finished(folder: Path) -> None:
    """Write `report.html` of a run that has just ended and print its warnings; never raises."""
    try:
        out = folder / "report.html"
        for finding in write_report([folder], out):
            print(f"warning: {finding}")
        print(f"report: {out}")
    except Exception as error:  # process edge: the run is over and has succeeded
        print(f"no report of {folder}: {type(error).__name__}: {error}")


@dataclass(frozen=True, slots=True)
class Tile:
    """A number that is looked at first."""

    label: str
    value: str
    note: str
    metric: str = ""
    statistic: str = ""


@dataclass(frozen=True)
class _One:
    """What the page tells of one run."""

    run: Run
    facts: tuple[tuple[str, str], ...]
    tiles: tuple[Tile, ...]
    timeline: Timeline | None
    expected: Expectation | str
    arithmetic: tuple[Compared, ...]
    seconds: tuple[Compared, ...]
    samples: tuple[Shown, ...]
    changed: tuple[tuple[str, str, str], ...]  # key, value, default
    config: str

    @staticmethod
    def of(run: Run) -> _One:
        expected = expectation(run)
        path = run.folder / "config.yaml"
        told = changed(run.settings)
        return _One(
            run,
            tuple(_facts(run)),
            tuple(_tiles(run)),
            timeline(run),
            expected,
            tuple(arithmetic(run)),
            () if isinstance(expected, str) else tuple(seconds(run, expected)),
            tuple(samples(run)),
            tuple(
                (key, as_yaml(value), as_yaml(default)) for key, (value, default) in told.items()
            ),
            masked(path.read_text(encoding="utf-8", errors="replace")) if path.is_file() else "",
        )


@dataclass(frozen=True)
class _Page:
    """What the template shows."""

    title: str
    runs: tuple[_One, ...]
    figures: tuple[Drawn, ...]
    headline: tuple[tuple[str, str, tuple[str, ...]], ...]  # metric, statistic, a value a run
    differing: tuple[tuple[str, tuple[str, ...]], ...]  # key, a value a run
    full_gap: float = FULL_GAP

    @staticmethod
    def of(runs: Sequence[Run]) -> _Page:
        names = [run.name for run in runs]
        return _Page(
            names[0] if len(names) == 1 else f"{len(names)} runs: {', '.join(names)}",
            tuple(_One.of(run) for run in runs),
            tuple(drawn_figures(runs)),
            tuple(_headline(runs)),
            tuple(_differing(runs)),
        )

    def part(self, name: str) -> list[Drawn]:
        """List the figures of one part of the page."""
        return [drawn for drawn in self.figures if drawn.figure.part == name]

    @property
    def phases(self) -> list[tuple[str, list[Phase | None]]]:
        """List phases with those of each run, in the order of a step."""
        found = [
            {p.name: p for p in one.timeline.phases} if one.timeline else {} for one in self.runs
        ]
        names = dict.fromkeys(name for phases in found for name in phases)
        rows = [(name, [phases.get(name) for phases in found]) for name in names]
        return [(n, row) for n, row in rows if any(p and p.share >= _UNUSED for p in row)]


@cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("mrl.report", "template"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "number": number,
        "spark": spark,
        "breakable": _breakable,
        "entry": metric_of,
    }
    return environment.get_template("page.html")


def _facts(run: Run) -> Iterator[tuple[str, str]]:
    """Say what the run is."""
    settings = run.settings
    supervised = "sft/loss" in run.series

    def setting(key: str) -> Any:
        return settings.get(key, default_of(key))

    if settings:
        kind = "supervised" if supervised else str(setting("algorithm.adv_estimator"))
        yield "algorithm", kind
        yield "model", str(setting("model.path"))
        if files := setting("data.train_files"):
            yield "data", ", ".join(map(str, files))
    if run.ranks:
        places: dict[tuple[str, str], int] = {}
        for rank in run.ranks:
            place = str(rank["host"]), str(rank["device_name"])
            places[place] = places.get(place, 0) + 1
        hosts = len({host for host, _ in places})
        devices = ", ".join(dict.fromkeys(device for _, device in places))
        where = next(iter(places))[0] if hosts == 1 else f"{hosts} hosts"
        yield "ranks", f"{len(run.ranks):,} on {where}: {devices}"
    if run.plan:
        layout: Mapping[str, Any] = run.plan["roles"]["actor"]["layout"]
        sizes = {name: layout[name] for name in ("tp", "pp", "vpp", "cp", "ep", "dp")}
        told = [f"{name.upper()}{size}" for name, size in sizes.items() if size and size > 1]
        engine = "" if supervised else f"; engine TP{run.plan['rollout_tp']}"
        yield "layout", f"{' '.join(told) or 'one rank'}{engine}"
    if run.status is not None:
        still = " when it last said so" if run.status.state == RUNNING else ""
        why = f": {run.status.why}" if run.status.state in (STOPPED, FAILED) else ""
        yield "state", f"{run.status.state}{still}{why}"
    total = run.status.total_steps if run.status is not None else None
    total = total or settings.get("trainer.total_training_steps")
    yield "steps", f"{run.last_step:,} of {total:,}" if total else f"{run.last_step:,}"
    spent = sum(row["timing_s/step"] or 0.0 for row in run.training)
    yield "time in steps", _duration(spent)
    yield "folder", str(run.folder)


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


_HEADLINE: tuple[tuple[str, str, str], ...] = (  # metric, statistic, label
    ("critic/score/mean", "last", "reward"),
    ("sft/loss", "last", "loss"),
    ("val-core/", "last", "validation"),
    ("critic/vf_explained_var", "last", "explained variance"),
    ("response_length/mean", "last", "response length"),
    ("actor/entropy", "last", "entropy"),
    ("perf/throughput", "median", "tokens/s a GPU"),
    ("perf/mfu/actor", "median", "MFU"),
    ("timing_s/step", "median", "seconds a step"),
)


def _tiles(run: Run) -> Iterator[Tile]:
    for prefix, statistic, label in _HEADLINE:
        for name, series in run.series.items():
            if not (name.startswith(prefix) if prefix.endswith("/") else name == prefix):
                continue
            if not series.known:
                continue
            text = f"{label}: {name.split('/', 1)[1]}" if prefix.endswith("/") else label
            if statistic == "median":
                note = f"median; {number(min(series.known))} to {number(max(series.known))}"
                yield Tile(text, number(median(series.known)), note, name, "median")
                continue
            note = f"first {number(series.values[0])}"
            if prefix == "val-core/":
                best = max(range(len(series.values)), key=lambda i: _low(series.values[i]))
                note += f", best {number(series.values[best])} at step {series.steps[best]:,}"
            yield Tile(text, number(series.values[-1]), note, name, "last")


def _low(value: float | None) -> float:
    return float("-inf") if value is None else value


def _headline(runs: Sequence[Run]) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """Give the numbers in which runs are compared, those that any of them has."""
    for prefix, statistic, _ in _HEADLINE:
        names = [n for run in runs for n in run.series]
        wanted = [
            n for n in names if n == prefix or (prefix.endswith("/") and n.startswith(prefix))
        ]
        for name in dict.fromkeys(wanted):
            statistics = [statistic, "max"] if prefix == "val-core/" else [statistic]
            for one in statistics:
                yield name, one, tuple(_value(run, name, one) for run in runs)


def _value(run: Run, name: str, statistic: str) -> str:
    if name not in run.series or not run.series[name].known:
        return _ABSENT
    series = run.series[name]
    if statistic == "median":
        return number(median(series.known))
    return number(series.statistics[statistic])


def _differing(runs: Sequence[Run]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Give the settings in which runs differ."""
    for key in dict.fromkeys(key for run in runs for key in run.settings):
        default = default_of(key)  # what an older version did not know is not in its file
        found = [run.settings.get(key, default) for run in runs]
        if any(value != found[0] for value in found):
            yield key, tuple(as_yaml(value) for value in found)


def _breakable(name: str) -> Markup:
    """Let a metric or a key break behind its separators."""
    return Markup(re.sub(r"([/._])", r"\1<wbr>", str(escape(name))))
