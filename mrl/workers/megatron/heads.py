"""Heads of the last stage: log-prob and entropy over a sharded vocabulary, and values.

M predicted tokens of a micro-batch, h hidden size, V vocabulary, tp tensor-parallel ranks.
The log-probs here come from all logits at once; `fused_head` has those without.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor, nn


class _VocabParallelLogProbs(torch.autograd.Function):
    """Log-prob of a target and entropy from logits [M, V/tp] held in column shards."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, first: int, group: dist.ProcessGroup
    ) -> tuple[Tensor, Tensor]:
        peak = logits.new_full((logits.shape[0],), float("-inf"))
        if logits.shape[1]:
            peak = logits.amax(dim=1)
        dist.all_reduce(peak, op=dist.ReduceOp.MAX, group=group)
        shifted = logits - peak[:, None]
        weights = shifted.exp()
        local = targets - first
        mine = (local >= 0) & (local < logits.shape[1])
        local = local.clamp(0, max(logits.shape[1] - 1, 0))
        chosen = shifted.new_zeros(shifted.shape[0])
        if logits.shape[1]:
            chosen = shifted.gather(1, local[:, None])[:, 0] * mine
        # one all-reduce carries the normaliser, the target's logit and the mean logit
        sums = torch.stack((weights.sum(1), chosen, (weights * shifted).sum(1)))
        dist.all_reduce(sums, group=group)
        normaliser, chosen, weighted = sums.unbind()
        mean = weighted / normaliser
        log_normaliser = normaliser.log()
        probs = weights / normaliser[:, None]
        ctx.save_for_backward(probs, shifted, mean, local, mine)
        return chosen - log_normaliser, log_normaliser - mean

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_log_prob, grad_entropy = grads
        probs, shifted, mean, local, mine = ctx.saved_tensors
        grad = probs * (-grad_log_prob[:, None] - grad_entropy[:, None] * (shifted - mean[:, None]))
        if grad.shape[1]:
            grad.scatter_add_(1, local[:, None], (grad_log_prob * mine)[:, None])
        return grad, None, None, None


def vocab_parallel_log_probs(
    logits: Tensor,
    targets: Tensor,
    vocab_size: int,
    temperature: float,
    group: dist.ProcessGroup,
) -> tuple[Tensor, Tensor]:
    """Give log-probs and entropies, float32 [M] each, of the tempered distribution.

    `logits` [M, padded V / tp] are this rank's columns; columns at or past `vocab_size` are
    padding and take no probability. `targets` [M] are global ids.
    """
    width = logits.shape[1]
    first = group.rank() * width
    real = min(max(vocab_size - first, 0), width)
    tempered = logits[:, :real].float() / temperature
    return _VocabParallelLogProbs.apply(tempered, targets, first, group)


def full_log_probs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    vocab_size: int,
    temperature: float,
    group: dist.ProcessGroup,
) -> tuple[Tensor, Tensor]:
    """Compute what `fused_head.linear_log_probs` does, from all logits at once, to compare with."""
    logits = nn.functional.linear(hidden, weight)
    return vocab_parallel_log_probs(logits, targets, vocab_size, temperature, group)


class _JoinColumns(torch.autograd.Function):
    """Columns of all ranks in one; every rank then computes the same loss from them."""

    @staticmethod
    def forward(
        ctx: Any, columns: Tensor, index: Tensor, size: int, group: dist.ProcessGroup
    ) -> Tensor:
        ctx.save_for_backward(index)
        joined = columns.new_zeros(columns.shape[0], size)
        joined[:, index] = columns
        dist.all_reduce(joined, group=group)
        return joined

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        # the loss is one and the same on all ranks: its gradient is not summed over them
        (index,) = ctx.saved_tensors
        return grads[0][:, index], None, None, None


def join_columns(columns: Tensor, index: Tensor, size: int, group: dist.ProcessGroup) -> Tensor:
    """Give all ranks the columns [C, size] of which each holds [C, m] at `index` [m].

    Every place is held by one rank of the group.
    """
    return _JoinColumns.apply(columns, index, size, group)


def select_hidden(
    hidden: Tensor, index: Tensor, sequence_parallel: bool, group: dist.ProcessGroup
) -> Tensor:
    """Take the hidden states [M, h] at row positions, ready for a column-parallel product.

    `hidden` is [T, 1, h], or this rank's [T / tp, 1, h] under sequence parallelism. The backward
    pass sums the gradient over the tensor-parallel ranks.
    """
    if sequence_parallel:
        hidden = gather_from_sequence_parallel_region(
            hidden, tensor_parallel_output_grad=True, group=group
        )
    else:
        hidden = copy_to_tensor_model_parallel_region(hidden, group=group)
    return hidden[:, 0].index_select(0, index)


class ValueHead(nn.Module):
    """One number a token, in float32; it stands where the language-model head would.

    The weight is replicated. Under sequence parallelism each rank values its own tokens, so the
    gradient is summed over the tensor-parallel ranks as for a norm.
    """

    def __init__(
        self,
        hidden_size: int,
        sequence_parallel: bool,
        device: torch.device,
        initializer_range: float,
        seed: int,
    ) -> None:
        """Draw the weight as transformers draws a new head: normal, std `initializer_range`.

        Every rank draws the same from `seed`.
        """
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        weight = initializer_range * torch.randn(1, hidden_size, generator=generator)
        self.weight = nn.Parameter(weight.to(device))
        self.weight.sequence_parallel = sequence_parallel

    def values(
        self, hidden: Tensor, index: Tensor, sequence_parallel: bool, group: dist.ProcessGroup
    ) -> Tensor:
        """Give values [M] at row positions of hidden [T, 1, h] (or this rank's part of it)."""
        values = nn.functional.linear(hidden.float(), self.weight)
        if sequence_parallel:
            # every rank computes the same loss from here: its gradient is split, not summed
            values = gather_from_sequence_parallel_region(
                values, tensor_parallel_output_grad=False, group=group
            )
        return values[:, 0, 0].index_select(0, index)
