"""A reshard report as a person reads it: where both sides keep the model, and what moves."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from mrl.resharding.estimate import Seconds, stage_of
from mrl.resharding.holdings import (
    cut_dim,
    expert_rank,
    extents_of,
    held_boxes,
    replica_and_shard,
    shown_tensor,
    span,
    stages,
)
from mrl.resharding.layout import Layout
from mrl.resharding.report import RankTraffic, ReshardReport

_CELLS_A_ROW = 8
_MOST_ROWS = 12  # of a picture; the rest on demand
_BAR = 24  # characters
_COLOURS = ("cyan", "green", "yellow", "magenta", "blue", "red", "bright_cyan", "bright_green")
_UNITS = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("B", 1.0))
_BYTE_COLUMNS = {
    "local": "local",
    "sent": "sent",
    "received": "received",
    "floor": "floor",
    "allgather": "all-\ngather",
    "peak_staging": "peak\nstaging",
}


def print_report(
    report: ReshardReport,
    tensor: str | None = None,
    every_rank: bool = False,
    console: Console | None = None,
) -> None:
    """Print the summary, both layouts, one tensor's slices, the traffic and the estimate.

    `tensor` (None: the first one that is cut) is a checkpoint name; raises ValueError where the
    model has no such tensor.
    """
    name = shown_tensor(report, tensor)
    console = console or Console()
    for section in (
        _summary(report),
        _source_picture(report, every_rank),
        _target_picture(report, every_rank),
        _tensor_picture(report, name, every_rank),
        _traffic_table(report, every_rank),
        _time_table(report),
    ):
        console.print(Text(section.title, "bold"))
        console.print(section.table)
        for note in section.notes:
            console.print(Text(note, "dim"))
        if section.notes:
            console.print()


@dataclass(frozen=True, slots=True)
class _Section:
    title: str
    table: Table
    notes: Sequence[str] = ()


def _table(show_header: bool = True) -> Table:
    return Table(box=box.SIMPLE, show_header=show_header, padding=(0, 1, 0, 0))


def _summary(report: ReshardReport) -> _Section:
    source, target = report.source, report.target
    received, gathered = report.mean("received"), report.mean("allgather")
    table = _table(show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(style="dim")
    times = report.estimate
    ratio = f"{gathered / received:.1f} times as much" if received else "nothing needs to move"
    for row in (
        (
            "model",
            _bytes(report.model_bytes),
            f"{report.parameters / 1e9:,.2f} billion parameters, {report.model_path}",
        ),
        ("trainer", source_words(report), f"{source.dtype}, ranks {span(report.source_ranks)}"),
        ("engine", target_words(report), f"{target.dtype}, ranks {span(report.target_ranks)}"),
        (
            "received",
            _bytes(received),
            f"a rank, mean; the floor is {_bytes(report.mean('floor'))}",
        ),
        ("all-gather", _bytes(gathered), f"a rank, mean: {ratio}"),
        (
            "time",
            _seconds(times.direct.total),
            f"at least, on {times.gpu}, {times.network}; "
            f"all-gather {_seconds(times.allgather.total)}",
        ),
    ):
        table.add_row(*(Text(cell) for cell in row))
    return _Section("a weight update", table)


def source_words(report: ReshardReport) -> str:
    """Name the trainer's layout: `TP8 PP4 DP2`."""
    source = report.source
    words = [f"TP{source.tp}"]
    for name, size in (("PP", source.pp), ("VPP", source.vpp), ("CP", source.cp)):
        words += [f"{name}{size}"] if size > 1 else []
    words.append(f"DP{source.dp}")
    if source.ep > 1:
        words.append(f"EP{source.ep} ETP{source.expert_tp}")
    return " ".join(words)


def target_words(report: ReshardReport) -> str:
    """Name the engine's layout: `8 x TP8`."""
    target = report.target
    return f"{target.replicas} x TP{target.tp}" + (" EP" if target.ep else "")


def _source_picture(report: ReshardReport, every_rank: bool) -> _Section:
    source = report.source
    cells = {}
    for rank in report.source_ranks:
        index = rank - source.first_rank
        text = f"p{stage_of(source, rank)} " if source.pp > 1 else ""
        text += f"t{index % source.tp}"
        if source.ep > 1:
            text += f"\ne{expert_rank(source, rank)}"
        cells[rank] = Text(text, _COLOURS[index % source.tp % len(_COLOURS)])
    table = _grid(report, cells, every_rank)
    lines = [f"t: shard of {source.tp} of each tensor"]
    if source.ep > 1:
        each = _experts(report) // source.ep
        lines.append(f"e0 holds experts 0-{each - 1}, e1 the next {each}, ...")
    held = stages(report)
    head = [f"p{i}: " if source.pp > 1 else "every rank: " for i in range(source.pp)]
    lines += [f"{name}{what}" for name, what in zip(head, held, strict=True)]
    return _Section(f"trainer: {source_words(report)}", table, lines)


def _target_picture(report: ReshardReport, every_rank: bool) -> _Section:
    target = report.target
    places = {rank: replica_and_shard(report, rank) for rank in report.target_ranks}
    first: dict[int, int] = {}  # of a row's replicas, to which its cells are relative
    for rank, (replica, _) in places.items():
        row = rank // report.ranks_a_node
        first[row] = min(first.get(row, replica), replica)
    offsets = {
        rank: place[0] - first[rank // report.ranks_a_node] for rank, place in places.items()
    }
    several = any(offsets.values())
    cells = {}
    for rank, (_, shard) in places.items():
        letter = chr(ord("a") + offsets[rank] % 26)
        text = f"{letter}{shard}" if several else f"t{shard}"
        cells[rank] = Text(text, _COLOURS[shard % len(_COLOURS)])

    def replicas(ranks: Iterable[int]) -> str:
        return span(sorted({places[rank][0] for rank in ranks if rank in places})) or "-"

    table = _grid(report, cells, every_rank, ("replica", replicas))
    lines = [f"t: shard of {target.tp} of each tensor, all layers"]
    if several:
        lines = [f"a, b, ...: the replicas of a node; the number: {lines[0].removeprefix('t: ')}"]
    if target.ep:
        lines.append(f"each shard holds {_experts(report) // target.tp} whole experts a layer")
    return _Section(f"engine: {target_words(report)}", table, lines)


def _experts(report: ReshardReport) -> int:
    return report.shape.dims["experts"]


def _grid(
    report: ReshardReport,
    cells: Mapping[int, Text],
    every_rank: bool,
    extra: tuple[str, Callable[[Iterable[int]], str]] | None = None,
) -> Table:
    """Draw a row for each run of equal nodes, a cell for each of their GPUs."""
    table, node_size = _table(), report.ranks_a_node
    width = min(node_size, _CELLS_A_ROW)
    table.add_column("node", no_wrap=True)
    table.add_column("ranks", no_wrap=True)
    if extra is not None:
        table.add_column(extra[0], no_wrap=True)
    for column in range(width):
        head = f"{'gpu ' * (not column)}{column}" if node_size <= width else ""
        table.add_column(head, no_wrap=True)
    rows: list[tuple[list[str], list[int]]] = []  # texts of a row, and the ranks that share it
    for node in range(0, max(report.column("rank")) + 1, node_size):
        for start in range(node, node + node_size, width):
            ranks = list(range(start, min(start + width, node + node_size)))
            texts = [cells[rank].plain if rank in cells else "-" for rank in ranks]
            if rows and rows[-1][0] == texts and node_size <= width:
                rows[-1][1].extend(ranks)
            else:
                rows.append((texts, ranks))
    shown = rows if every_rank else rows[:_MOST_ROWS]
    for texts, ranks in shown:
        words = [span(sorted({rank // node_size for rank in ranks})), span(ranks)]
        if extra is not None:
            words.append(extra[1](ranks))
        styled = [cells.get(rank, Text("-")) for rank in ranks[: len(texts)]]
        table.add_row(*words, *styled)
    if len(shown) < len(rows):
        table.add_row("...", f"{len(rows) - len(shown)} more: --all")
    return table


def _tensor_picture(report: ReshardReport, name: str, every_rank: bool) -> _Section:
    """Draw which slice of one tensor each rank holds on both sides."""
    shape = report.plan.src.tensors[name].shape
    table = _table()
    table.add_column("", style="bold", no_wrap=True)
    table.add_column("ranks", no_wrap=True)
    table.add_column("hold", no_wrap=True)
    table.add_column("", no_wrap=True)
    for side, layout in (("trainer", report.plan.src), ("engine", report.plan.dst)):
        rows = list(_slices(layout, name, shape))
        shown = rows if every_rank else rows[:_MOST_ROWS]
        for index, (ranks, what, bar) in enumerate(shown):
            colour = _COLOURS[index % len(_COLOURS)]
            table.add_row("" if index else side, ranks, what, Text(bar, colour))
        if len(shown) < len(rows):
            table.add_row("", "...", f"{len(rows) - len(shown)} more: --all")
        table.add_section()
    return _Section(f"one tensor: {name} [{' x '.join(map(str, shape))}]", table)


def _slices(layout: Layout, name: str, shape: Sequence[int]) -> Iterator[tuple[str, str, str]]:
    dim = cut_dim(layout, name)
    groups: dict[tuple[tuple[int, int], ...], list[int]] = defaultdict(list)
    for rank, boxes in held_boxes(layout, name).items():
        groups[extents_of(boxes, dim)].append(rank)
    size = shape[dim]
    for extents, ranks in sorted(groups.items()):
        filled = ["\u2591"] * _BAR
        for start, stop in extents:
            for i in range(start * _BAR // size, -(-stop * _BAR // size)):
                filled[i] = "\u2588"
        what = ", ".join(f"{start}-{stop - 1}" for start, stop in extents)
        yield span(ranks), f"{('rows', 'columns', 'last dim')[min(dim, 2)]} {what}", "".join(filled)


def _traffic_table(report: ReshardReport, every_rank: bool) -> _Section:
    """Add a row a rank, or for each class of equal ranks its least, mean and greatest."""
    table = _table()
    table.add_column("ranks", no_wrap=True)
    table.add_column("", no_wrap=True)
    units = {}
    for name, title in _BYTE_COLUMNS.items():
        unit, units[name] = _unit(max(report.column(name)))
        table.add_column(f"{title}\n{unit}", justify="right", no_wrap=True, vertical="bottom")
    table.add_column("peers", justify="right", no_wrap=True, vertical="bottom")

    def cells(values: Callable[[str], float]) -> list[str]:
        sizes = [f"{values(name) / units[name]:,.2f}" for name in _BYTE_COLUMNS]
        return [*sizes, f"{values('peers'):,.3g}"]

    for label, ranks in _classes(report, every_rank).items():
        _add_class(table, label, ranks, cells)
        if len(ranks) > 1:
            table.add_section()
    buckets = f"{report.plan.num_buckets:,} buckets of at most {_bytes(report.bucket_bytes)}"
    return _Section("what a rank moves", table, [f"{buckets} each way a rank"])


def _classes(report: ReshardReport, every_rank: bool) -> dict[str, Sequence[RankTraffic]]:
    """Group the ranks by pipeline stage, and all of them; each alone where they are few."""
    if every_rank or len(report.ranks) <= _CELLS_A_ROW:
        return {str(traffic.rank): [traffic] for traffic in report.ranks}
    groups: dict[int, list[RankTraffic]] = defaultdict(list)
    for traffic in report.ranks:
        inside = traffic.rank in report.source_ranks
        stage = stage_of(report.source, traffic.rank) if inside else report.source.pp
        groups[stage].append(traffic)
    if len(groups) > _MOST_ROWS:
        groups.clear()
    named: dict[str, Sequence[RankTraffic]]
    named = {span([t.rank for t in ranks]): ranks for _, ranks in sorted(groups.items())}
    return named if len(named) == 1 else {**named, "all": report.ranks}


def _add_class(
    table: Table,
    label: str,
    ranks: Sequence[RankTraffic],
    cells: Callable[[Callable[[str], float]], list[str]],
) -> None:
    def every(name: str) -> list[int]:
        return [getattr(traffic, name) for traffic in ranks]

    least, greatest = cells(lambda n: min(every(n))), cells(lambda n: max(every(n)))
    if least == greatest:
        table.add_row(label, "each" if len(ranks) > 1 else "", *least)
        return
    table.add_row(label, "min", *least)
    table.add_row("", "mean", *cells(lambda n: sum(every(n)) / len(ranks)))
    table.add_row("", "max", *greatest)


def _time_table(report: ReshardReport) -> _Section:
    """Show the parts of the estimate and what they rest on."""
    times = report.estimate
    table = _table()
    table.add_column("")
    for name in ("network", "NVLink", "memory", "calls", "in all"):
        table.add_column(name, justify="right", no_wrap=True)
    for label, parts in (("direct", times.direct), ("all-gather", times.allgather)):
        table.add_row(label, *(_seconds(part) for part in _parts(parts)))
    title = f"estimated time of the slowest rank: {times.gpu}, {times.network}"
    return _Section(title, table, [*times.assumptions, *(f"hint: {h}" for h in report.hints())])


def _parts(parts: Seconds) -> tuple[float, ...]:
    return parts.network, parts.nvlink, parts.memory, parts.calls, parts.total


def _unit(size: float) -> tuple[str, float]:
    return next(((name, unit) for name, unit in _UNITS if size >= unit), _UNITS[-1])


def _bytes(size: float) -> str:
    name, unit = _unit(size)
    return f"{size / unit:,.2f} {name}"


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"
