"""Numbers of one training step under verl's names.

The kinds that reduce over micro-batches and ranks are in `mrl.algorithms.reductions`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mrl.algorithms.masks import loss_mask, masked_row_sums
from mrl.algorithms.mismatch import mismatch
from mrl.algorithms.token_rewards import is_scored, score_tensors
from mrl.batching.experience import Experience
from mrl.types import Ragged, Repeated, Score

_CHUNK = 1 << 18  # values that a histogram looks at in one go


@dataclass(frozen=True, slots=True)
class ScoredBatch:
    """All samples of one step, as `summarise_batch` reads them; token columns are [R] a row."""

    uids: tuple[str, ...]  # [N]
    scores: tuple[Score, ...]  # [N]
    prompt_lengths: tuple[int, ...]  # [N] tokens
    max_prompt_length: int
    truncated: tuple[bool, ...]  # [N] the response was cut at the limit
    mask: Ragged  # bool
    rollout_log_probs: Ragged  # float32, by the engine
    old_log_probs: Ragged | None  # float32, by the trainer; None: it computed none
    token_rewards: Ragged  # float32
    advantages: Ragged  # float32
    returns: Ragged  # float32
    values: Ragged | None = None  # float32

    @staticmethod
    def of(
        experience: Experience,
        max_prompt_length: int,
        scores: tuple[Score, ...],
        old_log_probs: Ragged | None,
        token_rewards: Ragged,
        advantages: Ragged,
        returns: Ragged,
        values: Ragged | None,
    ) -> ScoredBatch:
        """Join the experience of a step with what was computed on it."""
        samples, sequences = experience.samples, experience.sequences
        return ScoredBatch(
            experience.uids,
            scores,
            tuple((sequences.tokens.lengths - sequences.response_lengths).tolist()),
            max_prompt_length,
            tuple(sample.finish_reason == "length" for sample in samples),
            experience.mask,
            experience.rollout_log_probs,
            old_log_probs,
            token_rewards,
            advantages,
            returns,
            values,
        )


def summarise_batch(batch: ScoredBatch) -> dict[str, float]:
    """Describe the samples of one step; a statistic over nothing is left out."""
    values, scored = score_tensors(batch.scores)
    lengths = batch.mask.lengths
    live = loss_mask(batch.mask, scored)
    sequence_rewards = masked_row_sums(batch.token_rewards, batch.mask)
    return {
        **_statistics("critic/score", values[scored]),
        **_statistics("critic/rewards", sequence_rewards[scored]),
        **_token_statistics("critic/advantages", batch.advantages, live),
        **_token_statistics("critic/returns", batch.returns, live),
        **_critic_metrics(batch, live),
        **_statistics("response_length", lengths),
        **_mean("response_length/clip_ratio", batch.truncated),
        **_statistics("prompt_length", torch.tensor(batch.prompt_lengths)),
        **_mean(
            "prompt_length/clip_ratio",
            [length >= batch.max_prompt_length for length in batch.prompt_lengths],
        ),
        **(
            mismatch(batch.rollout_log_probs, batch.old_log_probs, batch.mask)
            if batch.old_log_probs is not None
            else {}
        ),
        **_reward_metrics(batch.scores),
        **_group_metrics(batch.uids, values, scored),
    }


Chunks = Callable[[], Iterator[Tensor]]  # values, some at a time, as often as they are asked for


def distributions(batch: ScoredBatch) -> dict[str, Chunks]:
    """Give the values behind the means that are worth a histogram, by their metrics' names."""
    scores, scored = score_tensors(batch.scores)
    live = loss_mask(batch.mask, scored)
    found: dict[str, Chunks] = {
        "response_length": lambda: iter([batch.mask.lengths]),
        "critic/score": lambda: iter([scores[scored]]),
        "critic/advantages": lambda: _where(batch.advantages.chunks(_CHUNK), live),
    }
    if (own := batch.old_log_probs) is not None:

        def gaps() -> Iterator[Tensor]:
            pairs = zip(own.chunks(_CHUNK), batch.rollout_log_probs.chunks(_CHUNK), strict=True)
            return _where((trainer - engine for trainer, engine in pairs), batch.mask)

        found["training/rollout_log_probs_diff"] = gaps
    return found


def _where(chunks: Iterator[Tensor], mask: Ragged) -> Iterator[Tensor]:
    pairs = zip(chunks, mask.chunks(_CHUNK), strict=True)
    return (values if bool(kept.all()) else values[kept] for values, kept in pairs)


def _statistics(name: str, values: Tensor) -> dict[str, float]:
    if not values.numel():
        return {}
    low, high = values.aminmax()
    return {
        f"{name}/mean": float(values.double().mean()),
        f"{name}/max": float(high),
        f"{name}/min": float(low),
    }


def _token_statistics(name: str, column: Ragged, live: Ragged) -> dict[str, float]:
    if not (isinstance(column, Repeated) and isinstance(live, Repeated)):
        return _statistics(name, _kept(column, live))
    rows = live.numbers & (live.lengths > 0)
    found = _statistics(name, column.numbers[rows])
    if found:  # the mean is over tokens
        total = column.row_sums(torch.float64)[rows].sum()
        found[f"{name}/mean"] = float(total / live.lengths[rows].sum())
    return found


def _kept(column: Ragged, live: Ragged) -> Tensor:
    """Give the values of the live tokens; most steps have no other, and need no copy."""
    return column.values if _all(live) else column.values[live.values]


def _all(mask: Ragged) -> bool:
    return bool((mask.numbers if isinstance(mask, Repeated) else mask.values).all())


def _mean(name: str, flags: Sequence[bool]) -> dict[str, float]:
    return {name: sum(flags) / len(flags)} if flags else {}


def _critic_metrics(batch: ScoredBatch, live: Ragged) -> dict[str, float]:
    if batch.values is None:
        return {}
    values, returns = _kept(batch.values, live).double(), _kept(batch.returns, live).double()
    metrics = _statistics("critic/values", values)
    if values.numel() > 1:
        unexplained = (returns - values).var() / (returns.var() + 1e-5)
        metrics["critic/vf_explained_var"] = float(1 - unexplained)
    return metrics


def _reward_metrics(scores: Sequence[Score]) -> dict[str, float]:
    """Count what could not be scored, and average the further numbers of the reward function."""
    statuses = Counter(score.status for score in scores)
    metrics = {
        "reward/timeouts": float(statuses["timeout"]),
        "reward/errors": float(statuses["error"]),
        "reward/unscored": float(sum(not is_scored(score) for score in scores)),
    }
    extras: dict[str, list[float]] = {}
    for score in scores:
        for name, value in (score.extra or {}).items():
            extras.setdefault(name, []).append(value)
    return metrics | {f"reward/{name}/mean": sum(v) / len(v) for name, v in extras.items()}


def _group_metrics(uids: Sequence[str], values: Tensor, scored: Tensor) -> dict[str, float]:
    """Describe the groups over which advantages compare: size, and whether scores differ."""
    groups: dict[str, list[float]] = {uid: [] for uid in uids}
    for uid, value, ok in zip(uids, values.tolist(), scored.tolist(), strict=True):
        if ok:
            groups[uid].append(value)
    sizes = torch.tensor([len(group) for group in groups.values()])
    equal = [len(set(group)) <= 1 for group in groups.values()]
    return {**_statistics("group/size", sizes), **_mean("group/zero_variance_ratio", equal)}
