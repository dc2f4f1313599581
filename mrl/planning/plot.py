"""Memory by phase as a picture: one bar a phase for each class of ranks."""

from __future__ import annotations

from pathlib import Path

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from mrl.planning.hardware import GB
from mrl.planning.memory import RankMemory
from mrl.planning.plan import JobPlan

_MOST_GROUPS = 3
_WIDTH, _HEIGHT, _DOTS = 10.0, 2.6, 120  # inches, inches a class of ranks, dots an inch
_PARTS = (
    "parameters",
    "gradients",
    "optimizer",
    "activations",
    "head",
    "engine",
    "kv cache",
    "buckets",
    "context",
)


def save_plot(plan: JobPlan, path: Path) -> None:
    """Write a PNG; raises ValueError where the name does not end in `.png`."""
    if path.suffix.lower() != ".png":
        raise ValueError(f"--plot {path}: the picture is a PNG; name it {path.with_suffix('.png')}")
    groups = plan.memory.groups[:_MOST_GROUPS]
    figure = Figure(figsize=(_WIDTH, 1.2 + _HEIGHT * len(groups)), layout="constrained")
    rows: list[Axes] = list(figure.subplots(len(groups), 1, squeeze=False)[:, 0])
    most = max(group.peak.total for group in groups)
    for axes, group in zip(rows, groups, strict=True):
        _draw(axes, plan, group)
        axes.set_xlim(0, 1.12 * max(most, plan.memory.capacity) / GB)
    rows[-1].set_xlabel("GB a GPU")
    handles, labels = rows[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5, fontsize=8)
    verdict = "fits" if plan.fits else "does not fit"
    figure.suptitle(
        f"{plan.job.config.model.path} on {plan.job.plan.world_size} {plan.job.machine.gpu.name}: "
        f"{verdict}; {plan.time.total:,.1f} s a step, {plan.time.throughput:,.0f} tokens/s a GPU",
        fontsize=10,
    )
    figure.savefig(path, dpi=_DOTS)


def _draw(axes: Axes, plan: JobPlan, group: RankMemory) -> None:
    names = [phase.name for phase in group.phases]
    left = [0.0] * len(names)
    for index, part in enumerate(_PARTS):
        sizes = [phase.parts.get(part, 0.0) / GB for phase in group.phases]
        colour = colormaps["tab10"](index)
        axes.barh(names, sizes, left=left, label=part, color=colour, height=0.7)
        left = [a + b for a, b in zip(left, sizes, strict=True)]
    for row, total in enumerate(left):
        axes.text(total, row, f" {total:.1f}", va="center", fontsize=8)
    axes.axvline(plan.memory.capacity / GB, color="black", linestyle="--", linewidth=1)
    axes.invert_yaxis()
    stages = ", ".join(f"{role} stage {stage}" for role, stage in group.stages.items())
    axes.set_title(
        f"ranks {group.ranks[0]}-{group.ranks[-1]} ({len(group.ranks)}): {stages or 'engine'}",
        fontsize=9,
        loc="left",
    )
    axes.spines[["top", "right"]].set_visible(False)
