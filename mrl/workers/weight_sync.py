"""The actor's weights on their way into the engine: a role of every rank."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from mrl.resharding.gather import GatherSync
from mrl.resharding.layout import Layout, join, nodes
from mrl.resharding.planner import plan
from mrl.resharding.sync import Resharder, SyncStats
from mrl.resharding.transports import Distributed
from mrl.resharding.verify import compare_ends
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


class WeightSync:
    """One rank's part in the weights' way; ranks without actor or engine take part too."""

    def __init__(
        self,
        actor: Weights | None,
        rollout: Rollout | None,
        spec: RolloutSpec,
        ranks_per_node: int,
        engine_world: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """Plan together with all other ranks of the job.

        `engine_world` makes the engine's ranks torch's default group in a block.
        """
        self.rollout, self.spec, self.engine_world = rollout, spec, engine_world
        self.rank = dist.get_rank()
        self.source = actor.params() if actor else {}
        self.target: Mapping[str, Tensor] = rollout.engine.params() if rollout else {}
        transport = Distributed()
        node_of_rank = nodes(dist.get_world_size(), ranks_per_node)
        src = self._everywhere(actor.layout if actor else None, transport)
        src = replace(src, node_of_rank=node_of_rank)
        dst = join(transport.gather(self._held(src)), node_of_rank)
        self.plan = plan(
            src, dst, spec.resharding.bucket_bytes, spec.resharding.forward_within_node
        )
        self._mover = MOVERS[spec.resharding.mode](self, transport)
        self._verified = False

    def run(self, version: int) -> SyncStats:
        """Write the actor's weights into the live engine as weight version `version`.

        Raises ValueError when `resharding.verify` finds that the two ends differ.
        """
        on_gpu = torch.cuda.is_available()
        if on_gpu:
            # Training leaves its activations' blocks cached; the engine needs that memory now.
            torch.cuda.empty_cache()
        if self.rollout:
            self.rollout.engine.wake_weights()
            if self.rollout.sleeps:
                self._mover.remapped()
        start = time.perf_counter()
        stats = self._mover.run()
        if on_gpu:
            # The exchange itself never waits for the host; its time is known only once it has.
            torch.cuda.synchronize()
            stats = replace(stats, seconds=time.perf_counter() - start)
        self._verify()
        if self.rollout:
            with self.engine_world():
                self.rollout.engine.written()
                # A cache computed with the old weights would give wrong log-probs.
                self.rollout.engine.wake_cache()
            self.rollout.version = version
        return stats

    def _verify(self) -> None:
        when = self.spec.resharding.verify
        if when == "off" or (when == "first_step" and self._verified):
            return
        compare_ends(self.plan, self.rank, self.source, self.target, Distributed())
        self._verified = True

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


def _direct(sync: WeightSync, transport: Distributed) -> Mover:
    return Resharder(sync.plan, sync.rank, sync.source, sync.target, transport)


def _gather(sync: WeightSync, transport: Distributed) -> Mover:
    load = sync.rollout.engine.load if sync.rollout else None
    bucket_bytes = sync.spec.resharding.bucket_bytes
    return GatherSync(sync.plan, sync.rank, sync.source, load, transport, bucket_bytes)


MOVERS: Mapping[str, Callable[[WeightSync, Distributed], Mover]] = {
    "direct": _direct,
    "gather": _gather,
}
