"""The engine of one rank and its place in a replica."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from mrl.resharding.families import ModelShape
from mrl.resharding.layout import Layout, TensorInfo
from mrl.types import Sample, SamplingParams, as_array
from mrl.workers.answers import SampleGroups
from mrl.workers.specs import RolloutSpec

Request = tuple[str, tuple[int, ...]]  # uid, prompt token ids

# Replicas draw from seeds this far apart, so that a step's seed never meets a neighbour's.
_REPLICA_SEED_STRIDE = 1_000_003
_GIB = 1024**3


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

    def layout(self, tensors: Mapping[str, TensorInfo], rank: int) -> Layout:
        """Say where this engine, of the job's `rank`, holds the logical tensors."""
        ...

    def load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Take whole checkpoint tensors through the engine's own loader."""
        ...

    def adapt(self, adapter: Mapping[str, Tensor]) -> None:
        """Compute with this adapter from now on: whole A's and B's by PEFT's names.

        The tensors are the engine's to change.
        """
        ...

    def sleep(self) -> None:
        """Give the memory of weights and cache back."""
        ...

    def wake_weights(self) -> None:
        """Take the memory of the weights again; their values are lost."""
        ...

    def written(self) -> None:
        """Bring up to date what the engine derives from the parameters just written."""
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
    """The rollout role: generates with the weights of the last sync."""

    def __init__(self, engine: Engine, spec: RolloutSpec, slot: int, colocated: bool) -> None:
        """Hold the engine of a slot; a colocated one gives its memory to training."""
        self.engine, self.spec = engine, spec
        self.replica, self.tp_rank = divmod(slot, spec.config.tensor_model_parallel_size)
        self.vocab_size = ModelShape.from_folder(Path(spec.path)).vocab_size
        self.version = 0
        self.sleeps = colocated and spec.config.free_cache_engine

    def generate(
        self, requests: Sequence[Request], sampling: SamplingParams
    ) -> list[tuple[Sample, ...]] | None:
        """Draw responses to this replica's requests; its first rank answers for it.

        The draw depends on the sampling seed and the replica alone: not on earlier calls. Raises
        ValueError, naming the prompt, for a token that the model does not have.
        """
        groups: list[tuple[Sample, ...]] = []
        for uid, ids in requests:
            self._check_ids(uid, "the prompt", ids)
        if requests:
            with _seeded(sampling.seed + _REPLICA_SEED_STRIDE * self.replica):
                groups = self.engine.generate(requests, sampling, self.version)
        for sample in (sample for group in groups for sample in group):
            self._check_ids(sample.uid, "a response", sample.response_ids)
        return SampleGroups(groups) if self.tp_rank == 0 else None

    def _check_ids(self, uid: str, what: str, ids: Sequence[int]) -> None:
        """Raise ValueError for an id past the model's rows, which would be read as another's."""
        found = as_array(ids)
        unknown = np.flatnonzero((found < 0) | (found >= self.vocab_size))
        if len(unknown):
            raise ValueError(
                f"prompt {uid}: token {unknown[0]} of {what} has id {found[unknown[0]]}, the model "
                f"has ids 0 to {self.vocab_size - 1} (vocab_size of {self.spec.path}): is "
                f"{self.spec.tokenizer_path} its tokenizer?"
            )

    def sleep(self) -> int:
        """Free the engine's memory for training, if the config asks for it.

        Gives the device memory then in use, in bytes, by all processes; 0 on a CPU.
        """
        if self.sleeps:
            self.engine.sleep()
        if not torch.cuda.is_available():
            return 0
        free, total = torch.cuda.mem_get_info()
        return total - free

    def wake_weights(self) -> None:
        """Take the memory of the weights again; raises MemoryError when it is not to be had."""
        with self._room_for("weights"):
            self.engine.wake_weights()

    def wake_cache(self) -> None:
        """Take the memory of the cache again and forget what it held; raises MemoryError."""
        with self._room_for("cache"):
            self.engine.wake_cache()

    @contextmanager
    def _room_for(self, part: str) -> Iterator[None]:
        """Say what an engine that finds no memory could do with."""
        try:
            yield
        except RuntimeError as error:  # vLLM's allocator has no kind of error of its own
            if "out of memory" not in str(error).lower():
                raise
            room = "unknown"
            if torch.cuda.is_available():
                free, total = torch.cuda.mem_get_info()
                room = f"{free / _GIB:.1f} of {total / _GIB:.1f} GiB"
            raise MemoryError(
                f"the engine found no memory for its {part}: free on the device {room}; its share "
                f"is rollout.gpu_memory_utilization={self.spec.config.gpu_memory_utilization}: "
                "lower it, or let the trainer keep less there (megatron.param_offload, "
                "grad_offload, optimizer_offload)"
            ) from error

    def close(self) -> None:
        """End the engine."""
        self.engine.close()
