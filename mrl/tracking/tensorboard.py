"""TensorBoard: scalars, histograms and text tables, by one writer."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.utils.tensorboard import SummaryWriter

from mrl.tracking.metrics import Chunks

_BINS = 50


class TensorBoard:
    """The run's only event writer; the controller owns it."""

    def __init__(self, folder: Path | str, purge_step: int | None) -> None:
        """Open `folder`; after resuming from step k, `purge_step=k + 1` hides the later values
        that the interrupted run wrote, so that every step has one.
        """
        self._writer = SummaryWriter(log_dir=str(folder), purge_step=purge_step)

    def scalars(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of one step and flush them."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def histograms(self, step: int, values: Mapping[str, Chunks]) -> None:
        """Write how values are spread, in equal bins; what is not finite is left out."""
        for name, chunks in values.items():
            if spread := _spread(chunks):
                self._writer.add_histogram_raw(name, global_step=step, **spread)

    def table(
        self, step: int, name: str, header: Sequence[str], rows: Sequence[Sequence[object]]
    ) -> None:
        """Write a text table."""
        lines = [header, ["---"] * len(header), *rows]
        text = "\n".join("| " + " | ".join(_cell(c) for c in line) + " |" for line in lines)
        self.text(step, name, text)

    def text(self, step: int, name: str, markdown: str) -> None:
        """Write text, shown as markdown, and flush it."""
        self._writer.add_text(name, markdown, step)
        self._writer.flush()

    def close(self) -> None:
        """Write what is left."""
        self._writer.close()

    def __enter__(self) -> TensorBoard:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _spread(chunks: Chunks) -> dict[str, Any]:
    """Count values by bin, as `add_histogram_raw` takes them; empty where there are none.

    Two passes, some values at a time: a step has tens of millions of them.
    """
    low, high, count, total, squares = math.inf, -math.inf, 0, 0.0, 0.0
    for values in _finite(chunks):
        low, high = min(low, float(values.min())), max(high, float(values.max()))
        count += len(values)
        total += float(values.sum(dtype=torch.float64))
        squares += float(values.square().sum(dtype=torch.float64))
    if not count:
        return {}
    bins = _BINS if high > low else 1
    counts = torch.zeros(bins, dtype=torch.float64)
    for values in _finite(chunks):
        # torch widens an empty range by itself
        counts += torch.histc(values, bins, low, high)
    return {
        "min": low,
        "max": high,
        "num": count,
        "sum": total,
        "sum_squares": squares,
        "bucket_limits": torch.linspace(low, high, bins + 1, dtype=torch.float64)[1:].tolist(),
        "bucket_counts": counts.tolist(),
    }


def _finite(chunks: Chunks) -> Iterator[Tensor]:
    for part in chunks():
        values = part.float()
        finite = values.isfinite()
        values = values if bool(finite.all()) else values[finite]
        if len(values):
            yield values


def _cell(value: object) -> str:
    """Keep a value inside its markdown cell: no bar, tag or line break of its own."""
    text = str(value).replace("&", "&amp;").replace("<", "&lt;").replace("|", "&#124;")
    return "<br>".join(text.splitlines())
