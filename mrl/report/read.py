"""A run folder as the report sees it; whatever is missing or cut short is left out, and said."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache, cached_property
from os.path import commonpath
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml

from mrl.config import Config, ConfigError, load_config
from mrl.tracking.findings import WINDOW, Finding, Row, find
from mrl.tracking.status import Status, read_status

UNKNOWN = "no such key"
STEP = "timing_s/step"  # what every training step has, and a validation alone has not


@dataclass(frozen=True)
class Series:
    """One metric over the steps that have it."""

    steps: tuple[int, ...]
    values: tuple[float | None, ...]  # None: not finite

    @cached_property
    def known(self) -> tuple[float, ...]:
        """Give the finite values."""
        return tuple(value for value in self.values if value is not None)

    @cached_property
    def statistics(self) -> dict[str, float | None]:
        """Give first, last, lowest, highest and the mean of the last steps; {} without values."""
        if not self.known:
            return {}
        return {
            "first": self.values[0],
            "last": self.values[-1],
            "min": min(self.known),
            "max": max(self.known),
            "recent": fmean(self.known[-WINDOW:]),
        }


@dataclass(frozen=True)
class Run:
    """What a run left in its folder."""

    folder: Path
    name: str
    rows: tuple[Row, ...]  # of metrics.jsonl, a row a step, ascending
    settings: Mapping[str, Any]  # config.yaml by dotted key
    config: Config  # the defaults where config.yaml does not load
    plan: Mapping[str, Any]  # plan.json; {} where there is none
    ranks: Sequence[Mapping[str, Any]]  # ranks.json
    status: Status | None  # status.json
    notes: tuple[str, ...]  # what is missing or was cut short

    @cached_property
    def series(self) -> dict[str, Series]:
        """Give every metric by its name, in the order in which a step tells them."""
        found: dict[str, tuple[list[int], list[float | None]]] = {}
        for row in self.rows:
            step = row["step"]
            for name, value in row.items():
                if name == "step" or not isinstance(value, int | float | None):
                    continue
                steps, values = found.setdefault(name, ([], []))
                steps.append(step)
                values.append(value)
        return {name: Series(tuple(s), tuple(v)) for name, (s, v) in found.items()}

    @cached_property
    def training(self) -> tuple[Row, ...]:
        """Give the rows of training steps."""
        return tuple(row for row in self.rows if STEP in row)

    @property
    def last_step(self) -> int:
        """Give the last step that is recorded; 0 without any."""
        return int(self.rows[-1]["step"]) if self.rows else 0

    @cached_property
    def findings(self) -> tuple[Finding, ...]:
        """Give the warnings."""
        return find(self.rows, self.config)

    def latest(self, folder: str, count: int) -> Iterator[Path]:
        """Yield `<folder>/<step>.jsonl` of the last recorded steps that have one, newest first."""
        steps = [int(p.stem) for p in (self.folder / folder).glob("*.jsonl") if p.stem.isdigit()]
        known = sorted((step for step in steps if step <= self.last_step), reverse=True)
        yield from (self.folder / folder / f"{step}.jsonl" for step in known[:count])


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """Read run folders and name each as short as tells it from the others.

    Raises FileNotFoundError for a folder that holds neither metrics.jsonl nor config.yaml.
    """
    settings = [_settings(folder) for folder in folders]
    names = [str(found.get("trainer.experiment_name", "")) for found, _ in settings]
    if len(set(names)) < len(names) or "" in names:
        names = _short_names(folders)
    return [
        _read(folder, name, *found)
        for folder, name, found in zip(folders, names, settings, strict=True)
    ]


def rows_in(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the whole lines of a file of JSON objects; one cut short by a kill is left out."""
    return (row for _, row in _lines(path) if row is not None)


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Give a tree by dotted keys; tuples as lists, as YAML has them."""
    leaves: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            leaves |= flat(value, f"{prefix}{name}.")
        else:
            leaves[f"{prefix}{name}"] = list(value) if isinstance(value, tuple) else value
    return leaves


def default_of(key: str) -> Any:
    """Give the default of a key, or of the section that holds it where that is off by default."""
    defaults = _defaults()
    while key not in defaults and "." in key:
        key = key.rpartition(".")[0]
    return defaults.get(key, UNKNOWN)


def changed(settings: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Give (value, default) of each key that differs from its default."""
    found = {key: (value, default_of(key)) for key, value in settings.items()}
    return {
        key: (value, default)
        for key, (value, default) in found.items()
        if key not in _defaults() or value != default
    }


@cache
def _defaults() -> dict[str, Any]:
    return flat(asdict(Config()))


def _lines(path: Path) -> Iterator[tuple[str, dict[str, Any] | None]]:
    if not path.is_file():
        return
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            if line.strip():
                try:
                    row = json.loads(line)
                except ValueError:
                    row = None
                yield line, row if isinstance(row, dict) else None


def _read(folder: Path, name: str, settings: Mapping[str, Any], fault: str) -> Run:
    notes = [fault] if fault else []
    path, rows = folder / "metrics.jsonl", {}
    for line, row in _lines(path):
        if row is None or not isinstance(row.get("step"), int):
            notes.append(f"metrics.jsonl: a line of {len(line):,} characters is no whole row")
        else:
            rows[row["step"]] = row
    superseded = sum(1 for _ in rows_in(folder / "metrics.jsonl.superseded"))
    if superseded:
        text = f"resumed: {superseded:,} steps that were taken twice are in {path.name}.superseded"
        notes.append(text)
    config, reason = _config(folder)
    if reason:
        notes.append(reason)
    return Run(
        folder,
        name,
        tuple(rows[step] for step in sorted(rows)),
        settings,
        config,
        _json(folder / "plan.json", {}),
        _json(folder / "ranks.json", []),
        read_status(folder),
        tuple(notes),
    )


def _settings(folder: Path) -> tuple[dict[str, Any], str]:
    path = folder / "config.yaml"
    if not path.is_file():
        if not (folder / "metrics.jsonl").is_file():
            raise FileNotFoundError(
                f"{folder} is no run folder: it holds neither metrics.jsonl nor config.yaml"
            )
        return {}, "there is no config.yaml"
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        return {}, f"config.yaml is no YAML: {' '.join(str(error).split())}"
    return (flat(tree), "") if isinstance(tree, dict) else ({}, "config.yaml holds no keys")


def _config(folder: Path) -> tuple[Config, str]:
    path = folder / "config.yaml"
    if not path.is_file():
        return Config(), ""
    try:
        return load_config(path), ""
    except (ConfigError, FileNotFoundError) as error:
        first = str(error).strip().splitlines()[0]
        return Config(), f"config.yaml does not load here, advice is for the defaults: {first}"


def _json(path: Path, missing: Any) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return missing


def _short_names(folders: Sequence[Path]) -> list[str]:
    paths = [str(folder.resolve()) for folder in folders]
    if len(set(paths)) < 2:
        return [folder.resolve().name for folder in folders]
    start = len(commonpath(paths)) + 1
    return [path[start:] or Path(path).name for path in paths]
