"""Gradients, Adam and the learning-rate schedule of one trained role, all Megatron's own."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import (
    ChainedOptimizer,
    MegatronOptimizer,
    OptimizerConfig,
    get_megatron_optimizer,
)
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from mrl.config.plan import warmup_steps
from mrl.config.schema import MegatronConfig, OptimConfig


@dataclass(frozen=True, slots=True)
class Update:
    """What one optimizer step reports."""

    grad_norm: float  # before clipping, over the whole model
    lr: float


def finalize_gradients(
    model: list[torch.nn.Module],
    num_tokens: Any = None,
    pg_collection: Any = None,
    force_all_reduce: bool | None = False,
) -> None:
    """Reduce gradients as Megatron does, without its division by a token count.

    The loss weights carry the global denominator already, so gradients are plain sums.
    """
    finalize_model_grads(model, None, pg_collection, force_all_reduce)


class Trainer:
    """The model chunks of a rank with their gradient buffers, optimizer and schedule."""

    def __init__(
        self,
        chunks: Sequence[GPTModel],
        layout: MegatronConfig,
        optim: OptimConfig,
        total_steps: int,
    ) -> None:
        """Wrap the model for training over `total_steps` optimizer steps.

        Call inside `groups.active()`, after the weights are loaded.
        """
        config = chunks[0].config
        config.finalize_model_grads_func = finalize_gradients
        self.chunks = [
            DistributedDataParallel(
                config,
                DistributedDataParallelConfig(
                    grad_reduce_in_fp32=True,
                    use_distributed_optimizer=layout.use_distributed_optimizer,
                    overlap_grad_reduce=False,
                ),
                chunk,
            )
            for chunk in chunks
        ]
        self.optimizer: MegatronOptimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=optim.lr,
                min_lr=optim.min_lr,
                weight_decay=optim.weight_decay,
                adam_beta1=optim.betas[0],
                adam_beta2=optim.betas[1],
                adam_eps=optim.eps,
                clip_grad=optim.clip_grad,
                bf16=config.bf16,
                params_dtype=config.params_dtype,
                use_distributed_optimizer=layout.use_distributed_optimizer,
            ),
            self.chunks,
            use_gloo_process_groups=False,
        )
        self.schedule = _schedule(self.optimizer, optim, total_steps)

    def zero_grad(self) -> None:
        """Forget the gradients of the last step."""
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()

    def step(self) -> Update:
        """Clip, update, and move the schedule on by one.

        Raises FloatingPointError when the gradient is not finite: nothing is updated then.
        """
        # Asked before clipping: that would spread one infinity over every gradient.
        self.optimizer.prepare_grads()
        norm = float(self.optimizer.get_grad_norm())
        if not math.isfinite(norm):
            raise FloatingPointError(f"gradient norm is {norm}: this step is not taken")
        # The schedule moves first, so that a warm-up of k steps starts at lr / k, not at 0.
        self.schedule.step(increment=1)
        self.optimizer.step()
        return Update(norm, self.lr)

    @property
    def lr(self) -> float:
        """Give the learning rate of the last step."""
        return float(self.optimizer.param_groups[0]["lr"])

    def _inner(self) -> Iterator[torch.optim.Optimizer]:
        chained = isinstance(self.optimizer, ChainedOptimizer)
        for part in self.optimizer.chained_optimizers if chained else [self.optimizer]:
            yield part.optimizer

    def save(self, path: Path) -> None:
        """Write this rank's optimizer state, master weights and schedule to one file."""
        parts = [
            {
                "state": inner.state_dict(),
                "params": [
                    [param.detach().cpu() for param in group["params"]]
                    for group in inner.param_groups
                ],
            }
            for inner in self._inner()
        ]
        torch.save({"optimizers": parts, "schedule": self.schedule.state_dict()}, path)
        with path.open("rb") as file:
            os.fsync(file.fileno())

    def load(self, path: Path) -> None:
        """Restore what `save` wrote; the weights of the model are loaded apart.

        Raises ValueError when the file is missing or was written by another layout.
        """
        if not path.is_file():
            count = len(list(path.parent.glob("*.pt")))
            raise ValueError(
                f"{path} is missing: {path.parent} holds the optimizer state of {count} ranks; "
                "resume with the layout that saved it"
            )
        saved = torch.load(path, map_location="cpu", weights_only=False)
        inners = list(self._inner())
        shapes = [[tuple(p.shape) for g in i.param_groups for p in g["params"]] for i in inners]
        found = [[tuple(p.shape) for g in s["params"] for p in g] for s in saved["optimizers"]]
        if shapes != found:
            raise ValueError(
                f"{path} holds optimizer shards of another layout: found "
                f"{[len(f) for f in found]} tensors of {sum(map(len, found))}, expected "
                f"{[len(s) for s in shapes]}; resume with the layout that saved it"
            )
        for inner, part in zip(inners, saved["optimizers"], strict=True):
            for group, tensors in zip(inner.param_groups, part["params"], strict=True):
                for param, tensor in zip(group["params"], tensors, strict=True):
                    param.data.copy_(tensor)
            # The settings are this run's, not the saved run's; a step count is state.
            settings = [
                {k: v for k, v in group.items() if k not in ("params", "step")}
                for group in inner.param_groups
            ]
            inner.load_state_dict(part["state"])
            for group, kept in zip(inner.param_groups, settings, strict=True):
                group.update(kept)
        self.schedule.load_state_dict(saved["schedule"])


def _schedule(
    optimizer: MegatronOptimizer, optim: OptimConfig, total_steps: int
) -> OptimizerParamScheduler:
    warmup = warmup_steps(optim, total_steps)
    # Megatron wants the decay to end after the warm-up even where nothing decays.
    decay = max(total_steps, warmup + 1)
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=optim.lr,
        min_lr=optim.min_lr,
        lr_warmup_steps=warmup,
        lr_decay_steps=decay,
        lr_decay_style=optim.lr_decay_style,
        start_wd=optim.weight_decay,
        end_wd=optim.weight_decay,
        wd_incr_steps=decay,
        wd_incr_style="constant",
        # after a resume the config rules, not the checkpoint
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
    )
