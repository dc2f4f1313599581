"""Policy losses of single tokens: one signature, one registry.

Every loss here is proportional to the advantage as long as its sign stays, so an importance weight
of the sample, which is never negative, is a factor of the advantage.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from mrl.algorithms.kl import LOG_RATIO_LIMIT
from mrl.algorithms.masks import sums_of_rows, to_tokens

SEQUENCE_LOG_RATIO_LIMIT = 10.0  # verl's upper limit of a sequence's log-ratio


@dataclass(frozen=True, slots=True)
class Clips:
    """The bounds of a ratio: 1 - low and 1 + high, and c where the advantage is negative."""

    low: float
    high: float
    c: float


@dataclass(frozen=True, slots=True)
class Tokens:
    """What a loss reads of the T tokens of N whole responses; 0 where not live."""

    log_probs: Tensor  # [T], differentiable
    log_ratios: Tensor  # [T], differentiable: log-prob less old log-prob
    advantages: Tensor  # [T]
    live: Tensor  # [T] bool
    lengths: Tensor  # [N] int64 on the CPU


@dataclass(frozen=True, slots=True)
class Surrogate:
    """The loss of each token, before its weight, and where a bound replaced it."""

    loss: Tensor  # [T], differentiable
    clipped: Tensor  # [T] bool
    clipped_lower: Tensor  # [T] bool: by the dual clip


PolicyLossFunction = Callable[[Tokens, Clips], Surrogate]
POLICY_LOSSES: dict[str, PolicyLossFunction] = {}


def register(name: str) -> Callable[[PolicyLossFunction], PolicyLossFunction]:
    """Enter a loss under the name that actor.policy_loss.loss_mode uses."""

    def enter(function: PolicyLossFunction) -> PolicyLossFunction:
        if name in POLICY_LOSSES:
            raise ValueError(f"policy loss {name!r} is already registered")
        POLICY_LOSSES[name] = function
        return function

    return enter


def limited(log_ratios: Tensor) -> Tensor:
    """Keep log-ratios within +-20, as in verl, so that their exponentials are finite."""
    return log_ratios.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


@register("vanilla")
def vanilla(tokens: Tokens, clips: Clips) -> Surrogate:
    """Clip the ratio (Schulman et al. 2017, equation 7), twice where the advantage is negative.

    There the loss is at most -c * advantage (Ye et al. 2020, equation 5). Bounds that differ are
    DAPO's clip-higher (Yu et al. 2025, equation 10).
    """
    advantages = tokens.advantages
    plain, bounded = _clipped(limited(tokens.log_ratios).exp(), advantages, clips)
    pessimistic = torch.maximum(plain, bounded)
    ceiling = -advantages * clips.c
    negative = advantages < 0
    loss = torch.where(negative, torch.minimum(ceiling, pessimistic), pessimistic)
    return Surrogate(loss, bounded > plain, (pessimistic > ceiling) & negative)


@register("gspo")
def gspo(tokens: Tokens, clips: Clips) -> Surrogate:
    """Clip the ratio of a whole response (Zheng et al. 2025, GSPO, equations 5 and 7).

    The ratio is the geometric mean of the tokens'. Its gradient goes through each token's own
    log-prob (GSPO-token, equation 14), so that advantages may differ between tokens; where they
    do not, it is GSPO's.
    """
    counts = sums_of_rows(tokens.live.to(tokens.log_ratios.dtype), tokens.lengths).clamp(min=1)
    means = sums_of_rows(tokens.log_ratios.detach(), tokens.lengths) / counts
    own = tokens.log_probs - tokens.log_probs.detach()
    log_ratios = own + to_tokens(means, tokens.lengths)
    ratio = log_ratios.clamp(max=SEQUENCE_LOG_RATIO_LIMIT).exp()
    plain, bounded = _clipped(ratio, tokens.advantages, clips)
    nowhere = torch.zeros_like(tokens.live)
    return Surrogate(torch.maximum(plain, bounded), (bounded > plain) & tokens.live, nowhere)


@register("cispo")
def cispo(tokens: Tokens, clips: Clips) -> Surrogate:
    """Clip the importance weight alone (MiniMax 2025, CISPO, equations 4 and 5).

    Every token keeps a gradient: that of its log-prob, times the clipped weight.
    """
    ratio = limited(tokens.log_ratios.detach()).exp()
    weight = ratio.clamp(1 - clips.low, 1 + clips.high)
    loss = -weight * tokens.advantages * tokens.log_probs
    return Surrogate(loss, weight != ratio, torch.zeros_like(tokens.live))


@register("gpg")
def gpg(tokens: Tokens, clips: Clips) -> Surrogate:
    """Take the policy gradient as it is (Chu et al. 2025, arXiv:2504.02546): no ratio or bound."""
    nowhere = torch.zeros_like(tokens.live)
    return Surrogate(-tokens.advantages * tokens.log_probs, nowhere, nowhere)


def _clipped(ratio: Tensor, advantages: Tensor, clips: Clips) -> tuple[Tensor, Tensor]:
    """Give the loss at a ratio, and at the ratio brought inside the bounds."""
    inside = ratio.clamp(1 - clips.low, 1 + clips.high)
    return -advantages * ratio, -advantages * inside
