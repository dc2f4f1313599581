"""What was planned beside what was measured: batch arithmetic, seconds, memory."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from mrl.config import ConfigError
from mrl.config.schema import Config
from mrl.planning.advice import Advice, advise, facts_of
from mrl.planning.hardware import GB, Machine
from mrl.planning.plan import JobPlan, plan_job
from mrl.report.read import Run
from mrl.report.svg import number
from mrl.resharding.hardware import GPUS
from mrl.tracking.findings import WINDOW

_CHIPS = {  # as CUDA names them; others of these letters have other memory
    "h100": r"\bH100\b.*\b80GB\b",
    "h200": r"\bH200\b",
    "a100-80": r"\bA100\b.*\b80GB\b",
}


@dataclass(frozen=True, slots=True)
class Compared:
    """A quantity, what the plan says of it and what the run did; "": nothing is known."""

    name: str
    planned: str
    measured: str
    source: str  # where the two come from


@dataclass(frozen=True)
class Expectation:
    """What `mrl plan` expects of the run on its GPUs, at the lengths that it had."""

    phases: Mapping[str, float]  # s
    step: float  # s
    throughput: float  # tokens/s a GPU
    peak: float  # bytes of the fullest rank
    capacity: float  # bytes
    machine: str
    advice: tuple[Advice, ...]  # from the measured share of generation


def expectation(run: Run) -> Expectation | str:
    """Plan the run anew, or say why that cannot be done."""
    device = str(run.ranks[0]["device_name"]) if run.ranks else ""
    chip = next((c for c, name in _CHIPS.items() if re.search(name, device) and c in GPUS), None)
    if chip is None:
        return f"no plan of time and memory for {device or 'an unknown device'}"
    if not run.training or "response_length/mean" not in run.series:
        return "no plan of time and memory: no step of reinforcement learning is recorded"
    if not run.settings or run.config == Config():
        return "no plan of time and memory: config.yaml does not load here"
    try:
        job = plan_job(run.config, Machine.named(chip, None, _lengths(run)), exact_reshard=False)
    except (FileNotFoundError, ConfigError, ValueError) as error:
        return f"no plan of time and memory: {str(error).splitlines()[0]}"
    return _of(run, job)


def arithmetic(run: Run) -> Iterator[Compared]:
    """Compare the batch arithmetic of plan.json with the record."""
    plan = run.plan
    if not plan:
        return
    actor: Mapping[str, Any] = plan["roles"]["actor"]
    lengths = "data.max_response_length"
    yield Compared("ranks", number(plan["world_size"]), _count(len(run.ranks)), "ranks.json")
    if "response_length/mean" in run.series:
        samples = next((_lines(path) for path in run.latest("rollouts", 1)), 0)
        yield Compared("samples a step", number(plan["samples"]), _count(samples), "rollouts/")
        yield Compared(
            "longest response",
            number(run.settings[lengths]) if lengths in run.settings else "",
            _most(run, "response_length/max"),
            "tokens",
        )
        most = number(plan["tokens_per_step"])
        yield Compared(
            "tokens a step", f"at most {most}", _mean(run, "perf/total_num_tokens"), "mean"
        )
        yield Compared("engine replicas", number(plan["replicas"]), "", f"TP {plan['rollout_tp']}")
        yield Compared("optimizer steps", number(actor["optimizer_steps"]), "", "of one rollout")
    micro = actor["micro_batches"]
    yield Compared(
        "micro-batches of the actor",
        "by token budget" if micro is None else number(micro),
        _mean(run, "perf/micro_batches/actor"),
        "of one optimizer step, mean",
    )


def seconds(run: Run, expected: Expectation) -> Iterator[Compared]:
    """Compare the plan's seconds and bytes with the medians of the record."""
    for name in dict.fromkeys([*expected.phases]):
        planned = f"{expected.phases[name]:.3g} s"
        yield Compared(name, planned, _median(run, f"timing_s/{name}", " s"), "median step")
    yield Compared("step", f"{expected.step:.3g} s", _median(run, "timing_s/step", " s"), "median")
    planned = f"{expected.throughput:,.0f}"
    yield Compared("tokens/s a GPU", planned, _median(run, "perf/throughput"), "median")
    memory = next((n for n in _MEMORY if n in run.series), "")
    yield Compared(
        "memory of the fullest rank",
        f"{expected.peak / GB:.1f} of {expected.capacity / GB:.1f} GB",
        f"{max(run.series[memory].known):.1f} GB" if memory else "",
        memory,
    )


_MEMORY = ("perf/max_memory_reserved_gb", "perf/max_memory_allocated_gb")


def _of(run: Run, job: JobPlan) -> Expectation:
    share = job.time.generation_share
    rows = [row for row in run.training[-WINDOW:] if "timing_s/gen" in row]
    if rows:
        share = sum(r["timing_s/gen"] for r in rows) / sum(r["timing_s/step"] for r in rows)
    advice = advise(facts_of(job.job, job.memory, share))
    return Expectation(
        {phase.name: job.time.of(phase.name) for phase in job.time.phases},
        job.time.total,
        job.time.throughput,
        job.memory.peak.peak.total,
        job.memory.capacity,
        job.job.machine.gpu.name,
        tuple(a for a in advice if a.rule != "generation_share"),  # a warning already
    )


def _lengths(run: Run) -> list[str]:
    """Assume the lengths that were measured, as parts of their limits."""
    data = run.config.data
    longest = {"prompt": data.max_prompt_length, "response": data.max_response_length}
    return [
        f"{name}={max(fmean(run.series[f'{name}_length/mean'].known), 1e-3) / limit:.4g}"
        for name, limit in longest.items()
    ]


def _lines(path: Path) -> int:
    with path.open("rb") as file:
        return sum(1 for _ in file)


def _count(count: int) -> str:
    return number(count) if count else ""


def _known(run: Run, name: str) -> tuple[float, ...]:
    return run.series[name].known if name in run.series else ()


def _mean(run: Run, name: str) -> str:
    values = _known(run, name)
    return number(fmean(values)) if values else ""


def _most(run: Run, name: str) -> str:
    values = _known(run, name)
    return number(max(values)) if values else ""


def _median(run: Run, name: str, unit: str = "") -> str:
    values = _known(run, name)
    return (
        f"{median(values):.3g}{unit}"
        if values and unit
        else number(median(values))
        if values
        else ""
    )
