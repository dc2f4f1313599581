"""Gradients, Adam and the learning-rate schedule of one trained role, all Megatron's own."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import (
    MegatronOptimizer,
    OptimizerConfig,
    get_megatron_optimizer,
)
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from mrl.config.plan import warmup_steps
from mrl.config.schema import MegatronConfig, OptimConfig
from mrl.workers.megatron.optimizer_state import OptimizerState, inner_optimizers

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


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


def fuse_accumulation(chunks: Sequence[GPTModel], wanted: bool | None) -> None:
    """Let matrix products add to the gradient buffers themselves, where they can.

    Transformer Engine's linear layers can, and Megatron's own with Apex's kernel. None: if any
    can. Raises ValueError where it is wanted and none can.
    """
    if wanted is False:
        return
    flags = ["fuse_wgrad_accumulation"]  # Transformer Engine's
    if importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is not None:
        flags.append("gradient_accumulation_fusion")
    found = [
        (module, flag)
        for chunk in chunks
        for module in chunk.modules()
        for flag in flags
        if flag in vars(module)
    ]
    if wanted and not found:
        raise ValueError(
            "megatron.gradient_accumulation_fusion=true needs Transformer Engine's layers or "
            "Apex's fused_weight_gradient_mlp_cuda, and has neither here; use null or false"
        )
    # Not through Megatron's config: its output layer, which our heads go past, then wants Apex.
    for module, flag in found:
        setattr(module, flag, True)


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
        fuse_accumulation(chunks, layout.gradient_accumulation_fusion)
        self.chunks = [
            DistributedDataParallel(config, _ddp_config(layout, optim), chunk) for chunk in chunks
        ]
        if layout.overlap_grad_reduce:  # reduced beside the last micro-batch's backward pass
            no_syncs = [chunk.no_sync for chunk in self.chunks]
            config.no_sync_func = no_syncs if len(no_syncs) > 1 else no_syncs[0]
        # With the overlap a step leaves only this rank's shards up to date.
        self._gathers_late = layout.overlap_param_gather
        self._is_partial = self._gathers_late
        if self._gathers_late:
            for chunk in self.chunks:
                _gather_head(chunk)
        self.optimizer: MegatronOptimizer = get_megatron_optimizer(
            _optimizer_config(layout, optim, config),
            self.chunks,
            use_gloo_process_groups=False,
        )
        self.schedule = _schedule(self.optimizer, optim, total_steps)
        self.saved = OptimizerState(self.optimizer, self.schedule)

    def finish_param_sync(self) -> bool:
        """Make every parameter whole before it is read outside of training; say if any was not.

        All data-parallel ranks call it together.
        """
        was_partial = self._is_partial
        if was_partial:
            self.gather_params()
        return was_partial

    def gather_params(self) -> None:
        """Make every data-parallel rank's parameters those that the shards' owners hold.

        All data-parallel ranks call it together.
        """
        for chunk in self.chunks:
            if chunk.ddp_config.use_distributed_optimizer:
                chunk.start_param_sync(force_sync=True)
        self._is_partial = False

    def gradients(self) -> Iterator[Tensor]:
        """Give the buffers that gradients are summed in."""
        for chunk in self.chunks:
            for buffer in chunk.buffers + chunk.expert_parallel_buffers:
                yield buffer.grad_data

    def state(self) -> Iterator[Tensor]:
        """Give Adam's state, as far as it is made, and the parameters that Adam updates."""
        for inner in self.inner_optimizers:
            for group in inner.param_groups:
                yield from group["params"]
            for entry in inner.state.values():
                yield from (value for value in entry.values() if isinstance(value, Tensor))

    @property
    def inner_optimizers(self) -> list[torch.optim.Optimizer]:
        """Give the optimizers that step, one or one for each kind of parameter."""
        return inner_optimizers(self.optimizer)

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
        self._is_partial = self._gathers_late
        return Update(norm, self.lr)

    @property
    def lr(self) -> float:
        """Give the learning rate of the last step."""
        return float(self.optimizer.param_groups[0]["lr"])


def _ddp_config(layout: MegatronConfig, optim: OptimConfig) -> DistributedDataParallelConfig:
    return DistributedDataParallelConfig(
        grad_reduce_in_fp32=optim.main_grads_dtype == "fp32",
        use_distributed_optimizer=layout.use_distributed_optimizer,
        overlap_grad_reduce=layout.overlap_grad_reduce,
        overlap_param_gather=layout.overlap_param_gather,
    )


def _optimizer_config(
    layout: MegatronConfig, optim: OptimConfig, config: TransformerConfig
) -> OptimizerConfig:
    if optim.use_precision_aware_optimizer:
        _check_precision_aware(config)
    return OptimizerConfig(
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
        overlap_param_gather=layout.overlap_param_gather,
        use_precision_aware_optimizer=optim.use_precision_aware_optimizer,
        main_grads_dtype=_DTYPES[optim.main_grads_dtype],
        main_params_dtype=_DTYPES[optim.main_params_dtype],
        exp_avg_dtype=_DTYPES[optim.exp_avg_dtype],
        exp_avg_sq_dtype=_DTYPES[optim.exp_avg_sq_dtype],
    )


def _check_precision_aware(config: TransformerConfig) -> None:
    """Raise ValueError where Transformer Engine's fused Adam cannot run."""
    missing = ""
    if config.use_cpu_initialization:
        missing = "a GPU"
    elif importlib.util.find_spec("transformer_engine") is None:
        missing = "Transformer Engine, which is not installed"
    elif not config.bf16:
        missing = "megatron.dtype=bfloat16"
    if missing:
        raise ValueError(
            f"optim.use_precision_aware_optimizer=true: its fused Adam needs {missing}; "
            "set it to false"
        )


def _gather_head(chunk: DistributedDataParallel) -> None:
    """Wait for the head's parameters before the last norm.

    Megatron waits when a module is called; our heads read their weight instead.
    """
    model = chunk.module
    if not model.post_process:
        return

    def wait(*args: Any) -> None:
        for param in model.output_layer.parameters():
            if param.requires_grad:
                chunk.param_to_bucket_group[param].finish_param_sync()

    model.decoder.final_layernorm.register_forward_pre_hook(wait)


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
