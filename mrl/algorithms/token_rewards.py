"""From the score of a response to a reward on each of its tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mrl.algorithms.masks import masked, tokens_per_row
from mrl.config.schema import OverlongBufferConfig
from mrl.types import AtEnd, Ragged, Repeated, Sample, Score


def is_scored(score: Score) -> bool:
    """Tell whether a verdict carries a usable number."""
    return score.value is not None and math.isfinite(score.value)


def score_tensors(scores: Sequence[Score]) -> tuple[Tensor, Tensor]:
    """Split verdicts into scores [N] float32 (0 where unscored) and `scored` [N] bool."""
    scored = [is_scored(score) for score in scores]
    values = [s.value if ok else 0.0 for s, ok in zip(scores, scored, strict=True)]
    return torch.tensor(values, dtype=torch.float32), torch.tensor(scored, dtype=torch.bool)


@dataclass(frozen=True, slots=True)
class Outcomes:
    """What a batch of N responses is rewarded with as a whole."""

    rewards: Tensor  # [N] float32: scores, less penalties of their length; 0 where not scored
    scored: Tensor  # [N] bool: and what the estimator compares with is scored as well
    baselines: Tensor | None  # [N] float32: the reward of the prompt's greedy response
    metrics: dict[str, float]


def outcome_rewards(
    scores: Sequence[Score],
    lengths: Tensor,
    greedy: Sequence[tuple[Sample, Score]] | None,
    max_length: int,
    overlong: OverlongBufferConfig,
) -> Outcomes:
    """Turn verdicts into rewards.

    Args:
        scores: [N], the prompts' responses one prompt after the other.
        lengths: [N] int64, tokens of the responses.
        greedy: each prompt's greedy response and its verdict; None: none were drawn.
        max_length: of a response, tokens.
        overlong: the penalty of long responses, of greedy ones too.
    """
    rewards, scored = score_tensors(scores)
    metrics: dict[str, float] = {}
    if overlong.enable:
        penalties = overlong_penalties(lengths, max_length, overlong.len, overlong.penalty_factor)
        rewards = masked(rewards + penalties, scored)
        metrics["reward/overlong/mean"] = float(penalties.double().mean())
        metrics["reward/overlong/ratio"] = float((penalties < 0).double().mean())
    if greedy is None:
        return Outcomes(rewards, scored, None, metrics)
    verdicts = [score for _, score in greedy]
    long = torch.tensor([len(sample.response_ids) for sample, _ in greedy], dtype=torch.int64)
    found = outcome_rewards(verdicts, long, None, max_length, overlong)
    each = len(scores) // len(greedy)
    if bool(found.scored.any()):
        metrics["critic/baseline/mean"] = float(found.rewards[found.scored].double().mean())
    metrics["reward/baseline_unscored"] = float((~found.scored).sum())
    scored = scored & found.scored.repeat_interleave(each)
    return Outcomes(masked(rewards, scored), scored, found.rewards.repeat_interleave(each), metrics)


def overlong_penalties(lengths: Tensor, max_length: int, buffer: int, factor: float) -> Tensor:
    """Give what a response's length adds to its reward (Yu et al. 2025, DAPO, equation 13).

    Nothing up to `max_length - buffer` tokens; from there down to -factor at `max_length`.

    Args:
        lengths: [N] int64, tokens of the responses.
        max_length: of a response, tokens.
        buffer: the last tokens, over which the penalty grows.
        factor: the largest penalty.

    Returns:
        [N] float32, at most 0.
    """
    excess = lengths - (max_length - buffer)
    return -(excess.clamp(min=0).double() / buffer * factor).float()


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


def scaled(column: Ragged, factors: Ragged | None) -> Ragged:
    """Multiply a column by the factors of its tokens; None: they are all 1."""
    return column if factors is None else column.with_values(column.values * factors.values)


def _last_tokens(mask: Ragged) -> tuple[Tensor, Tensor]:
    """Find the flat position of each row's last unmasked token [N], and whether it has one."""
    positions = torch.where(mask.values, torch.arange(mask.total), -1)
    last = torch.full((len(mask),), -1, dtype=torch.int64)
    last = last.scatter_reduce(0, mask.row_index(), positions, "amax")
    return last, tokens_per_row(mask) > 0
