"""Legal layouts of a job, planned and ranked by the time of a step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

from mrl.config import build_plan
from mrl.planning.change import Change, changed, tried, words
from mrl.planning.compute import StepTime, plan_time
from mrl.planning.hardware import GB
from mrl.planning.job import Job
from mrl.planning.memory import TIGHT, MemoryPlan, plan_memory

_BUDGETS = (16, 4, 2, 1)  # times the longest sequence
_SHARES = (0.85, 0.75, 0.65, 0.55, 0.45, 0.35, 0.25)
_MOST_PP = 16
_OFFLOADS = ("param_offload", "grad_offload", "optimizer_offload")


@dataclass(frozen=True)
class Suggestion:
    """A layout that fits, as the keys to change, with its plan."""

    change: Change
    memory: MemoryPlan
    time: StepTime

    def to_json(self) -> dict[str, Any]:
        """Give overrides, peak bytes and rates."""
        return {
            "overrides": words(self.change),
            "peak_bytes": round(self.memory.peak.peak.total),
            "step": self.time.total,
            "tokens_per_s_per_gpu": self.time.throughput,
            "generation_share": self.time.generation_share,
        }


def suggest(job: Job, count: int = 5) -> tuple[Suggestion, ...]:
    """Search layouts and give the fastest that fit, each a different cut of the model.

    Training side (tp, pp, vpp, cp, ep, recompute, budget) and engine side (tp, memory) are searched
    one after the other, with everything offloaded and with nothing: a step is the sum of both.
    """
    best: list[Suggestion] = []
    for place in _placements(job):
        cuts = [{**place, **layout} for layout in _layouts(job)]
        legal = [cut for cut in cuts if tried(job.config, cut, job.machine) is not None]
        for offload in (False, True):
            ways = [way for cut in legal if (way := _trained(job, cut, offload))]
            ways.sort(key=lambda found: found.time.total)
            best += [s for way in ways[: 2 * count] if (s := _engine(job, way.change))]
    best.sort(key=lambda found: found.time.total)
    unlike: dict[str, Suggestion] = {}
    for one in best:
        unlike.setdefault(str([one.change[key] for key in cuts[0]]), one)
    return tuple(unlike.values())[:count]


def _placements(job: Job) -> Iterator[Change]:
    world = job.plan.world_size
    none = {"placement.trainer_gpus": None, "placement.rollout_gpus": None}
    yield {"placement.mode": "colocated", **none}
    if world >= 2:
        half = {**none, "placement.trainer_gpus": world // 2}
        yield {"placement.mode": "disaggregated", **half}


def _powers(most: int) -> list[int]:
    return [1 << k for k in range(most.bit_length()) if 1 << k <= most]


def _layouts(job: Job) -> Iterator[Change]:
    """List cuts of the actor; those that are not legal fall out when they are planned."""
    shape, node, m = job.shape, job.config.trainer.n_gpus_per_node, "actor.megatron."
    experts = _powers(min(node, shape.moe.num_experts)) if shape.moe else [1]
    contexts = _powers(8) if job.longest > 8192 else [1]
    stages = [pp for pp in _powers(_MOST_PP) if shape.num_layers % pp == 0]
    for tp, pp, cp, ep in product(_powers(min(node, 8)), stages, contexts, experts):
        if tp * pp * cp > job.plan.world_size:
            continue
        for vpp in (None, 2) if pp > 1 and shape.num_layers % (2 * pp) == 0 else (None,):
            yield {
                f"{m}tensor_model_parallel_size": tp,
                f"{m}pipeline_model_parallel_size": pp,
                f"{m}virtual_pipeline_model_parallel_size": vpp,
                f"{m}context_parallel_size": cp,
                f"{m}expert_model_parallel_size": ep,
                f"{m}expert_tensor_parallel_size": 1 if shape.moe else None,
                f"{m}num_layers_in_first_pipeline_stage": None,
                f"{m}num_layers_in_last_pipeline_stage": None,
            }


def _trained(job: Job, layout: Change, offload: bool) -> Suggestion | None:
    """Find the fastest way to train in a layout: budget and recomputation."""
    found: list[Suggestion] = []
    m = "actor.megatron."
    module = "moe" if job.shape.moe else "mlp"
    kinds = ((None, "core_attn"), ("selective", module), ("full", "core_attn"))
    cp = layout[f"{m}context_parallel_size"]
    own = job.config.actor.ppo_max_token_len_per_gpu
    budgets = sorted({own, *(-(-times * job.longest // cp) for times in _BUDGETS)}, reverse=True)
    for granularity, modules in kinds:
        for budget in budgets:
            change = {
                **layout,
                f"{m}recompute_granularity": granularity,
                f"{m}recompute_modules": (modules,),
                f"{m}recompute_method": None,
                f"{m}recompute_num_layers": None,
                "actor.use_dynamic_bsz": True,
                "actor.ppo_max_token_len_per_gpu": budget,
                **{f"{m}{part}": offload for part in _OFFLOADS},
            }
            if (done := _planned(job, change)) and _trains(done[1]):
                found.append(Suggestion(change, done[1], plan_time(done[0])))
    return min(found, key=lambda s: s.time.total, default=None)


def _planned(job: Job, change: Change) -> tuple[Job, MemoryPlan] | None:
    """Plan a change of a layout that is known to be legal."""
    other = changed(job.config, change)
    inner = Job.of(other, build_plan(other), job.machine)
    return inner, plan_memory(inner)


def _trains(memory: MemoryPlan) -> bool:
    """Tell whether all phases but generation fit."""
    return all(
        phase.total <= TIGHT * memory.capacity
        for group in memory.groups
        for phase in group.phases
        if phase.name != "rollout"
    )


def _engine(job: Job, change: Change) -> Suggestion | None:
    """Find the fastest engine beside a way to train."""
    found: list[Suggestion] = []
    for tp in _powers(min(job.config.trainer.n_gpus_per_node, 8)):
        for share in _SHARES:
            engine = {
                **change,
                "rollout.tensor_model_parallel_size": tp,
                "rollout.gpu_memory_utilization": share,
            }
            done = tried(job.config, engine, job.machine)
            if done is not None and not done[1].problems and not done[1].is_tight:
                found.append(Suggestion(engine, done[1], plan_time(done[0])))
                break
    return min(found, key=lambda s: s.time.total, default=None)


def short(suggestion: Suggestion) -> str:
    """Name a layout as people do: TP4 PP2 ..."""
    change, m = suggestion.change, "actor.megatron."
    words = [
        f"{name}{change[f'{m}{key}']}"
        for name, key in (
            ("TP", "tensor_model_parallel_size"),
            ("PP", "pipeline_model_parallel_size"),
            ("VPP", "virtual_pipeline_model_parallel_size"),
            ("CP", "context_parallel_size"),
            ("EP", "expert_model_parallel_size"),
        )
        if (change[f"{m}{key}"] or 1) > 1
    ]
    words = words or ["whole"]
    granularity = change[f"{m}recompute_granularity"]
    if granularity == "selective":
        words.append(f"recompute {change[f'{m}recompute_modules'][0]}")
    elif granularity:
        words.append("recompute all")
    words.append(f"{change['actor.ppo_max_token_len_per_gpu'] / 1024:.0f}k tok")
    if change[f"{m}{_OFFLOADS[0]}"]:
        words.append("offload")
    if change["placement.mode"] == "disaggregated":
        words.append(f"split {change['placement.trainer_gpus']}+")
    return " ".join(words)


def gigabytes(suggestion: Suggestion) -> float:
    """Give the peak in GB."""
    return suggestion.memory.peak.peak.total / GB
