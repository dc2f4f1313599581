"""Configs with some keys changed, and the cheapest change that makes a job fit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

from mrl.config import Config, build_plan, check_config
from mrl.planning.compute import plan_time
from mrl.planning.hardware import Machine
from mrl.planning.job import Job
from mrl.planning.memory import MemoryPlan, plan_memory

_MOST_TOKENS = 4  # the budget may be cut that many times in half

Change = Mapping[str, Any]


@dataclass(frozen=True)
class Fix:
    """A change, and what the job then needs."""

    change: Change
    memory: float  # bytes at the peak
    seconds: float  # of a step

    def __str__(self) -> str:
        return words(self.change)


def words(change: Change) -> str:
    """Write a change as overrides."""
    return " ".join(f"{key}={_text(value)}" for key, value in change.items())


def _text(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return f"[{','.join(map(str, value))}]" if isinstance(value, tuple) else str(value)


def changed(config: Config, change: Change) -> Config:
    """Give the config with other values at dotted keys; nothing is checked."""
    tree: Any = config
    for key, value in change.items():
        tree = _put(tree, key.split("."), value)
    found: Config = tree
    return found


def _put(node: Any, path: list[str], value: Any) -> Any:
    name, *rest = path
    inner = _put(vars(node)[name], rest, value) if rest else value
    return replace(node, **{name: inner})


def tried(config: Config, change: Change, machine: Machine) -> tuple[Job, MemoryPlan] | None:
    """Plan a changed config; None where it is not legal."""
    other = changed(config, change)
    if check_config(other):
        return None
    job = Job.of(other, build_plan(other), machine)
    return job, plan_memory(job)


def cheapest_fixes(job: Job, count: int = 2) -> tuple[Fix, ...]:
    """Find the changes that make a job fit and cost least time: single ones, else pairs."""
    single = list(_candidates(job))
    found = [fix for change in single if (fix := _fix(job, change))]
    if not found:
        pairs = [{**a, **b} for a, b in combinations(single, 2) if not a.keys() & b.keys()]
        found = [fix for change in pairs if (fix := _fix(job, change))]
    if not found:  # all that saves memory at once, then ever more nodes
        saving = _all_that_saves(job)
        nodes = job.config.trainer.nnodes
        more = [{**saving, "trainer.nnodes": nodes * 2**k} for k in range(5)]
        found = [fix for change in more if (fix := _fix(job, change))][:count]
    return tuple(sorted(found, key=lambda fix: fix.seconds)[:count])


def _fix(job: Job, change: Change) -> Fix | None:
    done = tried(job.config, change, job.machine)
    if done is None or done[1].problems:
        return None
    return Fix(change, done[1].peak.peak.total, plan_time(done[0]).total)


def _candidates(job: Job) -> Iterator[Change]:
    """List single changes that lower the need of some phase, from the config as it is."""
    config, m, rollout = job.config, job.config.actor.megatron, job.config.rollout
    for part in ("optimizer_offload", "grad_offload", "param_offload"):
        if not vars(m)[part]:
            yield {f"actor.megatron.{part}": True}
    yield {f"actor.megatron.{p}_offload": True for p in ("param", "grad", "optimizer")}
    yield from _smaller_batches(job)
    yield from _recompute(job)
    if not config.actor.optim.use_precision_aware_optimizer and m.use_distributed_optimizer:
        yield _bf16_moments("actor")
    if not m.use_distributed_optimizer:
        yield {"actor.megatron.use_distributed_optimizer": True}
    for name in ("tensor", "pipeline"):
        key = f"{name}_model_parallel_size"
        yield {f"actor.megatron.{key}": 2 * vars(m)[key]}
    yield {"actor.megatron.context_parallel_size": 2 * m.context_parallel_size}
    if job.shape.moe:
        yield {"actor.megatron.expert_model_parallel_size": 2 * m.expert_model_parallel_size}
    yield {"rollout.tensor_model_parallel_size": 2 * rollout.tensor_model_parallel_size}
    for share in (0.9, 0.85, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2):
        if share != rollout.gpu_memory_utilization:
            yield {"rollout.gpu_memory_utilization": share}
    if not rollout.free_cache_engine:
        yield {"rollout.free_cache_engine": True}
    yield {"trainer.nnodes": 2 * config.trainer.nnodes}


def _bf16_moments(role: str) -> Change:
    return {
        f"{role}.optim.use_precision_aware_optimizer": True,
        f"{role}.optim.exp_avg_dtype": "bf16",
        f"{role}.optim.exp_avg_sq_dtype": "bf16",
    }


def _smaller_batches(job: Job) -> Iterator[Change]:
    for role in job.roles:
        for names in (("dynamic", "max_token_len", "micro"),) if role.settings.trained else ():
            dynamic, budget, micro = names
            used = budget if vars(role.settings)[dynamic] else micro
            value, key = vars(role.settings)[used], role.settings.keys[used]
            for halving in range(1, _MOST_TOKENS + 1):
                if value is not None and value >> halving:
                    yield {key: value >> halving}


def _recompute(job: Job) -> Iterator[Change]:
    granularity = job.config.actor.megatron.recompute_granularity
    key = "actor.megatron.recompute_"
    if granularity is None:
        module = "moe" if job.shape.moe else "mlp"
        yield {f"{key}granularity": "selective", f"{key}modules": (module,)}
    if granularity != "full":
        yield {f"{key}granularity": "full", f"{key}modules": ("core_attn",)}


def _all_that_saves(job: Job) -> Change:
    change: dict[str, Any] = {
        f"actor.megatron.{p}_offload": True for p in ("param", "grad", "optimizer")
    }
    *_, last = [{}, *_recompute(job)]
    change |= last
    if job.config.actor.megatron.use_distributed_optimizer:
        change |= _bf16_moments("actor")
    return change
