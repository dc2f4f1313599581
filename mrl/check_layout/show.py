"""A check as a person reads it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from mrl.check_layout.report import CheckReport, LayoutResult

_OUTPUTS = ("log-probs", "entropy", "values")


def print_check(report: CheckReport, console: Console | None = None) -> None:
    """Print a row a layout with its loss, gradient norm, differences and verdict; then reasons."""
    console = console or Console()
    console.print(Text("layouts against one reference", "bold"))
    console.print(_table(report))
    for line in _notes(report):
        console.print(line)


def _table(report: CheckReport) -> Table:
    outputs = _outputs(report)
    table = Table(box=box.SIMPLE, padding=(0, 1, 0, 0))
    table.add_column("\nlayout", style="bold", overflow="fold")
    for name in ("\nranks", "\nloss", "\ngrad norm"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in outputs:
        table.add_column(f"max |d|\n{name}", justify="right", no_wrap=True)
    table.add_column("\nverdict", no_wrap=True)
    for result in (report.reference, *report.layouts):
        table.add_row(*_cells(result, outputs, result is report.reference))
    return table


def _outputs(report: CheckReport) -> Sequence[str]:
    has_critic = bool(report.reference.round and report.reference.round.critic)
    return _OUTPUTS if has_critic else _OUTPUTS[:-1]


def _cells(
    result: LayoutResult, outputs: Sequence[str], is_reference: bool
) -> Iterator[str | Text]:
    yield Text(result.name)
    yield f"{result.ranks:,}"
    for key in ("actor/pg_loss", "actor/grad_norm"):
        yield f"{result.round.actor[0][key]:.6g}" if result.round else "-"
    for name in outputs:
        gap = result.comparison.named(name) if result.comparison else None
        yield f"{gap.found:.1e}" if gap is not None else "-"
    yield Text("reference", "dim") if is_reference else _verdict(result)


def _verdict(result: LayoutResult) -> Text:
    if not result.possible:
        return Text("not possible", "yellow")
    if result.problem:
        return Text("ENDED", "bold red")
    if result.failed:
        return Text("DIFFERS", "bold red")
    return Text("same", "green")


def _notes(report: CheckReport) -> Iterator[Text]:
    for result in report.layouts:
        if not result.possible:
            yield Text.assemble((result.name, "bold"), " not possible: ", result.problem)
        elif result.problem:
            yield Text.assemble((result.name, "bold"), " ended: ", result.problem)
        elif result.comparison is not None and result.failed:
            over = [d for d in result.comparison.differences if not d.ok]
            words = "; ".join(f"{d.name} {d.relative:.1e} > {d.bound:.1e}" for d in over)
            yield Text.assemble((result.name, "bold"), " differs: ", words)
    for rule in dict.fromkeys(result.rule for result in report.layouts if result.rule):
        yield Text(rule, "dim")
    yield Text(
        f"{report.rows} rows, {report.tokens:,} tokens, {report.response_tokens:,} of them in "
        "responses; two updates of each role, and the outputs after them",
        "dim",
    )
