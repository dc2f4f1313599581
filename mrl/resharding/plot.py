"""A reshard report as a picture: layers, one tensor's slices and traffic over the ranks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from mrl.resharding.draw import source_words, target_words
from mrl.resharding.holdings import cut_dim, extents_of, held_boxes, layer_of, shown_tensor
from mrl.resharding.layout import Layout
from mrl.resharding.report import ReshardReport

_SIZE = (12.0, 10.0)  # inches
_DOTS = 110  # an inch
_MARGIN = 14  # a layer picture's height is this many times that of the rows outside layers
_PIXELS = 512  # rows of a tensor's picture
_WINDOW = 64  # ranks of a tensor's picture
_MOST_NODES = 32  # with lines between them


def save_plot(report: ReshardReport, path: Path, tensor: str | None = None) -> None:
    """Write a PNG: the layers and the slices of one tensor on both sides, and the traffic.

    Raises ValueError where the model has no such tensor or the name does not end in `.png`.
    """
    if path.suffix.lower() != ".png":
        raise ValueError(f"--plot {path}: the picture is a PNG; name it {path.with_suffix('.png')}")
    name = shown_tensor(report, tensor)
    figure = Figure(figsize=_SIZE, layout="constrained")
    axes: dict[str, Axes] = figure.subplot_mosaic(
        [["source", "target"], ["rows_source", "rows_target"], ["traffic", "traffic"]],
        height_ratios=[1.2, 1.0, 1.0],
    )
    shards = max(report.source.tp, report.target.tp)
    colours = _colours(shards)
    sides = (
        ("source", f"trainer: {source_words(report)}", report.plan.src),
        ("target", f"engine: {target_words(report)}", report.plan.dst),
    )
    for key, title, layout in sides:
        shard = _shard_of_rank(report, key)
        _draw_layers(axes[key], report, layout, shard, title, colours)
        _draw_slices(axes[f"rows_{key}"], report, layout, shard, name, colours)
    if shards > 1:
        bar = figure.colorbar(axes["source"].images[0], ax=[axes["source"], axes["target"]])
        bar.set_label("tensor-parallel shard", fontsize=8)
        bar.locator = MaxNLocator(integer=True)
        bar.update_ticks()
    _draw_traffic(axes["traffic"], report)
    figure.suptitle(
        f"{report.model_path}: {report.model_bytes / 1e9:,.2f} GB; a rank receives "
        f"{report.mean('received') / 1e9:,.2f} GB, an all-gather "
        f"{report.mean('allgather') / 1e9:,.2f} GB (mean)"
    )
    figure.savefig(path, dpi=_DOTS)


def _colours(shards: int) -> ListedColormap:
    return ListedColormap(colormaps["turbo"](np.linspace(0.08, 0.92, shards)))


def _shard_of_rank(report: ReshardReport, side: str) -> dict[int, int]:
    """Map each rank of one side to its tensor-parallel rank, the colour of the picture."""
    source, target = report.source, report.target
    if side == "source":
        return {source.first_rank + i: i % source.tp for i in range(source.world_size)}
    slots = report.slots
    return {target.first_rank + i: slot % target.tp for i, slot in enumerate(slots)}


def _draw_layers(
    axes: Axes,
    report: ReshardReport,
    layout: Layout,
    shard: dict[int, int],
    title: str,
    colours: ListedColormap,
) -> None:
    """Fill (rank, layer) where the rank holds something of the layer, coloured by its shard."""
    layers, world = report.shape.num_layers, len(report.ranks)
    margin = max(1, layers // _MARGIN)  # rows of what belongs to no layer
    rows = {"first": slice(0, margin), "last": slice(margin + layers, None)}
    grid = np.full((layers + 2 * margin, world), np.nan)
    for piece in layout.pieces:
        layer = layer_of(piece.tensor)
        place = rows["first" if "embed" in piece.param else "last"]
        for rank in piece.ranks:
            grid[place if layer is None else margin + layer, rank] = shard[rank]
    _show(axes, grid, colours, len(grid))
    ticks = [t for t in MaxNLocator(6, integer=True).tick_values(0, layers) if 0 < t < layers - 1]
    labels = {margin / 2: "embedding", margin + layers + margin / 2: "norm, head"}
    labels |= {margin + t + 0.5: f"layer {t:.0f}" for t in ticks}
    axes.set_yticks(list(labels), list(labels.values()), fontsize=8)
    _mark_nodes(axes, report)
    axes.set_title(f"{title}: who holds which layers", loc="left", fontsize=10)


def _draw_slices(
    axes: Axes,
    report: ReshardReport,
    layout: Layout,
    shard: dict[int, int],
    name: str,
    colours: ListedColormap,
) -> None:
    """Fill (rank, row) where the rank holds the row (or column) of the tensor."""
    shape, dim = layout.tensors[name].shape, cut_dim(layout, name)
    size, held = shape[dim], held_boxes(layout, name)
    pixels = min(size, _PIXELS)
    first = min(held) // report.ranks_a_node * report.ranks_a_node
    if len(report.ranks) <= _WINDOW:
        first = 0
    ranks = range(first, min(first + _WINDOW, len(report.ranks)))
    grid = np.full((pixels, len(ranks)), np.nan)
    for rank in ranks:
        for start, stop in extents_of(held.get(rank, ()), dim):
            low = start * pixels // size
            grid[low : max(low + 1, stop * pixels // size), rank - first] = shard[rank]
    _show(axes, grid, colours, size, first)
    axes.set_ylabel(("row", "column", "last dimension")[min(dim, 2)])
    _mark_nodes(axes, report)
    axes.set_title(f"{name} {list(shape)}", loc="left", fontsize=10)


def _show(
    axes: Axes, grid: np.ndarray, colours: ListedColormap, height: int, first: int = 0
) -> None:
    """Paint grid [rows, ranks from `first`] of shards, NaN left white, rows scaled to `height`."""
    axes.imshow(
        grid,
        aspect="auto",
        interpolation="nearest",
        cmap=colours,
        vmin=-0.5,
        vmax=colours.N - 0.5,
        extent=(first - 0.5, first + grid.shape[1] - 0.5, height, 0),
    )


def _mark_nodes(axes: Axes, report: ReshardReport) -> None:
    """Draw lines between nodes where they are few, and label the ranks."""
    first, last = (round(end + 0.5) for end in axes.get_xlim())
    node = report.ranks_a_node
    edges = range(first + node - first % node, last, node)
    if len(edges) < _MOST_NODES:
        for edge in edges:
            axes.axvline(edge - 0.5, color="black", linewidth=0.4, alpha=0.6)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=16, min_n_ticks=1))
    axes.set_xlabel("rank")


def _draw_traffic(axes: Axes, report: ReshardReport) -> None:
    """Draw bars of what each rank needs, and the line of what an all-gather delivers to it."""
    ranks = report.column("rank")
    local, received, floor, gathered = (
        np.array(report.column(name)) / 1e9 for name in ("local", "received", "floor", "allgather")
    )
    axes.bar(ranks, local, width=0.85, color="0.8", label="local copy")
    axes.bar(ranks, received, width=0.85, bottom=local, color="tab:blue", label="received")
    axes.step(
        ranks, local + floor, where="mid", color="black", linestyle=":", label="local + floor"
    )
    axes.step(ranks, gathered, where="mid", color="tab:red", label="received by an all-gather")
    axes.set_ylabel("GB")
    axes.set_ylim(bottom=0)
    axes.set_xlim(-0.5, len(ranks) - 0.5)
    _mark_nodes(axes, report)
    axes.legend(ncols=4, fontsize=8, loc="lower right", bbox_to_anchor=(1.0, 1.0), frameon=False)
    axes.set_title("what a rank moves", loc="left", fontsize=10)
