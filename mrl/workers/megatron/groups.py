"""Process groups of one role: its own parallel layout on the ranks that it shares with others.

Megatron keeps its groups in module globals, and a few places read them although a
`ProcessGroupCollection` is passed. So each role's groups are made by Megatron itself, the globals
are lifted out as a snapshot, and `ParallelGroups.active()` puts them back while the role works.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.process_groups_config import ProcessGroupCollection

from mrl.config.schema import MegatronConfig
from mrl.workers.megatron.cpu import cuda_on_cpu

_STATE_NAMES = tuple(
    name for name in vars(parallel_state) if name.startswith("_") and name[1:2].isupper()
)


def _snapshot() -> dict[str, Any]:
    return {name: getattr(parallel_state, name) for name in _STATE_NAMES}


def _restore(state: dict[str, Any]) -> None:
    for name, value in state.items():
        setattr(parallel_state, name, value)


_EMPTY = _snapshot()


def group_sizes(layout: MegatronConfig) -> tuple[Any, ...]:
    """Give all of a layout that its groups depend on: roles that agree in it may share them."""
    return (
        layout.tensor_model_parallel_size,
        layout.pipeline_model_parallel_size,
        layout.virtual_pipeline_model_parallel_size or 1,
        layout.context_parallel_size,
        layout.hierarchical_context_parallel_sizes,
        layout.expert_model_parallel_size,
        layout.expert_tensor_parallel_size or layout.tensor_model_parallel_size,
    )


class ParallelGroups:
    """The process groups of a layout, made collectively by all ranks."""

    def __init__(self, layout: MegatronConfig, seed: int, timeout_s: float) -> None:
        """Create the groups; every rank of the job calls this in the same order.

        Raises ValueError when the layout does not divide the ranks.
        """
        tp, pp = layout.tensor_model_parallel_size, layout.pipeline_model_parallel_size
        cp = layout.context_parallel_size
        world = dist.get_world_size()
        if world % (tp * pp * cp):
            raise ValueError(f"{world} ranks cannot be cut into tp {tp} x pp {pp} x cp {cp}")
        self.ep = layout.expert_model_parallel_size
        self.etp = layout.expert_tensor_parallel_size or tp
        if world % (self.etp * self.ep * pp):
            raise ValueError(
                f"{world} ranks cannot be cut into expert tp {self.etp} x ep {self.ep} x pp {pp}"
            )
        self.vpp = layout.virtual_pipeline_model_parallel_size or 1
        with cuda_on_cpu():
            before = _snapshot()
            _restore(_EMPTY)
            parallel_state.initialize_model_parallel(
                tensor_model_parallel_size=tp,
                pipeline_model_parallel_size=pp,
                context_parallel_size=cp,
                hierarchical_context_parallel_sizes=(
                    list(layout.hierarchical_context_parallel_sizes)
                    if layout.hierarchical_context_parallel_sizes
                    else None
                ),
                virtual_pipeline_model_parallel_size=self.vpp if self.vpp > 1 else None,
                expert_model_parallel_size=self.ep,
                expert_tensor_parallel_size=self.etp,
                distributed_timeout_minutes=max(1, math.ceil(timeout_s / 60)),
                # the optimizer asks for the gloo groups by name
                create_gloo_process_groups=True,
            )
            tensor_parallel.model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
            self.collection = ProcessGroupCollection.use_mpu_process_groups()
            self._state = _snapshot()
            _restore(before)
        self.seed = seed
        self.tp, self.pp, self.cp = tp, pp, cp
        self.dp = world // (tp * pp * cp)
        self.tp_rank = self.collection.tp.rank()
        self.pp_rank = self.collection.pp.rank()
        self.cp_rank = self.collection.cp.rank()
        self.dp_rank = self.collection.dp.rank()

    @property
    def is_first_stage(self) -> bool:
        """Say whether this rank holds the embedding."""
        return self.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        """Say whether this rank holds the head."""
        return self.pp_rank == self.pp - 1

    @contextmanager
    def active(self) -> Iterator[None]:
        """Make these groups Megatron's own inside the block."""
        before = _snapshot()
        _restore(self._state)
        try:
            with cuda_on_cpu():
                yield
        finally:
            _restore(before)
