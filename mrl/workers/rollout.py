"""The engine of one rank, its place in a replica, and its weights' way from the actor."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from mrl.resharding.layout import Layout, TensorInfo, nodes
from mrl.resharding.planner import plan
from mrl.resharding.sync import Resharder, SyncStats
from mrl.resharding.transports import Distributed
from mrl.resharding.verify import compare_ends
from mrl.types import Sample, SamplingParams
from mrl.workers.megatron.engine import MegatronEngine
from mrl.workers.specs import RolloutSpec

Request = tuple[str, tuple[int, ...]]  # uid, prompt token ids

# Replicas draw from seeds this far apart, so that a step's seed never meets a neighbour's.
_REPLICA_SEED_STRIDE = 1_000_003


class Engine(Protocol):
    """A generation engine in this process, holding one rank's shard of the policy."""

    dtype: str  # of its parameters, as `TensorInfo` spells it

    def generate(
        self, requests: Sequence[Request], sampling: SamplingParams, policy_version: int
    ) -> list[tuple[Sample, ...]]:
        """Draw `sampling.n` responses a request, in order."""
        ...

    def params(self) -> Mapping[str, Tensor]:
        """Give the live parameters that hold the policy."""
        ...

    def layout(self, tensors: Mapping[str, TensorInfo]) -> Layout:
        """Say where the engines of all ranks hold the logical tensors; all ranks call it."""
        ...

    def sleep(self) -> None:
        """Give the memory of weights and cache back."""
        ...

    def wake_weights(self) -> None:
        """Take the memory of the weights again; their values are lost."""
        ...

    def wake_cache(self) -> None:
        """Take the memory of the cache again and forget what it held."""
        ...

    def close(self) -> None:
        """End the engine."""
        ...


def build_engine(spec: RolloutSpec, device: torch.device) -> Engine:
    """Start the engine that `rollout.name` asks for."""
    # Imported here: each engine is a heavy library that the other one's users may lack.
    if spec.config.name == "hf":
        from mrl.workers.rollout_hf import HFEngine

        return HFEngine(spec, device)
    from mrl.workers.rollout_vllm import VLLMEngine

    return VLLMEngine(spec, device)


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seed every generator that an engine draws from, and put them back afterwards.

    vLLM's second model runner takes each request's seed from numpy, its first one draws from
    torch.
    """
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    state = np.random.get_state()
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        np.random.seed(seed % 2**32)
        try:
            yield
        finally:
            np.random.set_state(state)


class Rollout:
    """The rollout role: generates with the actor's weights of the last sync."""

    def __init__(
        self, engine: Engine, actor: MegatronEngine, spec: RolloutSpec, ranks_per_node: int
    ) -> None:
        """Plan the weight transfer together with all other ranks."""
        self.engine, self.spec = engine, spec
        self.rank = dist.get_rank()
        self.replica, self.tp_rank = divmod(self.rank, spec.config.tensor_model_parallel_size)
        self.version = 0
        node_of_rank = nodes(dist.get_world_size(), ranks_per_node)
        source = replace(actor.weights.layout, node_of_rank=node_of_rank)
        target = engine.layout(
            {name: TensorInfo(info.shape, engine.dtype) for name, info in source.tensors.items()}
        )
        self.source_params, self.params = actor.weights.params(), engine.params()
        self.resharder = Resharder(
            plan(source, target, spec.resharding.bucket_bytes),
            self.rank,
            self.source_params,
            self.params,
            Distributed(),
        )

    def generate(
        self, requests: Sequence[Request], sampling: SamplingParams
    ) -> list[tuple[Sample, ...]] | None:
        """Draw responses to this replica's requests; its first rank answers for it.

        The draw depends on the sampling seed and the replica alone: not on earlier calls.
        """
        groups: list[tuple[Sample, ...]] = []
        if requests:
            with _seeded(sampling.seed + _REPLICA_SEED_STRIDE * self.replica):
                groups = self.engine.generate(requests, sampling, self.version)
        return groups if self.tp_rank == 0 else None

    def sleep(self) -> int:
        """Free the engine's memory for training, if the config asks for it.

        Gives the device memory then in use, in bytes, by all processes; 0 on a CPU.
        """
        if self.spec.config.free_cache_engine:
            self.engine.sleep()
        if not torch.cuda.is_available():
            return 0
        free, total = torch.cuda.mem_get_info()
        return total - free

    def sync(self, version: int) -> SyncStats:
        """Write the actor's weights into the live engine as weight version `version`.

        Raises ValueError when `resharding.verify` finds that the two ends differ.
        """
        if torch.cuda.is_available():
            # Training leaves its activations' blocks cached; the engine needs that memory now.
            torch.cuda.empty_cache()
        self.engine.wake_weights()
        start = time.perf_counter()
        stats = self.resharder.run()
        if torch.cuda.is_available():
            # The exchange itself never waits for the host; its time is known only once it has.
            torch.cuda.synchronize()
            stats = replace(stats, seconds=time.perf_counter() - start)
        if self.spec.resharding.verify:
            compare_ends(
                self.resharder.plan, self.rank, self.source_params, self.params, Distributed()
            )
        # A cache computed with the old weights would give wrong log-probs.
        self.engine.wake_cache()
        self.version = version
        return stats

    def close(self) -> None:
        """End the engine."""
        self.engine.close()
