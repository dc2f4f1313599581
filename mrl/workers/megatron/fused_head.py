"""The language-model head without its logits: matrix product, log-prob and entropy in one.

M predicted tokens of a micro-batch, h hidden size, V vocabulary, tp tensor-parallel ranks.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

# Logits that exist at a time. Large enough that every product fills the device and that adding
# up the hidden states' gradient, once a chunk, costs little beside it; small beside the model.
CHUNK_BYTES = 512 * 2**20
_ALIGNMENT = 128  # columns: rows of a chunk then start where tensor cores and wide loads like it


@dataclass(frozen=True, slots=True)
class _Columns:
    """This rank's columns of the vocabulary, a chunk of them at a time.

    Logits are cut by columns and never by tokens: a chunk then gives its rows of the weight's
    gradient whole, and only the hidden states' gradient is added up over chunks.
    """

    first: int  # id of the first column
    real: int  # columns that are not padding; none of the others is ever computed
    width: int  # columns whose logits exist at a time
    temperature: float
    group: dist.ProcessGroup

    @staticmethod
    def of(
        hidden: Tensor,
        weight: Tensor,
        vocab_size: int,
        temperature: float,
        group: dist.ProcessGroup,
    ) -> _Columns:
        first = group.rank() * weight.shape[0]
        real = min(max(vocab_size - first, 0), weight.shape[0])
        width = max(CHUNK_BYTES // (weight.element_size() * max(hidden.shape[0], 1)), 1)
        if width > _ALIGNMENT:
            width -= width % _ALIGNMENT
            chunks = max(-(-real // width), 1)
            width = -(-real // (chunks * _ALIGNMENT)) * _ALIGNMENT  # of about equal size
        return _Columns(first, real, max(width, 1), temperature, group)

    def logits(self, hidden: Tensor, weight: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Give each chunk's first column and its logits [M, n], all in one buffer."""
        if not hidden.shape[0]:
            return
        buffer = hidden.new_empty(hidden.shape[0], self.width)
        for start in range(0, self.real, self.width):
            rows = weight[start : min(start + self.width, self.real)]
            yield start, torch.mm(hidden, rows.t(), out=buffer[:, : rows.shape[0]])

    def local(self, targets: Tensor, start: int) -> Tensor:
        """Count targets from a chunk's first column; others fall outside the chunk."""
        return targets - (self.first + start)


def _kernels(statistics: Tensor) -> tuple[Callable[..., None], Callable[..., None]]:
    """Give `update_statistics` and `logits_to_gradients`, as Triton kernels where there is one."""
    on_gpu = statistics.is_cuda and statistics.dtype == torch.float32
    if on_gpu and importlib.util.find_spec("triton") is not None:
        from mrl.workers.megatron import head_kernels

        return head_kernels.update_statistics, head_kernels.logits_to_gradients
    return update_statistics, logits_to_gradients


def new_statistics(hidden: Tensor) -> Tensor:
    """Give the statistics [4, M] of no logits: peak, and three sums, see `update_statistics`."""
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    statistics = hidden.new_zeros(4, hidden.shape[0], dtype=dtype)
    statistics[0] = torch.finfo(dtype).min  # finite: the difference of two is a number
    return statistics


def update_statistics(
    statistics: Tensor, logits: Tensor, targets: Tensor, temperature: float
) -> None:
    """Take more logits [M, n] into running statistics [4, M], in place.

    Of tempered logits z: their maximum, sum exp(z - max), sum exp(z - max) (z - max), and the z
    of the target where `targets` [M], counted from the first column given, lies among them.
    """
    peak, total, weighted, chosen = statistics.unbind()
    scaled = logits.to(statistics.dtype) / temperature
    highest = torch.maximum(peak, scaled.amax(1))
    drop = peak - highest
    shifted = scaled - highest[:, None]
    weights = shifted.exp()
    weighted.add_(drop * total).mul_(drop.exp()).add_((weights * shifted).sum(1))
    total.mul_(drop.exp()).add_(weights.sum(1))
    peak.copy_(highest)
    local, mine = _inside(targets, logits)
    chosen.copy_(torch.where(mine, scaled.gather(1, local[:, None])[:, 0], chosen))


def logits_to_gradients(logits: Tensor, targets: Tensor, rows: Tensor, temperature: float) -> None:
    """Turn logits [M, n] into the gradient by them, in place.

    `rows` [5, M] are peak, log-normaliser and entropy of the whole row, and the gradients by
    log-prob and by entropy. With p = exp(z - peak - log-normaliser), d log p_t / dz_j is
    [j = t] - p_j and d entropy / dz_j is -p_j (log p_j + entropy).
    """
    peak, log_normaliser, entropies, by_log_prob, by_entropy = rows[..., None].unbind()
    log_probs = logits.to(rows.dtype) / temperature - peak - log_normaliser
    gradients = -log_probs.exp() * (by_log_prob + by_entropy * (log_probs + entropies))
    local, mine = _inside(targets, logits)
    gradients.scatter_add_(1, local[:, None], by_log_prob * mine[:, None])
    logits.copy_(gradients / temperature)


def _inside(targets: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Give targets as columns that exist, and whether they are."""
    mine = (targets >= 0) & (targets < logits.shape[1])
    return targets.clamp(0, logits.shape[1] - 1), mine


def _combine(statistics: Tensor, group: dist.ProcessGroup) -> None:
    """Take the statistics of all tensor-parallel ranks together, in place, in two messages."""
    if group.size() == 1 or not statistics.numel():
        return
    peak, total, weighted, _ = statistics.unbind()
    drop = peak.clone()
    dist.all_reduce(peak, op=dist.ReduceOp.MAX, group=group)
    drop -= peak
    weighted.add_(drop * total).mul_(drop.exp())
    total.mul_(drop.exp())
    dist.all_reduce(statistics[1:], group=group)


class _LinearLogProbs(torch.autograd.Function):
    """Log-probs and entropies from hidden states; logits exist a chunk of columns at a time."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, columns: _Columns
    ) -> tuple[Tensor, Tensor]:
        statistics = new_statistics(hidden)
        update, _ = _kernels(statistics)
        for start, logits in columns.logits(hidden, weight):
            update(statistics, logits, columns.local(targets, start), columns.temperature)
        _combine(statistics, columns.group)
        peak, total, weighted, chosen = statistics.unbind()
        log_normaliser = total.log()
        entropies = log_normaliser - weighted / total
        rows = torch.stack((peak, log_normaliser, entropies))
        ctx.save_for_backward(hidden, weight, targets, rows)
        ctx.columns = columns
        return chosen - peak - log_normaliser, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, rows = ctx.saved_tensors
        columns: _Columns = ctx.columns
        rows = torch.cat((rows, torch.stack(grads)))
        by_hidden = by_weight = main_grad = None
        if ctx.needs_input_grad[0]:
            # added up over chunks in float32, rounded once
            dtype = hidden.dtype if columns.width >= columns.real else rows.dtype
            by_hidden = torch.zeros_like(hidden, dtype=dtype)
        if ctx.needs_input_grad[1]:
            main_grad = _main_grad(weight)
            by_weight = torch.zeros_like(weight) if main_grad is None else main_grad
        _add_gradients(columns, hidden, weight, targets, rows, by_hidden, by_weight)
        if main_grad is not None:
            by_weight = _added_to_main_grad(weight)
        return by_hidden.to(hidden.dtype) if by_hidden is not None else None, by_weight, None, None


def _add_gradients(
    columns: _Columns,
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    rows: Tensor,
    by_hidden: Tensor | None,
    by_weight: Tensor | None,
) -> None:
    """Add the gradients to `by_hidden` [M, h] and `by_weight` [padded V / tp, h], in place."""
    _, differentiate = _kernels(rows)
    for start, logits in columns.logits(hidden, weight):
        differentiate(logits, columns.local(targets, start), rows, columns.temperature)
        span = slice(start, start + logits.shape[1])
        if by_hidden is not None:
            _add_product(by_hidden, logits, weight[span])
        if by_weight is not None:
            _add_product(by_weight[span], logits.t(), hidden)


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a @ b to a total of the same dtype, or of float32, in place."""
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    elif total.is_cuda:  # the matrix product itself adds
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(a.to(total.dtype), b.to(total.dtype))


def _main_grad(weight: Tensor) -> Tensor | None:
    """Give the buffer where Megatron's data parallelism gathers a weight's gradient in float32."""
    if hasattr(weight, "grad_added_to_main_grad") and weight.main_grad.dtype == torch.float32:
        main_grad: Tensor = weight.main_grad
        return main_grad
    return None


def _added_to_main_grad(weight: Any) -> Tensor | None:
    """Say that a weight's gradient is in its buffer; give what autograd is to pass on instead.

    Megatron's hook then ignores what autograd gives, but wants a tensor where it overlaps the
    reduction. It does not ignore it where the embedding shares the weight (`zero_out_wgrad`):
    autograd has that gradient to pass on.
    """
    weight.grad_added_to_main_grad = True
    shared = hasattr(weight, "zero_out_wgrad") and weight.zero_out_wgrad
    return None if shared else torch.empty_like(weight)


def linear_log_probs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    vocab_size: int,
    temperature: float,
    group: dist.ProcessGroup,
) -> tuple[Tensor, Tensor]:
    """Give log-probs and entropies, float32 [M] each, of the tempered distribution.

    From hidden states [M, h] and this rank's rows of the output weight [padded V / tp, h], without
    the logits [M, V] ever in memory: `CHUNK_BYTES` of them at most, computed again backward. Rows
    at or past `vocab_size` are padding. `targets` [M] are global ids. The gradient by `hidden` is
    this rank's part of the sum over tensor-parallel ranks; the one by the weight goes straight to
    its `main_grad` where Megatron's data parallelism keeps one.
    """
    columns = _Columns.of(hidden, weight, vocab_size, temperature, group)
    return _LinearLogProbs.apply(hidden, weight, targets, columns)


@torch.no_grad()
def top_log_probs(
    hidden: Tensor,
    weight: Tensor,
    k: int,
    vocab_size: int,
    temperature: float,
    group: dist.ProcessGroup,
) -> tuple[Tensor, Tensor]:
    """Give the k most likely tokens' log-probs, float32 [M, k], best first, and ids, int64 [M, k].

    Takes what `linear_log_probs` takes and has no gradient. Raises ValueError unless
    1 <= k <= vocab_size.
    """
    if not 1 <= k <= vocab_size:
        nearest = min(max(k, 1), vocab_size)
        raise ValueError(f"top {k} of {vocab_size} tokens: expected 1 to {vocab_size}: {nearest}")
    columns = _Columns.of(hidden, weight, vocab_size, temperature, group)
    statistics = new_statistics(hidden)
    update, _ = _kernels(statistics)
    none = torch.full((hidden.shape[0],), -1, device=hidden.device)
    values = statistics.new_full((hidden.shape[0], k), float("-inf"))
    ids = none[:, None].expand_as(values)
    for start, logits in columns.logits(hidden, weight):
        update(statistics, logits, none, temperature)
        top, index = logits.topk(min(k, logits.shape[1]))
        values = torch.cat((values, top.to(values.dtype) / temperature), 1)
        ids = torch.cat((ids, index + columns.first + start), 1)
        values, ids = _best(values, ids, k)
    _combine(statistics, group)
    if group.size() > 1 and hidden.shape[0]:
        values, ids = _best(_joined(values, group), _joined(ids, group), k)
    peak, total, *_ = statistics.unbind()
    return values - (peak + total.log())[:, None], ids


def _best(values: Tensor, ids: Tensor, k: int) -> tuple[Tensor, Tensor]:
    values, index = values.topk(k)
    return values, ids.gather(1, index)


def _joined(columns: Tensor, group: dist.ProcessGroup) -> Tensor:
    parts = [torch.empty_like(columns.contiguous()) for _ in range(group.size())]
    dist.all_gather(parts, columns.contiguous(), group=group)
    return torch.cat(parts, 1)
