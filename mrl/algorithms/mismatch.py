"""How far the engine's log-probs of the sampled tokens lie from the trainer's, under verl's names.

Of a step's tens of millions of tokens only sums are kept, some thousand tokens at a time.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mrl.algorithms.masks import tokens_per_row
from mrl.algorithms.surrogates import limited
from mrl.config.schema import RolloutCorrectionConfig
from mrl.types import Ragged

_CHUNK = 1 << 16  # tokens whose intermediate results stay in the cache
_SAFE = 20.0  # log-ratios of responses are limited to it where their exponential is taken
ALARM = "rollout_corr/token_mult_prob_error"


def _stop(text: str) -> None:
    raise ValueError(text)


ALARMS: dict[str, Callable[[str], None]] = {
    "warn": lambda text: warnings.warn(text, stacklevel=3),
    "stop": _stop,
}


def sound_alarm(step: int, metrics: Mapping[str, float], config: RolloutCorrectionConfig) -> None:
    """Warn, or raise ValueError, where a `mismatch` is above rollout_correction.alarm_threshold."""
    found, limit = metrics.get(ALARM, 1.0), config.alarm_threshold
    if limit is None or found <= limit:
        return
    worst = metrics["rollout_corr/seq_mult_prob_error_max"]
    ALARMS[config.alarm_action](
        f"step {step}: the trainer's probability of a sampled token is off from the engine's by a "
        f"factor of {found:.4g} on average, {worst:.4g} in the worst response; "
        f"algorithm.rollout_correction.alarm_threshold={limit:g}. Do both hold the same weights "
        "(resharding.verify=first_step), dtype and rope settings? Small gaps can be corrected: "
        "algorithm.rollout_correction.rollout_is=token"
    )


@dataclass(slots=True)
class _Sums:
    """Sums over tokens, the largest gaps of a token, and sums of each response that has tokens."""

    count: int
    tokens: Tensor  # [6] float64: |p - q|, |log p - log q|, its exp, k1, k3, squared ratio
    highest: Tensor  # [2] of the first two
    rows: Tensor  # [3, N] float64: engine, trainer, the factor by which a probability is off
    counts: Tensor  # [N] float64


def mismatch(engine: Ragged, trainer: Ragged, mask: Ragged) -> dict[str, float]:
    """Compare log-probs of the unmasked tokens; nothing is said of none.

    The alarm looks at `token_mult_prob_error`: the factor by which a token's probability is off on
    average, 1 where the two agree (as NeMo-RL has it). Its mean hides single responses, so the
    worst one's is beside it. `kl` is that of the engine to the trainer.
    """
    sums = _summed(engine, trainer, mask)
    if not sums.count:
        return {}
    probs, logs, errors, k1, k3, squares = (sums.tokens / sums.count).tolist()
    engine_rows, trainer_rows, error_rows = sums.rows / sums.counts
    gaps = engine_rows - trainer_rows
    ratios = ((sums.rows[1] - sums.rows[0]).clamp(-_SAFE, _SAFE)).exp()
    return {
        "training/rollout_probs_diff_mean": probs,
        "training/rollout_probs_diff_max": float(sums.highest[0]),
        "training/rollout_log_probs_diff_mean": logs,
        "training/rollout_log_probs_diff_max": float(sums.highest[1]),
        ALARM: errors,
        "rollout_corr/seq_mult_prob_error_max": float(error_rows.max()),
        "rollout_corr/kl": k1,
        "rollout_corr/k3_kl": k3,
        "rollout_corr/training_ppl": float((-trainer_rows).exp().mean()),
        "rollout_corr/training_log_ppl": float(-trainer_rows.mean()),
        "rollout_corr/rollout_ppl": float((-engine_rows).exp().mean()),
        "rollout_corr/rollout_log_ppl": float(-engine_rows.mean()),
        "rollout_corr/log_ppl_diff": float(gaps.mean()),
        "rollout_corr/log_ppl_abs_diff": float(gaps.abs().mean()),
        "rollout_corr/log_ppl_diff_max": float(gaps.max()),
        "rollout_corr/log_ppl_diff_min": float(gaps.min()),
        "rollout_corr/ppl_ratio": float(gaps.exp().mean()),
        "rollout_corr/chi2_token": squares - 1,
        "rollout_corr/chi2_seq": float(ratios.square().mean()) - 1,
    }


def _summed(engine: Ragged, trainer: Ragged, mask: Ragged) -> _Sums:
    sums = _Sums(
        0,
        torch.zeros(6, dtype=torch.float64),
        torch.zeros(2),
        torch.zeros(3, len(mask), dtype=torch.float64),
        tokens_per_row(mask).double(),
    )
    filled = np.flatnonzero(mask.lengths.numpy())
    stops = mask.lengths.numpy()[filled].cumsum()
    start = row = 0
    columns = (c.chunks(_CHUNK) for c in (engine, trainer, mask))
    for p, q, live in zip(*columns, strict=True):
        end = int(np.searchsorted(stops, start + len(live), "right"))  # chunks are of whole rows
        rows, starts = filled[row:end], np.concatenate([[start], stops[row : end - 1]]) - start
        start, row = start + len(live), end
        if not bool(live.all()):
            p, q = p.masked_fill(~live, 0), q.masked_fill(~live, 0)
        log_ratios = limited(q - p)
        gaps = torch.stack((p.exp() - q.exp(), p - q)).abs_()
        ratios = log_ratios.exp()
        errors = torch.maximum(ratios, ratios.reciprocal()).mul_(live)
        k3 = ratios - log_ratios - 1
        per_token = (*gaps, errors, p - q, k3, ratios.square().mul_(live))
        sums.tokens += torch.stack([values.sum() for values in per_token])
        sums.highest = torch.maximum(sums.highest, gaps.amax(1))
        sums.count += int(live.sum())
        for row_sums, values in zip(sums.rows, (p, q, errors), strict=True):
            found = np.add.reduceat(values.numpy(), starts, dtype=np.float64)
            row_sums[rows] = torch.from_numpy(found)
    live_rows = sums.counts > 0
    sums.rows, sums.counts = sums.rows[:, live_rows], sums.counts[live_rows]
    return sums
