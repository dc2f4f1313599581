"""Memory of each class of ranks in each phase of a step: what is there, and the peak."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import ceil
from typing import Any

from mrl.config.roles import (
    rollout_ranks,
    trainer_ranks,
    world_size,
)
from mrl.planning.activations import head_bytes
from mrl.planning.hardware import GB
from mrl.planning.job import Job, Role
from mrl.resharding.families import ModelShape

# Logits that the fused head holds at a time: `CHUNK_BYTES` of mrl/workers/megatron/fused_head.py.
HEAD_CHUNK_BYTES = 512 * 2**20
TIGHT = 0.92  # of a GPU's memory: above it the plan's own error may decide
_GROUPED_EXCHANGE = 2  # buckets: one is sent, one received


@dataclass(frozen=True)
class PhaseMemory:
    """Bytes of one phase on one rank, by what they are."""

    name: str
    parts: Mapping[str, float]

    @property
    def total(self) -> float:
        """Sum the parts."""
        return sum(self.parts.values())


@dataclass(frozen=True)
class RankMemory:
    """Memory of ranks that hold the same."""

    ranks: tuple[int, ...]
    stages: Mapping[str, int]  # pipeline stage by role
    has_engine: bool
    phases: tuple[PhaseMemory, ...]
    host: float  # bytes of pinned host memory for what is offloaded

    @property
    def peak(self) -> PhaseMemory:
        """Give the phase that takes most."""
        return max(self.phases, key=lambda phase: phase.total)

    def to_json(self) -> dict[str, Any]:
        """Give bytes by phase and part."""
        return {
            "ranks": [self.ranks[0], self.ranks[-1]],
            "count": len(self.ranks),
            "stages": dict(self.stages),
            "engine": self.has_engine,
            "host_bytes": round(self.host),
            "phases": {
                p.name: {"total": round(p.total), **{k: round(v) for k, v in p.parts.items()}}
                for p in self.phases
            },
        }


@dataclass(frozen=True)
class EngineMemory:
    """What an engine rank does with `rollout.gpu_memory_utilization`."""

    budget: float  # bytes
    weights: float
    work: float  # activations and logits of its largest batch
    kv: float
    kv_token: float  # bytes a token
    tokens: int  # that fit
    sequences: int  # at their longest that fit a replica


@dataclass(frozen=True)
class MemoryPlan:
    """Memory of all classes of ranks, the fullest first."""

    groups: tuple[RankMemory, ...]
    engine: EngineMemory
    capacity: float
    problems: tuple[str, ...] = field(default=())

    @property
    def peak(self) -> RankMemory:
        """Give the ranks that need most, to two GB."""
        return self.groups[0]

    @property
    def is_tight(self) -> bool:
        """Tell whether the peak is closer to the limit than the plan is exact."""
        return any(group.peak.total > TIGHT * self.capacity for group in self.groups)


def kv_bytes(shape: ModelShape, tp: int) -> float:
    """Give the bytes of the KV cache a token on one engine rank, in bfloat16."""
    if shape.mla is not None:  # the latent is on every rank
        return 2.0 * shape.num_layers * (shape.mla.kv_lora_rank + shape.mla.qk_rope_head_dim)
    heads = max(shape.num_kv_heads / tp, 1)
    return 2 * 2 * shape.num_layers * heads * shape.head_dim


def engine_memory(job: Job) -> EngineMemory:
    """Split the engine's part of a GPU as vLLM does: what is left of it is cache."""
    rollout, shape = job.config.rollout, job.shape
    tp = rollout.tensor_model_parallel_size
    budget = rollout.gpu_memory_utilization * job.machine.memory
    weights = job.model_bytes / tp
    width = shape.ffn_size
    if shape.moe is not None:
        width = shape.moe.top_k * shape.moe.ffn_size + shape.moe.shared_ffn_size
    work = rollout.max_num_batched_tokens * (6 * width / tp + 6 * shape.hidden_size)
    # logits and the sorted or soft copies that a sampler makes, float32
    work += min(rollout.max_num_seqs, rollout.max_num_batched_tokens) * shape.vocab_size * 12
    context = job.machine.assume.context * GB
    kv = budget - weights - work - context
    each = kv_bytes(shape, tp)
    tokens = max(int(kv / each), 0)
    return EngineMemory(
        budget, weights, work, kv, each, tokens, tokens // max(job.plan.max_model_len, 1)
    )


def plan_memory(job: Job) -> MemoryPlan:
    """Count every class of ranks in every phase."""
    engine = engine_memory(job)
    groups = [
        _RankMemoryOf(job, engine, stages, has_engine).plan(ranks)
        for (stages, has_engine), ranks in _classes(job).items()
    ]
    # of ranks that need about the same at most, first those that need more in the other phases
    groups.sort(
        key=lambda group: (
            -round(group.peak.total / (2 * GB)),
            -sum(phase.total for phase in group.phases),
        )
    )
    return MemoryPlan(
        tuple(groups), engine, job.machine.memory, tuple(_problems(job, groups, engine))
    )


_Class = tuple[tuple[int | None, ...], bool]


def _classes(job: Job) -> dict[_Class, tuple[int, ...]]:
    """Group ranks by their stage in every role and by whether they hold an engine."""
    trainer, engine = trainer_ranks(job.config), rollout_ranks(job.config)
    found: dict[_Class, list[int]] = {}
    for rank in range(world_size(job.config)):
        stages: tuple[int | None, ...] = ()
        if rank in trainer:
            stages = tuple(rank // (len(trainer) // role.plan.layout.pp) for role in job.roles)
        if rank in trainer or rank in engine:
            found.setdefault((stages, rank in engine), []).append(rank)
    return {key: tuple(ranks) for key, ranks in found.items()}


def _problems(job: Job, groups: list[RankMemory], engine: EngineMemory) -> Iterator[str]:
    capacity = job.machine.memory
    worst = max(groups, key=lambda group: group.peak.total)
    if worst.peak.total > capacity:
        yield (
            f"{worst.peak.name} on rank {worst.ranks[0]} needs {worst.peak.total / GB:.1f} GB, "
            f"the GPU has {capacity / GB:.1f}; most of it {_largest(worst.peak)}"
        )
    if engine.sequences < 1:
        rollout = job.config.rollout
        yield (
            f"the engine's cache holds {engine.tokens:,} tokens, a sequence may have "
            f"{job.plan.max_model_len:,}: rollout.gpu_memory_utilization="
            f"{rollout.gpu_memory_utilization} leaves {engine.kv / GB:.1f} GB beside weights of "
            f"{engine.weights / GB:.1f}"
        )


def _largest(phase: PhaseMemory) -> str:
    name = max(phase.parts, key=phase.parts.__getitem__)
    return f"{name} ({phase.parts[name] / GB:.1f})"


class _RankMemoryOf:
    """Counts one class of ranks."""

    def __init__(
        self, job: Job, engine: EngineMemory, stages: tuple[int | None, ...], has_engine: bool
    ) -> None:
        self._job, self._engine, self._has_engine = job, engine, has_engine
        found = zip(job.roles, stages, strict=bool(stages))
        self._stage = {role.name: stage for role, stage in found if stage is not None}
        self._roles = [role for role in job.roles if role.name in self._stage]
        self._state = {role.name: job.state(role, self._stage[role.name]) for role in self._roles}

    def plan(self, ranks: tuple[int, ...]) -> RankMemory:
        """Count every phase that these ranks take part in."""
        phases = [PhaseMemory(name, parts) for name, parts in self._phases()]
        host = 0.0
        for role in self._roles:
            state, m = self._state[role.name], role.settings.megatron
            host += m.param_offload * state.params + m.optimizer_offload * state.optimizer
        return RankMemory(ranks, self._stage, self._has_engine, tuple(phases), host)

    def _phases(self) -> Iterator[tuple[str, dict[str, float]]]:
        if self._has_engine:
            yield "rollout", self._rollout()
        for role in self._roles:
            name = {"actor": "log-prob", "critic": "values", "ref": "ref"}[role.name]
            yield name, self._working(role, trains=False)
        for role in self._roles:
            if role.settings.trained:
                yield f"update {role.name}", self._working(role, trains=True)
        yield "transition", self._transition()

    def _resident(
        self, worker: Role | None, trains: bool = False, keeps: str = ""
    ) -> dict[str, float]:
        """List what all roles have on the device while `worker` works."""
        parts: dict[str, float] = {"parameters": 0.0, "gradients": 0.0, "optimizer": 0.0}
        base = self._job.ref_is_actors_base and worker is not None and worker.name == "ref"
        for role in self._roles:
            state, m = self._state[role.name], role.settings.megatron
            works = worker is not None and role.name == worker.name
            reads = works or role.name == keeps or (base and role.name == "actor")
            parts["parameters"] += state.params * (reads or not m.param_offload)
            parts["gradients"] += state.grads * ((works and trains) or not m.grad_offload)
            parts["optimizer"] += state.optimizer * ((works and trains) or not m.optimizer_offload)
        return parts

    def _always(self) -> dict[str, float]:
        assume = self._job.machine.assume
        several = self._job.plan.world_size > 1
        return {"context": (assume.context + assume.nccl * several) * GB}

    def _asleep(self) -> dict[str, float]:
        if not self._has_engine:
            return {}
        if self._job.sleeps:
            return {"engine": self._job.machine.assume.engine_asleep * GB}
        return {"engine": self._engine.weights + self._engine.work, "kv cache": self._engine.kv}

    def _rollout(self) -> dict[str, float]:
        engine = self._engine
        return {
            **self._resident(None),
            "engine": engine.weights + engine.work + self._job.machine.assume.engine_asleep * GB,
            "kv cache": max(engine.kv, 0.0),
            **self._always(),
        }

    def _transition(self) -> dict[str, float]:
        # the engine wakes its weights alone; slices pass through buckets
        engine = {"engine": self._engine.weights} if self._has_engine else {}
        if self._has_engine and not self._job.sleeps:
            engine = self._asleep()
        return {
            **self._resident(None, keeps="actor"),
            **engine,
            "buckets": float(_GROUPED_EXCHANGE * self._job.config.resharding.bucket_bytes),
            **self._always(),
        }

    def _working(self, role: Role, trains: bool) -> dict[str, float]:
        kept, head = self._activations(role, trains)
        slack = 1 + self._job.machine.assume.allocator
        return {
            **self._resident(role, trains),
            "activations": kept * slack,
            "head": head * slack,
            **self._asleep(),
            **self._always(),
        }

    def _activations(self, role: Role, trains: bool) -> tuple[float, float]:
        """Give bytes of layers and of the head at the phase's peak."""
        job, stage, pp = self._job, self._stage[role.name], role.plan.layout.pp
        tokens = job.local_tokens(role, log_prob=not trains)
        chunks = role.weights.chunks[stage]
        counted = [role.activations.chunk(chunk, trains) for chunk in chunks]
        most = max(extra for _, extra in counted)
        kept = 0.0
        if trains:
            in_flight = _chunks_in_flight(stage, pp, len(chunks), self._micro_batches(role))
            average = sum(each for each, _ in counted) / len(chunks)
            kept = average * in_flight * tokens
        layers = most * tokens
        if stage < pp - 1 or role.name == "critic":
            return kept + layers, 0.0
        data = job.config.data
        predicted = ceil(tokens * max(data.max_response_length / job.longest, 0.0))
        forward, update = head_bytes(
            role.shape, predicted, tokens, role.settings.megatron, HEAD_CHUNK_BYTES
        )
        head = update if trains else forward
        # the layers' backward pass starts when the head's is over
        return (kept + layers, 0.0) if layers >= head else (kept, head)

    def _micro_batches(self, role: Role) -> int:
        plan = role.plan
        if plan.micro_batches is not None:
            return plan.micro_batches
        total = plan.samples_per_rank * self._job.longest / plan.layout.cp
        return max(ceil(total / self._job.local_tokens(role)), 1)


def _chunks_in_flight(stage: int, pp: int, vpp: int, micro_batches: int) -> int:
    """Count micro-batches x chunks whose activations a stage keeps (Narayanan et al. 2021)."""
    if vpp == 1:
        return min(pp - stage, micro_batches)
    return min(2 * (pp - stage - 1) + (vpp - 1) * pp + 1, micro_batches * vpp)
