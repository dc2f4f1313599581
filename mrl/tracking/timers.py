"""Where the seconds of a step go."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from mrl.workers.busy import RankSeconds, add, rank_metrics

# The phases in which ranks work on rows of their own, so that one can be slower than others.
RANKED = ("gen", "old_log_prob", "ref", "values", "update_critic", "update_actor")


class Timers:
    """The clock of one step, started when it is made.

    Phases add up: a phase inside another takes its time from the outer one, and what no phase
    covers is `rest`, so that the parts and the rest are the step. A phase that waits for work
    overlapped with others measures the wait alone.

    Example:
        timers = Timers()
        with timers("gen"):
            samples = rollout.generate(prompts)
        timers.metrics()  # {"timing_s/gen": ..., "timing_s/rest": ..., "timing_s/step": ...}
    """

    def __init__(
        self,
        synchronize: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.perf_counter,
        ranks: RankSeconds | None = None,
    ) -> None:
        """Start the step.

        `synchronize` waits for the device before a phase's clock stops; `ranks` knows how long
        each rank itself worked.
        """
        self._synchronize = synchronize
        self._clock = clock
        self._ranks = ranks or RankSeconds()
        self._start = self._mark = clock()
        self._end: float | None = None  # when it was read
        self._seconds: dict[str, float] = {}
        self._of_ranks: dict[str, dict[int, float]] = {}
        self._open: list[str] = []
        self.failed_phase = "rest"  # the innermost that an exception has left

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Time a phase; entered again, it adds up."""
        if phase in ("step", "rest"):
            raise ValueError(f"a phase cannot be named {phase!r}: that is computed")
        self._charge()
        self._open.append(phase)
        try:
            yield
            self._synchronize()
        except BaseException:
            if self.failed_phase == "rest":
                self.failed_phase = phase
            raise
        finally:
            self._charge()
            self._open.pop()

    def metrics(self) -> dict[str, float]:
        """Give timing_s/<phase>, timing_s/rest and timing_s/step so far, in seconds."""
        self._end = self._clock()
        step = self._end - self._start
        rest = step - sum(self._seconds.values())
        phases = self._seconds | {"rest": rest, "step": step}
        return {f"timing_s/{phase}": seconds for phase, seconds in phases.items()}

    def rank_metrics(self) -> dict[str, float]:
        """Give perf/{rank_seconds,rank_spread,slowest_rank}/<phase> of what several ranks did."""
        found: dict[str, float] = {}
        for phase in RANKED:
            found |= rank_metrics(phase, self._of_ranks.get(phase, {}))
        return found

    def next(self) -> Timers:
        """Start the step after this one: where this one was read, so that no second is lost."""
        after = Timers(self._synchronize, self._clock, self._ranks)
        if self._end is not None:
            after._start = after._mark = self._end
        return after

    def _charge(self) -> None:
        """Book the time since the last change of phase to the innermost open one."""
        now, of_ranks = self._clock(), self._ranks.take()
        if self._open:
            phase = self._open[-1]
            self._seconds[phase] = self._seconds.get(phase, 0.0) + now - self._mark
            add(self._of_ranks.setdefault(phase, {}), of_ranks)
        self._mark = now


def throughput_metrics(
    timings: Mapping[str, float], total_tokens: int, response_tokens: int, num_gpus: int
) -> dict[str, float]:
    """Turn the timings of one step into rates.

    Args:
        timings: `Timers.metrics()`.
        total_tokens: prompt and response tokens of this step alone, over all ranks, no padding.
        response_tokens: those of the responses.
        num_gpus: every GPU of the job, whichever role it serves.

    Returns:
        perf/throughput in tokens a second and GPU, perf/total_num_tokens, perf/time_per_step in
        seconds, and timing_per_token_ms/<phase> (generation by response tokens, others by all).
    """
    step = timings["timing_s/step"]
    rates = {
        "perf/total_num_tokens": float(total_tokens),
        "perf/time_per_step": step,
        "perf/throughput": total_tokens / (step * num_gpus),
    }
    for phase in ("gen", "ref", "values", "adv", "update_critic", "update_actor"):
        tokens = response_tokens if phase == "gen" else total_tokens
        if f"timing_s/{phase}" in timings and tokens:
            rates[f"timing_per_token_ms/{phase}"] = 1e3 * timings[f"timing_s/{phase}"] / tokens
    return rates
