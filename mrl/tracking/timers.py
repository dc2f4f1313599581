"""Where the seconds of a step go."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager


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
    ) -> None:
        """Start the step; `synchronize` waits for the device before a phase's clock stops."""
        self._synchronize = synchronize
        self._clock = clock
        self._start = self._mark = clock()
        self._seconds: dict[str, float] = {}
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
        step = self._clock() - self._start
        rest = step - sum(self._seconds.values())
        phases = self._seconds | {"rest": rest, "step": step}
        return {f"timing_s/{phase}": seconds for phase, seconds in phases.items()}

    def _charge(self) -> None:
        """Book the time since the last change of phase to the innermost open one."""
        now = self._clock()
        if self._open:
            phase = self._open[-1]
            self._seconds[phase] = self._seconds.get(phase, 0.0) + now - self._mark
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
