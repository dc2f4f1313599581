"""One readable line a step, in terminals and in log files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TextIO

from rich.console import Console
from rich.table import Table
from rich.text import Text


@dataclass(frozen=True, slots=True)
class Column:
    """A number of the step line: its label, where it comes from, how it is written."""

    label: str
    metric: str
    write: Callable[[float], str]


COLUMNS: tuple[Column, ...] = (
    Column("score", "critic/score/mean", "{:.3f}".format),
    Column("len", "response_length/mean", "{:.1f}".format),
    Column("loss", "actor/pg_loss", "{:+.4f}".format),
    Column("loss", "sft/loss", "{:.4f}".format),
    Column("vf_loss", "critic/vf_loss", "{:.4f}".format),
    Column("kl", "actor/ppo_kl", "{:.2e}".format),
    Column("grad", "actor/grad_norm", "{:.3f}".format),
    Column("lr", "actor/lr", "{:.1e}".format),
    Column("lr", "sft/lr", "{:.1e}".format),
    Column("tok/s/gpu", "perf/throughput", "{:,.0f}".format),
    Column("s", "timing_s/step", "{:.1f}".format),
)
VALIDATION = "val-core/"
UNSCORED = "reward/unscored"


class ConsoleLog:
    """Prints the run as a person follows it: a rule, a line a step, a table."""

    def __init__(self, total_steps: int, stream: TextIO | None = None) -> None:
        """Write to `stream`; None: the standard output."""
        self._total_steps = total_steps
        self._console = Console(file=stream, highlight=False, markup=False)
        self._first: dict[str, float] = {}
        self._last: dict[str, float] = {}

    def start(self, title: str) -> None:
        """Print a rule that opens the run."""
        self._console.rule(title)

    def line(self, text: str) -> None:
        """Print a line of its own."""
        self._console.print(text, soft_wrap=True)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Print the line of one step; absent metrics are left out."""
        for name, value in metrics.items():
            self._first.setdefault(name, value)
            self._last[name] = value
        width = len(str(self._total_steps))
        line = Text.assemble((f"step {step:>{width}}/{self._total_steps}", "bold"))
        for column in COLUMNS:
            if column.metric in metrics:
                line.append(f"  {column.label} ", "dim")
                line.append(column.write(metrics[column.metric]))
        for name, value in metrics.items():
            if name.startswith(VALIDATION):
                line.append(f"  val {_short(name)} ", "dim")
                line.append(f"{value:.3f}", "bold green")
        if metrics.get(UNSCORED, 0.0) > 0:
            line.append(f"  unscored {metrics[UNSCORED]:.0f}", "bold yellow")
        # A log file has no width: a step stays one line that grep finds.
        self._console.print(line, soft_wrap=True)

    def finish(self, title: str) -> None:
        """Print a table of the first and last value of what the lines showed."""
        table = Table(title=title, title_justify="left")
        table.add_column("metric")
        table.add_column("first", justify="right")
        table.add_column("last", justify="right")
        for column in COLUMNS:
            self._add_row(table, column.metric, column.write)
        for name in self._last:
            if name.startswith(VALIDATION):
                self._add_row(table, name, "{:.3f}".format)
        self._console.print(table)

    def _add_row(self, table: Table, name: str, write: Callable[[float], str]) -> None:
        if name in self._last:
            table.add_row(name, write(self._first[name]), write(self._last[name]))


def _short(name: str) -> str:
    """Give the data source of val-core/<data_source>/<acc|reward>/mean@N."""
    return name.removeprefix(VALIDATION).rsplit("/", 2)[0]
