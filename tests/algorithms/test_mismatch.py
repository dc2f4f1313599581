"""How far engine and trainer are apart, and the alarm."""

from __future__ import annotations

import math
import warnings

import pytest
import torch

from mrl.algorithms import mismatch as measured
from mrl.algorithms.masks import full_mask, loss_mask
from mrl.algorithms.mismatch import ALARM, mismatch, sound_alarm
from mrl.config.schema import RolloutCorrectionConfig
from mrl.types import Ragged

LENGTHS = torch.tensor([2, 0, 3])
ENGINE = Ragged(torch.tensor([0.5, 0.25, 0.5, 0.8, 0.1]).log(), LENGTHS)
TRAINER = Ragged(torch.tensor([0.25, 0.5, 0.5, 0.4, 0.1]).log(), LENGTHS)
LOG2 = math.log(2)


def test_the_metrics_are_verls_on_numbers_worked_by_hand() -> None:
    found = mismatch(ENGINE, TRAINER, full_mask(LENGTHS))
    # ratios trainer / engine: 1/2, 2 and 1, 1/2, 1
    wanted = {
        "training/rollout_probs_diff_mean": 0.9 / 5,
        "training/rollout_probs_diff_max": 0.4,
        "training/rollout_log_probs_diff_mean": 3 * LOG2 / 5,
        "training/rollout_log_probs_diff_max": LOG2,
        ALARM: (2 + 2 + 1 + 2 + 1) / 5,
        "rollout_corr/seq_mult_prob_error_max": 2.0,
        "rollout_corr/kl": LOG2 / 5,
        "rollout_corr/k3_kl": (-0.5 + LOG2 + 1 - LOG2 - 0.5 + LOG2) / 5,
        "rollout_corr/rollout_ppl": (math.sqrt(8) + 25 ** (1 / 3)) / 2,
        "rollout_corr/training_ppl": (math.sqrt(8) + 50 ** (1 / 3)) / 2,
        "rollout_corr/log_ppl_diff": (0 + LOG2 / 3) / 2,
        "rollout_corr/log_ppl_abs_diff": LOG2 / 6,
        "rollout_corr/log_ppl_diff_max": LOG2 / 3,
        "rollout_corr/log_ppl_diff_min": 0.0,
        "rollout_corr/ppl_ratio": (1 + 2 ** (1 / 3)) / 2,
        "rollout_corr/chi2_token": (0.25 + 4 + 1 + 0.25 + 1) / 5 - 1,
        "rollout_corr/chi2_seq": (1 + 0.25) / 2 - 1,
        "rollout_corr/rollout_log_ppl": (math.log(8) / 2 + math.log(25) / 3) / 2,
        "rollout_corr/training_log_ppl": (math.log(8) / 2 + math.log(50) / 3) / 2,
    }
    assert found == pytest.approx(wanted, abs=1e-6)


@pytest.mark.parametrize("planted", [math.nan, math.inf, -math.inf])
def test_masked_tokens_are_not_read(planted: float) -> None:
    live = loss_mask(full_mask(LENGTHS), torch.tensor([True, True, False]))
    spoiled = TRAINER.with_values(torch.where(live.values, TRAINER.values, torch.tensor(planted)))
    assert mismatch(ENGINE, spoiled, live) == mismatch(ENGINE, TRAINER, live)
    assert mismatch(ENGINE, spoiled, live)["rollout_corr/kl"] == pytest.approx(0.0, abs=1e-7)


def test_nothing_is_said_of_no_token() -> None:
    nothing = loss_mask(full_mask(LENGTHS), torch.zeros(3, dtype=torch.bool))
    assert mismatch(ENGINE, TRAINER, nothing) == {}
    empty = Ragged.from_rows([])
    assert mismatch(empty, empty, Ragged(torch.zeros(0, dtype=torch.bool), empty.lengths)) == {}


def test_a_batch_in_chunks_gives_the_same_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    noise = torch.Generator().manual_seed(0)
    lengths = torch.randint(0, 9, (40,), generator=noise)
    mask = full_mask(lengths)
    engine, trainer = (Ragged(-torch.rand(mask.total, generator=noise), lengths) for _ in range(2))
    whole = mismatch(engine, trainer, mask)
    monkeypatch.setattr(measured, "_CHUNK", 7)
    assert mismatch(engine, trainer, mask) == pytest.approx(whole, rel=1e-5, abs=1e-7)


def rules(**changes: object) -> RolloutCorrectionConfig:
    return RolloutCorrectionConfig(**changes)  # type: ignore[arg-type]


def test_the_alarm_warns_stops_or_is_silent() -> None:
    found = mismatch(ENGINE, TRAINER, full_mask(LENGTHS))  # 1.6
    with pytest.warns(UserWarning, match=r"step 3: .* factor of 1.6 on average, 2 in the worst"):
        sound_alarm(3, found, rules())
    with pytest.raises(ValueError, match=r"alarm_threshold=1.5.*resharding.verify"):
        sound_alarm(3, found, rules(alarm_threshold=1.5, alarm_action="stop"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sound_alarm(3, found, rules(alarm_threshold=None, alarm_action="stop"))
        sound_alarm(3, found, rules(alarm_threshold=1.7, alarm_action="stop"))
        sound_alarm(3, {}, rules(alarm_action="stop"))
