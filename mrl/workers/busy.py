"""How long each rank itself works at a call, and which one the others wait for."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch


class Timed(NamedTuple):
    """What a rank answers, with its own seconds at the call."""

    value: Any
    seconds: float


class BusyClock:
    """Times the calls of one rank, one at a time.

    A call is the rank's own work until it meets ranks that work on other rows: it may wait for them
    then.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self.start()

    def start(self) -> None:
        """Begin a call."""
        self._called = time.perf_counter()
        self._begun = self._now()
        self._met: Any = None

    def until[**P, T](self, meeting: Callable[P, T]) -> Callable[P, T]:
        """Make a function one that ends the rank's own part of a call."""

        def meet(*args: P.args, **kwargs: P.kwargs) -> T:
            self._met = self._now()
            return meeting(*args, **kwargs)

        return meet

    def seconds(self) -> float:
        """Give the rank's own seconds of the call that is over."""
        if self._met is None:
            return time.perf_counter() - self._called
        if not self._on_gpu:
            return float(self._met - self._begun)
        self._met.synchronize()  # passed long ago: an update ends with a number from the device
        return float(self._begun.elapsed_time(self._met)) / 1e3

    def _now(self) -> Any:
        """Mark a point of the device's work: on a GPU the host is ahead of it."""
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


class RankSeconds:
    """The own seconds of the ranks that were asked, since they were last taken."""

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}

    def add(self, answers: Iterable[Mapping[int, float]]) -> None:
        """Add what ranks took for calls."""
        for seconds in answers:
            add(self._seconds, seconds)

    def take(self) -> dict[int, float]:
        """Give the sums and start anew."""
        taken, self._seconds = self._seconds, {}
        return taken


def add(sums: dict[int, float], seconds: Mapping[int, float]) -> None:
    """Add the seconds of ranks to their sums."""
    for rank, own in seconds.items():
        sums[rank] = sums.get(rank, 0.0) + own


def rank_metrics(phase: str, seconds: Mapping[int, float]) -> dict[str, float]:
    """Say how unevenly a phase's work lay on the ranks that were asked; nothing of one alone.

    Ranks that hold one copy of a model work in step and take the same time: the slowest is one of
    them.
    """
    if len(seconds) < 2:
        return {}
    mean = sum(seconds.values()) / len(seconds)
    slowest = max(seconds, key=seconds.__getitem__)
    return {
        f"perf/rank_seconds/{phase}": mean,
        f"perf/rank_spread/{phase}": seconds[slowest] / mean if mean else 1.0,
        f"perf/slowest_rank/{phase}": float(slowest),
    }
