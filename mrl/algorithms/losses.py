"""Losses over flat response tokens [T], and the weights that turn them into one global sum.

A loss is sum(weights * per-token loss) and nothing else divides it. The weights carry the
denominator of the whole optimizer step (all ranks, all micro-batches), so the losses and gradients
of any split of the batch add up to those of the whole. A token of weight 0 is masked: what lies at
its place is never read, NaN and inf included.

Counts beside each loss are sums too: add them over micro-batches and ranks, then divide.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from mrl.algorithms.kl import kl_estimate
from mrl.algorithms.masks import masked, spread, tokens_per_row
from mrl.algorithms.reductions import Mean, Metric, Sum
from mrl.algorithms.surrogates import POLICY_LOSSES, Clips, Tokens, limited
from mrl.types import Ragged


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """The policy loss of some tokens; all scalars, all but `loss` detached."""

    loss: Tensor  # differentiable
    num_tokens: Tensor  # live tokens
    clipped: Tensor  # tokens whose loss the upper or lower ratio bound replaced
    clipped_lower: Tensor  # tokens whose loss the dual clip replaced
    kl: Tensor  # sum of old log-prob less log-prob

    def metrics(self) -> dict[str, Metric]:
        """Give verl's metrics of these tokens; waits for the device."""
        count = float(self.num_tokens)
        return {
            "actor/pg_loss": Sum(float(self.loss.detach())),
            "actor/pg_clipfrac": Mean(float(self.clipped), count),
            "actor/pg_clipfrac_lower": Mean(float(self.clipped_lower), count),
            "actor/ppo_kl": Mean(float(self.kl), count),
        }


@dataclass(frozen=True, slots=True)
class ValueLoss:
    """The clipped value loss of some tokens; all scalars, all but `loss` detached."""

    loss: Tensor  # differentiable
    num_tokens: Tensor  # live tokens
    clipped: Tensor  # tokens whose loss is that of the clipped value
    predicted: Tensor  # sum of the predicted values

    def metrics(self) -> dict[str, Metric]:
        """Give verl's metrics of these tokens; waits for the device."""
        count = float(self.num_tokens)
        return {
            "critic/vf_loss": Sum(float(self.loss.detach())),
            "critic/vf_clipfrac": Mean(float(self.clipped), count),
            "critic/vpred_mean": Mean(float(self.predicted), count),
        }


def policy_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    weights: Tensor,
    clip_low: float,
    clip_high: float,
    clip_c: float,
    mode: str = "vanilla",
    lengths: Tensor | None = None,
) -> PolicyLoss:
    """Compute a loss of `POLICY_LOSSES`; the kl beside it is of log-ratios limited to +-20.

    Args:
        log_probs: [T], of the policy that is trained.
        old_log_probs, advantages, weights: [T].
        clip_low, clip_high: the ratio stays within 1 - clip_low and 1 + clip_high.
        clip_c: above 1.
        mode: its name, from actor.policy_loss.loss_mode.
        lengths: [N] int64 on the CPU, of the responses; None: all tokens are of one.
    """
    live = weights != 0
    log_probs, advantages = masked(log_probs, live), masked(advantages, live)
    log_ratios = log_probs - masked(old_log_probs, live)
    if lengths is None:
        lengths = torch.tensor([len(weights)])
    tokens = Tokens(log_probs, log_ratios, advantages, live, lengths)
    found = POLICY_LOSSES[mode](tokens, Clips(clip_low, clip_high, clip_c))
    return PolicyLoss(
        loss=(weights * found.loss).sum(),
        num_tokens=live.sum(),
        clipped=found.clipped.sum(),
        clipped_lower=found.clipped_lower.sum(),
        kl=-limited(log_ratios.detach()).sum(),
    )


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, weights: Tensor, cliprange: float
) -> ValueLoss:
    """Compute half the squared error, no lower than that of the value kept near the old one.

    All arguments are [T]; the value is kept within old_values +- cliprange.
    """
    live = weights != 0
    values, old_values, returns = (masked(x, live) for x in (values, old_values, returns))
    kept = torch.minimum(torch.maximum(values, old_values - cliprange), old_values + cliprange)
    plain = (values - returns).square()
    clipped = (kept - returns).square()
    return ValueLoss(
        loss=0.5 * (weights * torch.maximum(plain, clipped)).sum(),
        num_tokens=live.sum(),
        clipped=(clipped > plain).sum(),
        predicted=values.detach().sum(),
    )


def entropy_loss(entropy: Tensor, weights: Tensor) -> Tensor:
    """Aggregate token entropies [T] into a scalar; a bonus subtracts it from the loss."""
    return (weights * masked(entropy, weights != 0)).sum()


def kl_loss(log_probs: Tensor, ref_log_probs: Tensor, weights: Tensor, kind: str) -> Tensor:
    """Aggregate the KL estimates of tokens [T] into a scalar; see `KL_ESTIMATORS`."""
    return (weights * kl_estimate(log_probs, ref_log_probs, weights != 0, kind)).sum()


# Unmasked tokens of each row [N], then tokens and sequences of the step and loss_scale_factor ->
# weight of a row's token.
Aggregation = Callable[[Tensor, int, int, float], Tensor]

AGGREGATIONS: dict[str, Aggregation] = {
    "token-mean": lambda tokens, num_tokens, num_sequences, scale: torch.full_like(
        tokens, 1 / max(num_tokens, 1)
    ),
    "seq-mean-token-sum": lambda tokens, num_tokens, num_sequences, scale: torch.full_like(
        tokens, 1 / max(num_sequences, 1)
    ),
    # Dr. GRPO's: a constant in place of the response's length (Liu et al. 2025, section 3)
    "seq-mean-token-sum-norm": lambda tokens, num_tokens, num_sequences, scale: torch.full_like(
        tokens, 1 / (max(num_sequences, 1) * scale)
    ),
    "seq-mean-token-mean": lambda tokens, num_tokens, num_sequences, scale: (
        1 / (tokens.clamp(min=1) * max(num_sequences, 1))
    ),
}


def loss_counts(mask: Ragged) -> tuple[int, int]:
    """Count unmasked tokens, and the sequences that have any."""
    tokens = tokens_per_row(mask)
    return int(tokens.sum()), int((tokens > 0).sum())


def token_weights(
    mask: Ragged, mode: str, num_tokens: int, num_sequences: int, scale: float = 1.0
) -> Ragged:
    """Give each token its weight in the loss of the whole optimizer step.

    A row without unmasked tokens counts neither as tokens nor as a sequence; when every row of
    the step is such a row, all weights are 0 and the loss is exactly 0.

    Args:
        mask: bool, rows of this rank or micro-batch.
        mode: a name in `AGGREGATIONS`, from loss_agg_mode.
        num_tokens, num_sequences: `loss_counts` summed over the whole optimizer step.
        scale: divides the sums of seq-mean-token-sum-norm (loss_scale_factor).

    Returns:
        float32, 0 where masked.

    Raises:
        ValueError: the mode is unknown, or the global counts are below those of `mask`.
    """
    if mode not in AGGREGATIONS:
        raise ValueError(f"loss_agg_mode is {mode!r}, expected one of {sorted(AGGREGATIONS)}")
    own_tokens, own_sequences = loss_counts(mask)
    if own_tokens > num_tokens or own_sequences > num_sequences:
        raise ValueError(
            f"the step has {num_tokens} tokens and {num_sequences} sequences, but these rows "
            f"alone have {own_tokens} and {own_sequences}; pass the sums over the whole step"
        )
    per_row = AGGREGATIONS[mode](tokens_per_row(mask).double(), num_tokens, num_sequences, scale)
    return spread(per_row, mask)
