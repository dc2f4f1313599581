"""The batch of a check: rows of skewed lengths, and what to train on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mrl.algorithms.losses import loss_counts, token_weights
from mrl.types import PolicyBatch, Ragged, Sequences, ValueBatch

_SKEW = 3.0  # of the length law: the k-th of n responses has (k / n) ** 3 of the longest length
_LIVE = 0.85  # share of response tokens in the loss


@dataclass(frozen=True, slots=True)
class Targets:
    """How the losses weigh tokens, and what the batch carries."""

    loss_agg_mode: str = "token-mean"
    critic_agg_mode: str = "token-mean"
    has_reference: bool = False  # log-probs of a reference policy, for a KL term
    seed: int = 8


def response_lengths(count: int, longest: int, seed: int) -> tuple[int, ...]:
    """Draw lengths: many short and few long, one of a single token, odd ones where there is room.

    Their order is random, the same for the same seed.
    """
    lengths = [max(1, round(longest * ((k + 1) / count) ** _SKEW)) for k in range(count)]
    lengths[0] = 1
    for k in range(1, count, 2):
        lengths[k] -= 1 - lengths[k] % 2 if lengths[k] > 1 else 0
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed)).tolist()
    return tuple(lengths[k] for k in order)


def make_rows(
    prompts: Sequence[Sequence[int]], longest: int, tokens: Sequence[int] | range, seed: int
) -> Sequences:
    """Add to each prompt a response of up to `longest` of the given `tokens`, drawn at random."""
    generator = torch.Generator().manual_seed(seed)
    source = torch.tensor(list(tokens), dtype=torch.int64)
    lengths = response_lengths(len(prompts), longest, seed)
    rows = [
        torch.cat(
            [
                torch.tensor(list(prompt), dtype=torch.int64),
                source[torch.randint(len(source), (length,), generator=generator)],
            ]
        )
        for prompt, length in zip(prompts, lengths, strict=True)
    ]
    return Sequences(Ragged.from_rows(rows), torch.tensor(lengths))


def random_prompts(
    count: int, longest: int, tokens: range, seed: int
) -> tuple[tuple[int, ...], ...]:
    """Draw prompts of 1 to `longest` tokens, one of them of a single token."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest + 1, (count,), generator=generator).tolist()
    lengths[-1:] = [1] * bool(count)
    return tuple(
        tuple(torch.randint(tokens.start, tokens.stop, (length,), generator=generator).tolist())
        for length in lengths
    )


def policy_batch(rows: Sequences, log_probs: Ragged, targets: Targets) -> PolicyBatch:
    """Make a mini-batch near a policy: ratios on both sides of the clip, some tokens masked.

    Advantages have both signs and a mean of 0.5, so that the loss is no difference of near equals.
    """
    noise = _Noise(targets.seed, log_probs.values)
    weights = _weights(rows, noise.live, targets.loss_agg_mode)
    return PolicyBatch(
        rows,
        log_probs.with_values(log_probs.values + 0.3 * noise.old),
        log_probs.with_values(0.5 + noise.advantages),
        weights,
        log_probs.with_values(log_probs.values + 0.3 * noise.reference)
        if targets.has_reference
        else None,
    )


def value_batch(rows: Sequences, values: Ragged, targets: Targets) -> ValueBatch:
    """Make a mini-batch near a value model: some values are clipped, some tokens masked."""
    noise = _Noise(targets.seed, values.values)
    old = values.values + 0.3 * noise.old
    return ValueBatch(
        rows,
        values.with_values(old),
        values.with_values(old + 2 * noise.advantages),
        _weights(rows, noise.live, targets.critic_agg_mode),
    )


class _Noise:
    """The random columns of a batch [T]."""

    def __init__(self, seed: int, like: Tensor) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.old, self.advantages, self.reference = (
            torch.randn(like.shape, generator=generator) for _ in range(3)
        )
        self.live = torch.rand(like.shape, generator=generator) < _LIVE
        self.live[0] = True


def _weights(rows: Sequences, live: Tensor, mode: str) -> Ragged:
    mask = Ragged(live, rows.response_lengths)
    return token_weights(mask, mode, *loss_counts(mask))
