"""The plan as a person reads it, at 100 columns."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from mrl.planning.change import words
from mrl.planning.hardware import GB
from mrl.planning.memory import RankMemory
from mrl.planning.plan import JobPlan
from mrl.planning.suggest import Suggestion, gigabytes, short

_MOST_GROUPS = 4


def print_job(plan: JobPlan, console: Console | None = None, assumptions: bool = True) -> None:
    """Print memory by phase, time by phase, the verdict, its fixes and the advice."""
    console = console or Console()
    console.print(_memory_table(plan))
    if len(plan.memory.groups) > 1:
        console.print(_groups_table(plan))
    console.print(_time_table(plan))
    _print_engine(plan, console)
    _print_verdict(plan, console)
    for advice in plan.advice:
        console.print(Text.assemble(("advice ", "bold cyan"), str(advice)))
    if assumptions:
        console.print(_assumptions(plan))


def print_suggestions(found: Sequence[Suggestion], console: Console | None = None) -> None:
    """Print ranked layouts, and the overrides of the first."""
    console = console or Console()
    if not found:
        console.print(Text("suggest: no layout of this model fits these GPUs", style="bold red"))
        return
    table = _table("suggested, fastest first")
    table.add_column("actor", overflow="fold")
    for name in ("engine", "cache", "peak GB", "step s", "tok/s/GPU", "gen"):
        table.add_column(name, justify="right", no_wrap=True)
    for suggestion in found:
        change = suggestion.change
        table.add_row(
            short(suggestion),
            f"TP{change['rollout.tensor_model_parallel_size']}",
            f"{change['rollout.gpu_memory_utilization']}",
            f"{gigabytes(suggestion):.1f}",
            f"{suggestion.time.total:,.1f}",
            f"{suggestion.time.throughput:,.0f}",
            f"{suggestion.time.generation_share:.0%}",
        )
    console.print(table)
    told = {key: value for key, value in found[0].change.items() if value is not None}
    console.print(Text.assemble(("the first as overrides: ", "bold"), words(told)))


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", box=box.SIMPLE, pad_edge=False)


def _memory_table(plan: JobPlan) -> Table:
    group = plan.memory.peak
    table = _table(f"GB a GPU, {_who(group)}")
    names = list(dict.fromkeys(name for phase in group.phases for name in phase.parts))
    table.add_column("")
    for phase in group.phases:
        name = phase.name.replace(" ", "\n")
        table.add_column(name, justify="right", no_wrap=True)
    for name in names:
        cells = [_gb(phase.parts.get(name, 0.0)) for phase in group.phases]
        if any(cells):
            table.add_row(name, *cells)
    table.add_section()
    peak = group.peak
    table.add_row(
        Text("in all", style="bold"),
        *(
            Text(
                f"{phase.total / GB:.1f}",
                style="bold red"
                if phase.total > plan.memory.capacity
                else ("bold" if phase is peak else ""),
            )
            for phase in group.phases
        ),
    )
    table.caption = f"{plan.job.machine.gpu.name}: {plan.memory.capacity / GB:.1f} GB" + (
        f"; offloaded to the host: {group.host / GB:.1f} GB a rank" if group.host else ""
    )
    table.caption_justify = "left"
    return table


def _gb(value: float) -> str:
    return f"{value / GB:.1f}" if value >= 0.05 * GB else ""


def _who(group: RankMemory) -> str:
    first, last, count = group.ranks[0], group.ranks[-1], len(group.ranks)
    ranks = f"ranks {first}-{last}" if count > 1 else f"rank {first}"
    stages = sorted(set(group.stages.values()))
    many = len(stages) == 1 and stages[0] >= 0
    stage = f", stage {stages[0]}" if many else ""
    return ranks + (stage if group.stages else ", engine alone")


def _groups_table(plan: JobPlan) -> Table:
    table = _table("other ranks")
    for name in ("ranks", "largest phase", "GB", "host GB"):
        table.add_column(name, justify="right" if "GB" in name else "left")
    others = plan.memory.groups[1:]
    for group in others[:_MOST_GROUPS]:
        peak = group.peak
        table.add_row(_who(group), peak.name, f"{peak.total / GB:.1f}", _gb(group.host))
    if len(others) > _MOST_GROUPS:
        least = others[-1].peak.total / GB
        table.add_row(f"{len(others) - _MOST_GROUPS} classes more", "", f"from {least:.1f}", "")
    return table


def _time_table(plan: JobPlan) -> Table:
    time = plan.time
    table = _table(f"a step: {time.total:,.1f} s, {time.throughput:,.0f} tokens/s a GPU")
    for name in ("phase", "s", "share", "TFLOP/s"):
        table.add_column(name, justify="left" if name == "phase" else "right", no_wrap=True)
    table.add_column("of it")
    for phase in time.phases:
        parts = sorted(phase.seconds.items(), key=lambda item: -item[1])
        told = [f"{name} {_s(value)}" for name, value in parts if value >= 0.01 * phase.total]
        rate = f"{phase.flops / phase.total / 1e12:,.0f}" if phase.flops and phase.total else ""
        table.add_row(
            phase.name, _s(phase.total), f"{phase.total / time.total:.0%}", rate, ", ".join(told)
        )
    return table


def _s(seconds: float) -> str:
    return f"{seconds:,.1f}" if seconds >= 1 else f"{seconds:.2g}"


def _print_engine(plan: JobPlan, console: Console) -> None:
    engine = plan.memory.engine
    console.print(
        Text(
            f"engine cache {max(engine.kv, 0) / GB:.1f} GB a GPU: {engine.tokens:,} tokens, "
            f"{engine.sequences:,} sequences of {plan.job.plan.max_model_len:,} at a time"
        )
    )


def _print_verdict(plan: JobPlan, console: Console) -> None:
    if plan.fits:
        worst = plan.memory.peak.peak
        share = worst.total / plan.memory.capacity
        tight = ", tight: the plan itself may be 10 % off" if plan.memory.is_tight else ""
        text = f"{worst.total / GB:.1f} GB, {share:.0%} of the GPU{tight}; {plan.binds}"
        console.print(Text.assemble(("FITS ", "bold green"), text))
        return
    console.print(Text.assemble(("DOES NOT FIT ", "bold red"), plan.binds))
    for fix in plan.fixes:
        text = f"{fix} ({fix.memory / GB:.1f} GB, {fix.seconds:,.1f} s a step)"
        console.print(Text.assemble(("would fit with ", "bold"), text))
    if not plan.fixes:
        console.print(Text("no single change, pair of changes or more nodes make it fit"))


def _assumptions(plan: JobPlan) -> Text:
    machine = plan.job.machine
    told = [f"{name}={value:g}" for name, value, _ in machine.assume.rows()]
    rates = (
        f"{machine.gpu.name}: {machine.peak / 1e12:,.0f} TFLOP/s, memory "
        f"{machine.memory_rate / GB:,.0f} GB/s, NVLink {machine.nvlink_rate / GB:,.0f}, "
        f"{machine.network.name} {machine.network_rate / GB:,.0f}"
    )
    return Text(f"assumed: {rates}; --assume {' '.join(told)}", style="dim")
