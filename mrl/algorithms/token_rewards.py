"""From the score of a response to a reward on each of its tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from mrl.algorithms.masks import masked, tokens_per_row
from mrl.types import AtEnd, Ragged, Repeated, Score


def is_scored(score: Score) -> bool:
    """Tell whether a verdict carries a usable number."""
    return score.value is not None and math.isfinite(score.value)


def score_tensors(scores: Sequence[Score]) -> tuple[Tensor, Tensor]:
    """Split verdicts into scores [N] float32 (0 where unscored) and `scored` [N] bool."""
    scored = [is_scored(score) for score in scores]
    values = [s.value if ok else 0.0 for s, ok in zip(scores, scored, strict=True)]
    return torch.tensor(values, dtype=torch.float32), torch.tensor(scored, dtype=torch.bool)


def token_rewards(
    scores: Tensor, scored: Tensor, mask: Ragged, kl: Ragged | None, kl_coef: float
) -> Ragged:
    """Put each score on the last unmasked token of its response, less the KL penalty.

    A response without an unmasked token gets no reward anywhere. An unscored response gets no
    score; its KL penalty stays, and its advantages are 0 whatever its rewards are.

    Args:
        scores: [N] float; not read where not `scored`.
        scored: [N] bool.
        mask: bool, one row a response.
        kl: per-token KL estimate towards the reference, or None for no penalty.
        kl_coef: its coefficient.

    Returns:
        float32, one row a response, 0 where masked.
    """
    if kl is None and isinstance(mask, Repeated):
        return AtEnd(masked(scores.float(), scored & mask.numbers), mask.lengths)
    rewards = torch.zeros(mask.total, dtype=torch.float32)
    if kl is not None:
        rewards -= kl_coef * masked(kl.values, mask.values).float()
    ends, has_tokens = _last_tokens(mask)
    paid = scored & has_tokens
    rewards[ends[paid]] += scores[paid].float()
    return mask.with_values(rewards)


def _last_tokens(mask: Ragged) -> tuple[Tensor, Tensor]:
    """Find the flat position of each row's last unmasked token [N], and whether it has one."""
    positions = torch.where(mask.values, torch.arange(mask.total), -1)
    last = torch.full((len(mask),), -1, dtype=torch.int64)
    last = last.scatter_reduce(0, mask.row_index(), positions, "amax")
    return last, tokens_per_row(mask) > 0
