"""Numbers that know how to be reduced over micro-batches and ranks.

The kind is declared where the number is made, never guessed from its name: a mean carries its
weight, so that 3 of 12 and 3 of 4 merge to 6 of 16. Merging is a union over what was gathered: a
name that some ranks lack is reduced over those that have it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from mrl.pickling import ByFields


@dataclass(frozen=True, slots=True)
class Mean(ByFields):
    """A weighted mean: the sum of weight times value, and the sum of the weights."""

    total: float
    weight: float

    @staticmethod
    def of(values: Iterable[float]) -> Mean:
        """Average equally weighted values."""
        items = list(values)
        return Mean(math.fsum(items), len(items))

    def merge(self, other: Mean) -> Mean:
        """Join two parts."""
        return Mean(self.total + other.total, self.weight + other.weight)

    @property
    def value(self) -> float | None:
        """Give the mean; None when nothing was counted."""
        return self.total / self.weight if self.weight else None


@dataclass(frozen=True, slots=True)
class Sum(ByFields):
    """A sum of disjoint parts; ranks that hold replicas of a part must report it once."""

    value: float

    def merge(self, other: Sum) -> Sum:
        """Join two parts."""
        return Sum(self.value + other.value)


@dataclass(frozen=True, slots=True)
class Max(ByFields):
    """A largest value."""

    value: float

    def merge(self, other: Max) -> Max:
        """Join two parts; NaN wins, so that a fault stays visible."""
        return Max(math.nan if math.isnan(other.value) else max(self.value, other.value))


@dataclass(frozen=True, slots=True)
class Min(ByFields):
    """A smallest value."""

    value: float

    def merge(self, other: Min) -> Min:
        """Join two parts; NaN wins, so that a fault stays visible."""
        return Min(math.nan if math.isnan(other.value) else min(self.value, other.value))


@dataclass(frozen=True, slots=True)
class Same(ByFields):
    """A number that all parts hold alike, as a learning rate or the norm of all gradients."""

    value: float

    def merge(self, other: Same) -> Same:
        """Join two parts; NaN wins, so that a fault stays visible."""
        return Same(math.nan if math.isnan(other.value) else max(self.value, other.value))


Metric = Mean | Sum | Max | Min | Same


def merge(parts: Iterable[Mapping[str, Metric]]) -> dict[str, Metric]:
    """Reduce the metrics of several micro-batches or ranks by their declared kinds.

    Raises:
        ValueError: a name is declared with two kinds.
    """
    merged: dict[str, Metric] = {}
    for number, part in enumerate(parts):
        for name, metric in part.items():
            if name not in merged:
                merged[name] = metric
                continue
            held = merged[name]
            if type(held) is not type(metric):
                raise ValueError(
                    f"metric {name!r} is a {type(held).__name__} in an earlier part and a "
                    f"{type(metric).__name__} in part {number}; declare it with one kind"
                )
            merged[name] = held.merge(metric)  # type: ignore[arg-type]
    return merged


def over_updates(updates: Sequence[Mapping[str, Metric]]) -> dict[str, float]:
    """Join what several optimizer steps report: extremes stay extremes, others are averaged.

    Every optimizer step counts alike; one that lacks a name has no part in it.
    """
    found: dict[str, list[Metric]] = {}
    for update in updates:
        for name, metric in update.items():
            if metric.value is not None:
                found.setdefault(name, []).append(metric)
    joined: dict[str, Metric] = {}
    for name, metrics in found.items():
        if isinstance(metrics[0], Max | Min):
            joined |= merge({name: metric} for metric in metrics)
        else:
            joined[name] = Mean.of(metric.value for metric in metrics if metric.value is not None)
    return reduced(joined)


def reduced(metrics: Mapping[str, Metric]) -> dict[str, float]:
    """Give the plain numbers; a mean over nothing has none and is left out."""
    return {name: m.value for name, m in metrics.items() if m.value is not None}
