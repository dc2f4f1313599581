"""The actor's weights on their way into the engine: a role of every rank."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from mrl.config.schema import LoraConfig
from mrl.resharding.gather import GatherSync
from mrl.resharding.layout import Layout, join, nodes
from mrl.resharding.lora import adapter_layout, whole_on
from mrl.resharding.planner import ReshardPlan, plan
from mrl.resharding.sync import Resharder, SyncStats
from mrl.resharding.transports import Distributed
from mrl.resharding.verify import compare_ends
from mrl.workers.megatron.offload import READ, RoleMemory
from mrl.workers.megatron.weights import Weights
from mrl.workers.rollout import Rollout
from mrl.workers.specs import RolloutSpec


class Mover(Protocol):
    """What moves the weights of all ranks."""

    def run(self) -> SyncStats:
        """Move them; all ranks call it together."""
        ...

    def remapped(self) -> None:
        """Take note that the engine's memory was mapped anew at its addresses."""
        ...


@dataclass(frozen=True, slots=True)
class Route:
    """A plan, the parameters of this rank at its two ends, and what moves them."""

    plan: ReshardPlan
    source: Mapping[str, Tensor]
    target: Mapping[str, Tensor]
    mover: Mover


class WeightSync:
    """One rank's part in the weights' way; ranks without actor or engine take part too."""

    def __init__(
        self,
        actor: Weights | None,
        memory: RoleMemory | None,
        rollout: Rollout | None,
        spec: RolloutSpec,
        ranks_per_node: int,
        engine_world: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """Plan together with all other ranks of the job.

        `engine_world` makes the engine's ranks torch's default group in a block.
        """
        self.actor, self.rollout, self.spec, self.engine_world = actor, rollout, spec, engine_world
        self.memory = memory  # of the actor
        if memory:
            memory.enter(READ)
        self.rank = dist.get_rank()
        transport = Distributed()
        node_of_rank = nodes(dist.get_world_size(), ranks_per_node)
        src = self._everywhere(actor.layout if actor else None, transport)
        src = replace(src, node_of_rank=node_of_rank)
        dst = join(transport.gather(self._held(src)), node_of_rank)
        self._model = self._route(
            src,
            dst,
            actor.params() if actor else {},
            rollout.engine.params() if rollout else {},
            MOVERS[spec.resharding.mode],
        )
        self._adapter = self._adapter_route(src, spec.lora) if spec.lora is not None else None
        # Beside an adapter the model never changes: only an engine that drops it needs it again.
        drops = rollout is not None and rollout.sleeps and torch.cuda.is_available()
        self._repeats_model = any(transport.gather(drops)) or self._adapter is None
        self._moved_model = False
        self._verified = False

    def run(self, version: int) -> SyncStats:
        """Write the actor's weights into the live engine as weight version `version`.

        Raises ValueError when `resharding.verify` finds that the two ends differ.
        """
        on_gpu = torch.cuda.is_available()
        if on_gpu:
            # Training leaves its activations' blocks cached; the engine needs that memory now.
            torch.cuda.empty_cache()
        if self.memory:
            self.memory.enter(READ)
        if self.rollout:
            self.rollout.wake_weights()
            if self.rollout.sleeps or (self.memory and self.memory.moves_params):
                for route in self._routes():
                    route.mover.remapped()
        start = time.perf_counter()
        with self._merged():
            stats = _total([route.mover.run() for route in self._routes()])
            if on_gpu:
                # The exchange itself never waits for the host; its time is known once it has.
                torch.cuda.synchronize()
            stats = replace(stats, seconds=time.perf_counter() - start)
            self._verify()
        self._moved_model = True
        if self.memory:
            self.memory.give_back()  # the engine's cache takes its place
        if self.rollout:
            with self.engine_world():
                if self._adapter is not None:
                    self.rollout.engine.adapt(self._adapter.target)
                self.rollout.engine.written()
                # A cache computed with the old weights would give wrong log-probs.
                self.rollout.wake_cache()
            self.rollout.version = version
        return stats

    def _verify(self) -> None:
        when = self.spec.resharding.verify
        if when == "off" or (when == "first_step" and self._verified):
            return
        for route in self._routes():
            compare_ends(route.plan, self.rank, route.source, route.target, Distributed())
        self._verified = True

    def _routes(self) -> list[Route]:
        """List what the next sync moves."""
        routes = [self._model] if self._repeats_model or not self._moved_model else []
        return [*routes, self._adapter] if self._adapter is not None else routes

    def _merged(self) -> AbstractContextManager[None]:
        """Make the actor's weights, inside the block, those that the engine computes with."""
        if self.actor is None or self._adapter is not None:
            return nullcontext()
        return self.actor.merged()

    def _route(
        self,
        src: Layout,
        dst: Layout,
        source: Mapping[str, Tensor],
        target: Mapping[str, Tensor],
        build: Builder,
    ) -> Route:
        resharding = self.spec.resharding
        steps = plan(src, dst, resharding.bucket_bytes, resharding.forward_within_node)
        return Route(steps, source, target, build(self, steps, source, target))

    def _adapter_route(self, src: Layout, lora: LoraConfig) -> Route:
        """Bring the adapter, whole, to every rank of the engine."""
        engine = self.rollout.engine if self.rollout else None
        dtypes = Distributed().gather(engine.dtype if engine else None)
        ranks = tuple(rank for rank, dtype in enumerate(dtypes) if dtype)
        adapter = adapter_layout(src, lora.rank, lora.target_modules)
        dst = whole_on(adapter, ranks, dtypes[ranks[0]])
        target: dict[str, Tensor] = {}
        if engine is not None:
            device = next(iter(engine.params().values())).device
            target = {
                name: torch.empty(info.shape, dtype=getattr(torch, info.dtype), device=device)
                for name, info in dst.tensors.items()
            }
        adapters = self.actor.adapters if self.actor else None
        return self._route(adapter, dst, adapters.params() if adapters else {}, target, _direct)

    def _everywhere(self, layout: Layout | None, transport: Distributed) -> Layout:
        """Tell the actor's layout to ranks without an actor: rank 0 always has one."""
        return next(
            found for found in transport.gather(layout if self.rank == 0 else None) if found
        )

    def _held(self, src: Layout) -> Layout:
        """Say what this rank's engine holds of the actor's tensors, in the engine's dtypes."""
        if self.rollout is None:
            return Layout("engine", {}, ())
        engine = self.rollout.engine
        return engine.layout(src.tensors, self.rank)


def _total(parts: Sequence[SyncStats]) -> SyncStats:
    return SyncStats(
        sum(part.bytes_moved for part in parts),
        sum(part.bytes_floor for part in parts),
        sum(part.local_bytes for part in parts),
        sum(part.seconds for part in parts),
    )


Ends = Mapping[str, Tensor]
Builder = Callable[[WeightSync, ReshardPlan, Ends, Ends], Mover]


def _direct(sync: WeightSync, steps: ReshardPlan, source: Ends, target: Ends) -> Mover:
    return Resharder(steps, sync.rank, source, target, Distributed())


def _gather(sync: WeightSync, steps: ReshardPlan, source: Ends, target: Ends) -> Mover:
    load = sync.rollout.engine.load if sync.rollout else None
    bucket_bytes = sync.spec.resharding.bucket_bytes
    return GatherSync(steps, sync.rank, source, load, Distributed(), bucket_bytes)


MOVERS: Mapping[str, Builder] = {
    "direct": _direct,
    "gather": _gather,
}
