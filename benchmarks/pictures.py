"""Records as pictures: the share of the hardware that is used, and the phases of a step."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib import colormaps
from matplotlib.figure import Figure as Picture

from benchmarks.figures import Record

_WIDTH, _ROW, _DOTS = 10.0, 0.26, 110  # inches, inches a bar, dots an inch
_LEAST_HEIGHT = 2.2
# The phases of a step in their order, a colour each in every picture.
PHASES = (
    "gen", "reward", "old_log_prob", "ref", "values", "adv", "update_critic", "update_actor",
    "reshard", "testing", "save_checkpoint", "rest",
)  # fmt: skip


def _save(picture: Any, path: Path) -> bool:
    picture.savefig(path, dpi=_DOTS, metadata={"Software": None})  # the same bytes everywhere
    return True


def _bars(count: int) -> tuple[Any, Any]:
    height = max(_LEAST_HEIGHT, 1.0 + _ROW * count)
    picture = Picture(figsize=(_WIDTH, height), layout="constrained")
    axes = picture.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8)
    return picture, axes


def save_roofline(records: Sequence[Record], path: Path) -> bool:
    """Draw the share of the roofline of every figure that has one; False where none has."""
    found = [
        (record.name, figure)
        for record in records
        for figure in record.figures
        if figure.attained is not None
    ]
    if not found:
        return False
    picture, axes = _bars(len(found))
    names = list(dict.fromkeys(name for name, _ in found))
    for row, (name, figure) in enumerate(found):
        share = 100 * (figure.attained or 0.0)
        axes.barh(row, share, color=colormaps["tab10"](names.index(name) % 10), height=0.75)
        axes.text(share, row, f" {share:.0f} %", va="center", fontsize=7)
    axes.set_yticks(range(len(found)), [f"{n}: {f.name}" for n, f in found], fontsize=7)
    axes.axvline(100, color="black", linestyle="--", linewidth=1)
    axes.set_ylim(len(found) - 0.5, -0.5)
    axes.set_xlabel("% of what the hardware allows (dashed: the roofline)")
    return _save(picture, path)


def save_phases(records: Sequence[Record], path: Path) -> bool:
    """Draw the median seconds of each phase of whole steps, stacked; False without such steps."""
    steps = [
        (f"{record.name}: {case}", medians(found["timings"]))
        for record in records
        for case, found in record.result.items()
        if isinstance(found, Mapping) and "timings" in found
    ]
    if not steps:
        return False
    picture, axes = _bars(2 * len(steps))
    left = [0.0] * len(steps)
    for index, phase in enumerate(PHASES):
        sizes = [seconds.get(phase, 0.0) for _, seconds in steps]
        if any(sizes):
            colour = colormaps["tab20"](index)
            axes.barh(range(len(steps)), sizes, left=left, label=phase, color=colour, height=0.7)
        left = [a + b for a, b in zip(left, sizes, strict=True)]
    for row, total in enumerate(left):
        axes.text(total, row, f" {total:.1f} s", va="center", fontsize=8)
    axes.set_yticks(range(len(steps)), [name for name, _ in steps], fontsize=8)
    axes.set_ylim(len(steps) - 0.5, -0.5)
    axes.set_xlabel("seconds a step, the median of each phase")
    picture.legend(loc="outside lower center", ncols=6, fontsize=8)
    return _save(picture, path)


def medians(timings: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Give the median of each phase over all steps but the first, which warms up."""
    named = {name.removeprefix("timing_s/"): values[1:] for name, values in timings.items()}
    return {
        phase: statistics.median(values)
        for phase, values in named.items()
        if phase != "step" and values
    }
