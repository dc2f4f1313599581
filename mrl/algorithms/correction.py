"""The engine samples, the trainer differentiates: what lies between them, measured and made good.

The two compute the same model by different kernels, so the engine's distribution is another one.
Liu, Li et al., "When Speed Kills Stability" (2025) and Yao et al., "Your Efficient RL Framework
Secretly Brings You Off-Policy RL Training" (2025) weigh samples by trainer / engine, truncated;
IcePop (Ling team 2025) leaves out those outside of two bounds; rejection leaves whole responses
out by a statistic of their log-ratios.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from mrl.algorithms.masks import masked, sums_of_rows, to_tokens
from mrl.algorithms.surrogates import limited
from mrl.config.bounds import Correction, Rejection
from mrl.types import Ragged


@dataclass(frozen=True, slots=True)
class Corrected:
    """What a correction makes of a batch."""

    live: Ragged  # bool: the tokens that are still trained on
    weights: Ragged | None  # float32, of each token, 0 where masked; None: all are 1
    metrics: dict[str, float]


# log-ratios trainer / engine [T] -> a number of each token [T], 0 where the two agree
STATISTICS: dict[str, Callable[[Tensor], Tensor]] = {
    "k1": lambda log_ratios: -log_ratios,
    "k2": lambda log_ratios: 0.5 * log_ratios.square(),
    "k3": lambda log_ratios: log_ratios.exp() - 1 - log_ratios,
}


def _largest(values: Tensor, live: Tensor, lengths: Tensor) -> Tensor:
    rows = torch.repeat_interleave(torch.arange(len(lengths)), lengths).to(values.device)
    lowest = torch.full((len(lengths),), -math.inf, dtype=values.dtype, device=values.device)
    found = lowest.scatter_reduce(0, rows, values.masked_fill(~live, -math.inf), "amax")
    return found.nan_to_num(neginf=0.0)


# a number of each token [T], live [T], lengths [N] -> what is judged, of each token [T]
LEVELS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "token": lambda values, live, lengths: values,
    "seq_sum": lambda values, live, lengths: to_tokens(
        sums_of_rows(masked(values, live), lengths), lengths
    ),
    "seq_mean": lambda values, live, lengths: to_tokens(
        sums_of_rows(masked(values, live), lengths) / _counts(live, lengths, values), lengths
    ),
    "seq_max": lambda values, live, lengths: to_tokens(_largest(values, live, lengths), lengths),
}

# log-ratios [T], live [T], lengths [N] -> the log-ratio whose exponential weighs a token [T]
WEIGHTS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "token": lambda log_ratios, live, lengths: log_ratios,
    "sequence": LEVELS["seq_sum"],
}


def importance_weights(
    log_ratios: Tensor, live: Tensor, lengths: Tensor, correction: Correction
) -> Tensor:
    """Weigh tokens by trainer / engine, [T]: truncated above, or 0 outside of two bounds.

    Args:
        log_ratios: [T], trainer less engine; not read where not live.
        live: [T] bool.
        lengths: [N] int64 on the CPU, of whole responses.
        correction: with a level.
    """
    assert correction.level is not None
    raw = limited(WEIGHTS[correction.level](masked(log_ratios, live), live, lengths)).exp()
    if correction.low is None:
        return masked(raw.clamp(max=correction.high), live)
    inside = (raw >= correction.low) & (raw <= correction.high)
    return masked(raw, live & inside)


def kept_tokens(
    log_ratios: Tensor, live: Tensor, lengths: Tensor, rejection: Rejection
) -> tuple[Tensor, Tensor]:
    """Say which tokens a rejection keeps [T] bool, and the statistic that it judged [T]."""
    values = STATISTICS[rejection.statistic](limited(masked(log_ratios, live)))
    judged = LEVELS[rejection.level](values, live, lengths)
    return (judged >= rejection.low) & (judged <= rejection.high), judged


def factors(log_ratios: Tensor, live: Tensor, lengths: Tensor, correction: Correction) -> Tensor:
    """Give the factor of each token's advantage, [T]: its weight, or 0 where it is rejected."""
    found = live.to(log_ratios.dtype)
    if correction.level is not None:
        found = importance_weights(log_ratios, live, lengths, correction)
    for rejection in correction.rejections:
        found = masked(found, kept_tokens(log_ratios, live, lengths, rejection)[0])
    return found


def correct(trainer: Ragged, engine: Ragged, live: Ragged, correction: Correction) -> Corrected:
    """Weigh and reject the tokens of a whole batch by their log-probs.

    What is rejected leaves the loss and its denominators. Normalised weights have mean 1 over the
    tokens, or over the responses where those are weighed.
    """
    mask, lengths = live.values, live.lengths
    log_ratios = masked(trainer.values - engine.values, mask).double()
    metrics: dict[str, float] = {}
    weights = None
    if correction.level is not None:
        found = importance_weights(log_ratios, mask, lengths, correction)
        metrics |= _weight_metrics(found, mask, lengths, correction)
        if correction.normalize:
            mean = metrics["rollout_corr/rollout_is_batch_norm_factor"] = _mean_weight(
                found, mask, lengths, correction
            )
            found = found / mean
        weights = live.with_values(found.float())
    kept = mask
    for rejection in correction.rejections:
        keep, judged = kept_tokens(log_ratios, mask, lengths, rejection)
        name = f"rollout_corr/rollout_rs_{rejection.name}"
        metrics |= _rejected(name, keep, mask, lengths)
        if bool(mask.any()):
            metrics[f"{name}_mean"] = float(judged[mask].mean())
            metrics[f"{name}_max"] = float(judged[mask].max())
            metrics[f"{name}_min"] = float(judged[mask].min())
        kept = kept & keep
    if correction.rejections:
        metrics |= _rejected("rollout_corr/rollout_rs", kept, mask, lengths)
    return Corrected(live.with_values(kept), weights, metrics)


def _counts(live: Tensor, lengths: Tensor, like: Tensor) -> Tensor:
    return sums_of_rows(live.to(like.dtype), lengths).clamp(min=1)


def _mean_weight(weights: Tensor, mask: Tensor, lengths: Tensor, correction: Correction) -> float:
    """Average the weights of tokens, or of responses that have any; 1 where that is nothing."""
    if correction.level == "sequence":
        filled = sums_of_rows(mask.double(), lengths) > 0
        means = sums_of_rows(weights, lengths) / _counts(mask, lengths, weights)
        mean = float(means[filled].mean()) if bool(filled.any()) else 0.0
    else:
        mean = float(weights[mask].mean()) if bool(mask.any()) else 0.0
    return mean if mean > 1e-8 else 1.0


def _weight_metrics(
    weights: Tensor, mask: Tensor, lengths: Tensor, correction: Correction
) -> dict[str, float]:
    if not bool(mask.any()):
        return {}
    held = weights[mask]
    mean = float(held.mean())
    squares = float(held.square().mean())
    rows = (sums_of_rows(weights, lengths) / _counts(mask, lengths, weights))[
        sums_of_rows(mask.double(), lengths) > 0
    ]
    prefix = "rollout_corr/rollout_is"
    found = {
        f"{prefix}_mean": mean,
        f"{prefix}_std": math.sqrt(max(squares - mean * mean, 0.0)),
        f"{prefix}_max": float(held.max()),
        f"{prefix}_min": float(held.min()),
        f"{prefix}_eff_sample_size": mean * mean / squares if squares else 0.0,
        f"{prefix}_ratio_fraction_high": float((held >= correction.high).double().mean()),
        f"{prefix}_seq_mean": float(rows.mean()),
        f"{prefix}_seq_max": float(rows.max()),
        f"{prefix}_seq_min": float(rows.min()),
    }
    if correction.low is not None:
        found[f"{prefix}_oob_ratio"] = float((held == 0).double().mean())
    return found


def _rejected(name: str, kept: Tensor, mask: Tensor, lengths: Tensor) -> dict[str, float]:
    """Give the shares of tokens, and of responses with one, that are rejected."""
    lost = sums_of_rows((mask & ~kept).double(), lengths)
    counts = sums_of_rows(mask.double(), lengths)
    filled = counts > 0
    if not bool(filled.any()):
        return {}
    return {
        f"{name}_masked_fraction": float(lost.sum() / counts.sum()),
        f"{name}_seq_masked_fraction": float((lost[filled] > 0).double().mean()),
    }
