"""What the planner says of a configuration."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.eight.entries import Numbers
from mrl.config import Config, build_plan
from mrl.planning.compute import forward, update
from mrl.planning.hardware import GB, Machine
from mrl.planning.job import Job
from mrl.planning.memory import plan_memory
from mrl.planning.plan import plan_job

# Parts of a phase's memory that torch's allocator does not hold.
_OUTSIDE = ("engine", "kv cache", "context")


def passes(config: Config, gpu: str, assume: Sequence[str] = ()) -> Numbers:
    """Predict the actor's passes over a rollout: seconds, and GB that the allocator holds."""
    job = Job.of(config, build_plan(config), Machine.named(gpu, None, assume))
    actor = next(role for role in job.roles if role.name == "actor")
    trained = [
        phase
        for group in plan_memory(job).groups
        for phase in group.phases
        if phase.name == "update actor"
    ]
    peak = max(
        sum(size for name, size in phase.parts.items() if name not in _OUTSIDE) for phase in trained
    )
    one = update(job, actor)
    return {
        "update_s": one.total,
        "log_probs_s": forward(job, actor, "old_log_prob").total,
        "tflops_per_gpu": one.flops / one.total / 1e12,
        "memory_gb": peak / GB,
    }


def steps(config: Config, gpu: str, response: float) -> Numbers:
    """Predict a whole step; `response` is the mean response over the longest."""
    plan = plan_job(config, Machine.named(gpu, None, [f"response={response}"]))
    peak = max(phase.total for group in plan.memory.groups for phase in group.phases)
    return {
        "step_s": plan.time.total,
        **{f"{phase.name}_s": phase.total for phase in plan.time.phases},
        "tokens_per_s_per_gpu": plan.time.throughput,
        "memory_gb": peak / GB,
    }
