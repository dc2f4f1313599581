"""The whole plan of a job: memory, time, verdict, advice."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from mrl.config import Config, RunPlan, build_plan
from mrl.planning.advice import Advice, advise, facts_of
from mrl.planning.change import Fix, cheapest_fixes, words
from mrl.planning.compute import StepTime, plan_time
from mrl.planning.hardware import Machine
from mrl.planning.job import Job
from mrl.planning.memory import MemoryPlan, plan_memory

_MOST_EXACT = 32  # ranks whose weight update is planned slice by slice, in about a second


@dataclass(frozen=True)
class JobPlan:
    """What a job needs, how fast it should be and whether it fits."""

    job: Job
    memory: MemoryPlan
    time: StepTime
    reshard_bytes: float | None  # that the busiest rank receives in a weight update

    @property
    def fits(self) -> bool:
        """Tell whether every phase fits every rank and the engine can hold a sequence."""
        return not self.memory.problems

    @property
    def binds(self) -> str:
        """Say what is closest to the limit, or what breaks it."""
        if self.memory.problems:
            return "; ".join(self.memory.problems)
        worst = self.memory.peak.peak
        name = max(worst.parts, key=worst.parts.__getitem__)
        return f"{worst.name} takes most, there {name}"

    @cached_property
    def advice(self) -> tuple[Advice, ...]:
        """Give the advice of the tuning checklist."""
        return advise(facts_of(self.job, self.memory, self.time.generation_share))

    @cached_property
    def fixes(self) -> tuple[Fix, ...]:
        """Give the cheapest changes that make the job fit; none where it fits."""
        return () if self.fits else cheapest_fixes(self.job)

    def to_json(self) -> dict[str, Any]:
        """Give the plan as JSON types: the run's numbers, then bytes and seconds."""
        machine, engine = self.job.machine, self.memory.engine
        return {
            **self.job.plan.to_json(),
            "hardware": {
                "gpu": machine.gpu.name,
                "network": machine.network.name,
                "assumptions": {name: value for name, value, _ in machine.assume.rows()},
            },
            "fits": self.fits,
            "binds": self.binds,
            "fixes": [
                {"overrides": words(f.change), "peak_bytes": round(f.memory), "step": f.seconds}
                for f in self.fixes
            ],
            "memory": {
                "capacity": round(self.memory.capacity),
                "groups": [group.to_json() for group in self.memory.groups],
                "engine": {
                    "kv_bytes": round(engine.kv),
                    "kv_bytes_a_token": engine.kv_token,
                    "tokens": engine.tokens,
                    "sequences": engine.sequences,
                },
            },
            "seconds": self.time.to_json() | {"reshard_bytes": self.reshard_bytes},
            "advice": [
                {"rule": a.rule, "key": a.key, "found": a.found, "text": a.text}
                for a in self.advice
            ],
        }


def plan_job(config: Config, machine: Machine, exact_reshard: bool = True) -> JobPlan:
    """Plan a checked config on a machine.

    With `exact_reshard` the weight update of up to 32 ranks is planned slice by slice, else it is
    bounded by the model's bytes (`mrl reshard` plans any size). Raises FileNotFoundError where a
    model folder has no config.json.
    """
    plan: RunPlan = build_plan(config)
    job = Job.of(config, plan, machine)
    seconds = received = None
    few = plan.world_size <= _MOST_EXACT
    if exact_reshard and few and config.rollout.name == "vllm":
        from mrl.resharding.report import build_report  # numpy and scipy

        report = build_report(config, machine.name, machine.network_name)
        seconds, received = report.estimate.direct.total, float(max(report.column("received")))
    return JobPlan(job, plan_memory(job), plan_time(job, seconds), received)
