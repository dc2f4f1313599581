"""`mrl watch`: a run in the terminal, from what its folder holds; nothing is written or asked."""

from __future__ import annotations

import math
import re
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from mrl.checkpoint.lock import LOCK_FILE
from mrl.config import Config, ConfigError, load_config
from mrl.tracking.findings import find
from mrl.tracking.follow import Follower
from mrl.tracking.status import FAILED, FINISHED, RUNNING, STOPPED, Status, read_status

_EVERY_S = 1.0
_RECENT = 20  # steps whose median is the pace
_STALL_S, _STALL_STEPS = 120.0, 5.0  # without a step: at least so long, and so many steps' time
_STYLES = {FINISHED: "green", STOPPED: "yellow", FAILED: "red"}
_OVER = {*_STYLES, "ended", "gone"}
_BARS = "".join(map(chr, range(0x2581, 0x2589)))  # an eighth of a cell, .., a whole one
_FULL, _EMPTY = "\u2588", "\u00b7"
# Curves: the first of the names that a run has.
CURVES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("score", ("critic/score/mean",)),
    ("loss", ("sft/loss", "actor/pg_loss")),
    ("entropy", ("actor/entropy", "actor/entropy_loss")),
    ("KL to the reference", ("actor/kl_loss", "actor/reward_kl_penalty")),
    ("KL of the update", ("actor/ppo_kl",)),
    ("response tokens", ("response_length/mean",)),
    ("cut at the limit", ("response_length/clip_ratio",)),
    ("engine - trainer", ("training/rollout_probs_diff_mean",)),
    ("gradient norm", ("actor/grad_norm", "sft/grad_norm")),
    ("tokens/s/GPU", ("perf/throughput",)),
    ("MFU", ("perf/mfu/actor",)),
)
MEMORY = (
    ("allocated", "perf/max_memory_allocated_gb"),
    ("reserved", "perf/max_memory_reserved_gb"),
    ("asleep", "perf/memory_after_sleep_gb"),
    ("host", "perf/cpu_memory_used_gb"),
)


@dataclass(frozen=True, slots=True)
class Health:
    """Whether a run goes on, in a word and a sentence."""

    state: (
        str  # waiting | starting | running | stalled | finished | stopped | failed | gone | ended
    )
    text: str
    style: str


def watch(run: Path, once: bool, console: Console | None = None) -> None:
    """Show a run until it is over or Ctrl-C; once: as it is now.

    Raises FileNotFoundError for a folder that is not there.
    """
    if not run.is_dir():
        raise FileNotFoundError(f"{run}: no such folder; a run's is its trainer.default_local_dir")
    console = console or Console()
    view = View(run)
    if once or not console.is_terminal:
        console.print(view.render(time.time()))
        return
    with (
        suppress(KeyboardInterrupt),
        Live(console=console, screen=True, auto_refresh=False) as live,
    ):
        while not view.is_over:
            live.update(view.render(time.time()), refresh=True)
            time.sleep(_EVERY_S)
    console.print(view.render(time.time()))


class View:
    """What is shown of a run."""

    def __init__(self, run: Path) -> None:
        self.run = run
        self.is_over = False  # as far as it was last seen
        self._rows = Follower(run / "metrics.jsonl")
        self._config: tuple[float, Config | None] = (0.0, None)  # as of when

    def render(self, now: float) -> RenderableType:
        """Read what is new and lay it out, for a terminal of any width."""
        rows = self._rows.read()
        steps = [row for row in rows if "timing_s/step" in row]
        status = read_status(self.run)
        health = self.health(status, steps, now)
        self.is_over = health.state in _OVER
        parts: list[RenderableType] = [self._head(health), _progress(status, steps, health)]
        parts += _lines(self._warnings(rows))
        if steps:
            parts.append(_phases(steps[-1]))
        parts += _lines(_facts(rows))
        if steps:
            parts.append(_curves(steps))
        return Group(*(part for pair in parts for part in (pair, Text(""))))

    def health(self, status: Status | None, steps: Sequence[dict[str, Any]], now: float) -> Health:
        """Judge by what the controller said last, whether it lives, and when it last wrote."""
        holder = _Holder.of(self.run)
        if status is None and steps:  # of a version that left no status
            if holder is not None and holder.may_live:
                return self._pace(steps, now)
            return Health("ended", "no process works in this folder", "yellow")
        if holder is not None and holder.may_live and (status is None or status.pid != holder.pid):
            before = f"; before: {status.why}" if status is not None and status.why else ""
            return Health("starting", f"{holder.text}, see logs/{before}", "cyan")
        if status is None:
            return Health("waiting", "nothing has started here yet", "yellow")
        if status.state != RUNNING:
            return Health(status.state, status.why, _STYLES[status.state])
        if status.host == socket.gethostname() and not _lives(status.pid):
            text = f"process {status.pid} is gone without a word: killed? logs/ may tell"
            return Health("gone", text, "red")
        return self._pace(steps, now)

    def _pace(self, steps: Sequence[dict[str, Any]], now: float) -> Health:
        files = [self.run / "metrics.jsonl", self.run / "status.json"]
        written = max((f.stat().st_mtime for f in files if f.is_file()), default=now)
        quiet, usual = max(0.0, now - written), _usual(steps)
        since = f"last step {_span(quiet)} ago" if steps else f"first step since {_span(quiet)}"
        if quiet > max(_STALL_S, _STALL_STEPS * usual) and steps:
            text = (
                f"{since}, a step takes {_span(usual)}: see logs/; trainer.hang_timeout_s ends it"
            )
            return Health("stalled", text, "red")
        return Health("running", since, "green")

    def _head(self, health: Health) -> Text:
        state = (health.state, f"bold {health.style}")
        return Text.assemble((str(self.run), "bold"), "\n", state, f"  {health.text}")

    def _warnings(self, rows: Sequence[dict[str, Any]]) -> list[Text]:
        config = self._read_config()
        found = find(rows, config) if config is not None else ()
        return [Text.assemble(("! ", "bold yellow"), str(finding)) for finding in found]

    def _read_config(self) -> Config | None:
        """Read config.yaml where it has changed; None for none, or one of another version."""
        file = self.run / "config.yaml"
        try:
            written = file.stat().st_mtime
            if written != self._config[0]:
                self._config = (written, load_config(file))
        except OSError:
            return None
        except ConfigError:
            self._config = (written, None)
        return self._config[1]


@dataclass(frozen=True, slots=True)
class _Holder:
    """The process that a run folder's lock names."""

    text: str  # process <pid> on <host> since <when>
    pid: int
    host: str

    @staticmethod
    def of(run: Path) -> _Holder | None:
        try:
            text = (run / LOCK_FILE).read_text(encoding="utf-8").strip()
        except OSError:
            return None
        found = re.match(r"process (\d+) on (\S+)", text)
        return _Holder(text, int(found[1]), found[2]) if found else None

    @property
    def may_live(self) -> bool:
        """Say whether it is there, as far as this host can tell."""
        return self.host != socket.gethostname() or _lives(self.pid)


def _lives(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def _lines(texts: Sequence[Text]) -> list[RenderableType]:
    return [Group(*texts)] if texts else []


def _usual(steps: Sequence[dict[str, Any]]) -> float:
    """Give the seconds of a step as it goes now."""
    times = [row["timing_s/step"] for row in steps[-_RECENT:] if row["timing_s/step"] is not None]
    return median(times) if times else 0.0


def _progress(status: Status | None, steps: Sequence[dict[str, Any]], health: Health) -> Table:
    done = steps[-1]["step"] if steps else 0
    total = status.total_steps if status is not None else 0
    share = done / total if total else 0.0
    grid = Table.grid(padding=(0, 2), expand=True)
    grid.add_column(no_wrap=True)
    grid.add_column(ratio=1)
    grid.add_column(no_wrap=True)
    left = ""
    if health.state in ("running", "stalled") and steps:
        left = f"{_span(_usual(steps))} a step"
        if total:
            left += f", {_span(max(0, total - done) * _usual(steps))} left"
    grid.add_row(f"step {done}/{total or '?'}", Bar(share, "green"), left or f"{share:.0%}")
    return grid


class Bar:
    """A bar as wide as its cell, filled to a share."""

    def __init__(self, share: float, style: str) -> None:
        self.share, self.style = min(max(share, 0.0), 1.0), style

    def __rich_console__(self, console: Console, options: Any) -> Any:
        width = options.max_width
        filled = round(self.share * width)
        yield Text.assemble((_FULL * filled, self.style), (_EMPTY * (width - filled), "dim"))


def _phases(row: dict[str, Any]) -> Table:
    """Show where the last step's time went, the longest first."""
    whole = row["timing_s/step"] or 0.0
    phases = {
        name.removeprefix("timing_s/"): value
        for name, value in row.items()
        if name.startswith("timing_s/") and name != "timing_s/step" and value is not None
    }
    table = Table(title=f"step {row['step']}: {_span(whole)}", title_justify="left", expand=True)
    table.box, table.show_header, table.title_style = None, False, "bold"
    for justify, ratio in (("left", None), ("right", None), ("right", None), ("left", 1)):
        table.add_column(justify=justify, no_wrap=True, ratio=ratio)  # type: ignore[arg-type]
    for name, seconds in sorted(phases.items(), key=lambda item: -item[1]):
        share = seconds / whole if whole else 0.0
        if share >= 0.005:
            slow = _slowest(row, name)
            table.add_row(f"{name}{slow}", _span(seconds), f"{share:.0%}", Bar(share, "blue"))
    return table


def _slowest(row: dict[str, Any], phase: str) -> str:
    spread, rank = row.get(f"perf/rank_spread/{phase}"), row.get(f"perf/slowest_rank/{phase}")
    if spread is None or rank is None or spread < 1.1:
        return ""
    return f" (rank {rank:.0f}: {spread:.2f}x)"


def _curves(steps: Sequence[dict[str, Any]]) -> Table:
    table = Table(title="over the run", title_justify="left", expand=True)
    table.box, table.show_header, table.title_style = None, False, "bold"
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(ratio=1, no_wrap=True)
    for label, names in CURVES:
        name = next((name for name in names if any(name in row for row in steps)), None)
        if name is not None:
            values = [row[name] for row in steps if row.get(name) is not None]
            last = f"{values[-1]:,.4g}" if values else "not finite"
            table.add_row(label, last, Spark(values))
    return table


class Spark:
    """A line of bars as wide as its cell; each is the mean of a stretch of the values."""

    def __init__(self, values: Sequence[float]) -> None:
        self.values = values

    def __rich_console__(self, console: Console, options: Any) -> Any:
        yield Text(sparkline(self.values, options.max_width), "cyan")


def sparkline(values: Sequence[float], width: int) -> str:
    """Draw values from left to right in at most `width` characters, lowest to highest."""
    count = min(len(values), width)
    if not count:
        return ""
    cuts = [len(values) * i // count for i in range(count + 1)]
    means = [math.fsum(values[a:b]) / (b - a) for a, b in pairwise(cuts)]
    low, high = min(means), max(means)
    if high == low:
        return _BARS[0] * count
    return "".join(_BARS[min(int((m - low) / (high - low) * 8), 7)] for m in means)


def _facts(rows: Sequence[dict[str, Any]]) -> list[Text]:
    """Tell memory and the last validation, each in a line."""
    facts: list[Text] = []
    memory = [(label, _latest(rows, name)) for label, name in MEMORY]
    told = [f"{label} {found[1]:.1f}" for label, found in memory if found is not None]
    if told:
        facts.append(Text.assemble(("memory, GB  ", "bold"), ", ".join(told)))
    names = dict.fromkeys(name for row in rows for name in row if name.startswith("val-core/"))
    for name in names:
        if (found := _latest(rows, name)) is not None:
            first = next(row[name] for row in rows if row.get(name) is not None)
            text = f"{found[1]:.4g} at step {found[0]} (first {first:.4g})"
            facts.append(Text.assemble((f"{name.removeprefix('val-core/')}  ", "bold"), text))
    return facts


def _latest(rows: Sequence[dict[str, Any]], name: str) -> tuple[int, float] | None:
    return next(
        ((row["step"], row[name]) for row in reversed(rows) if row.get(name) is not None), None
    )


def _span(seconds: float) -> str:
    """Write a length of time as people say it."""
    if seconds < 0.1:
        return f"{1e3 * seconds:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours} h"
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"
