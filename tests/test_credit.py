"""From scores to what tokens are credited with, and which of them are trained on."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mrl.batching.experience import collect
from mrl.config import Config
from mrl.config.schema import (
    AlgorithmConfig,
    DataConfig,
    KLControlConfig,
    OverlongBufferConfig,
    RewardConfig,
    RolloutCorrectionConfig,
)
from mrl.credit import Credit, Credited
from mrl.generation import Generated
from mrl.types import Ragged, Sample, Score

CUT = [(2, "length"), (1, "stop"), (3, "stop"), (3, "length")]


def drawn(scores: list[float | None], lengths: list[tuple[int, str]] = CUT) -> Generated:
    samples = tuple(
        Sample("a", [1], [5] * length, [-1.0] * length, "", reason, 0) for length, reason in lengths
    )
    verdicts = tuple(Score(score, "ok") for score in scores)
    return Generated((), collect([samples]), verdicts, None, (), {})


def credit(given: Generated, gap: float = 0.0, **algorithm: Any) -> tuple[Credited, Credit]:
    """Credit with a trainer whose log-probs are the engine's plus a gap in the last row."""
    config = Config(
        data=DataConfig(max_response_length=4),
        algorithm=AlgorithmConfig(adv_estimator="grpo", norm_adv_by_std_in_grpo=False, **algorithm),
    )
    engine = given.batch.rollout_log_probs
    trainer = Ragged(engine.values.clone(), engine.lengths)
    trainer.values[-3:] += gap
    found = Credit(config, 0.5)
    return found(1, given, trainer, trainer.with_values(trainer.values - 0.1), None), found


def live(found: Credited) -> list[bool]:
    return [bool(row.any()) for row in found.live.rows()]


def test_responses_that_were_cut_may_be_left_out_and_still_count_in_their_group() -> None:
    plain, _ = credit(drawn([1.0, 0.0, 0.0, 1.0]))
    found, _ = credit(drawn([1.0, 0.0, 0.0, 1.0]), overlong_filtering=True)
    assert live(plain) == [True] * 4 and live(found) == [False, True, True, False]
    assert torch.equal(found.advantages.values, plain.advantages.values)
    assert found.metrics["reward/overlong/filtered_ratio"] == 0.5


def test_with_every_response_cut_nothing_is_trained_on() -> None:
    found, _ = credit(drawn([1.0, 0.0], [(2, "length"), (4, "length")]), overlong_filtering=True)
    assert not found.live.values.any() and torch.isfinite(found.weighed.values).all()


def test_what_is_unscored_is_not_trained_on() -> None:
    found, _ = credit(drawn([1.0, None, 0.0, 1.0]))
    assert live(found) == [True, False, True, True]


def test_weights_scale_advantages_and_rejections_leave_the_loss() -> None:
    rules = RolloutCorrectionConfig(
        rollout_is="token", rollout_is_threshold="1.5", rollout_rs="seq_max_k2",
        rollout_rs_threshold="0.3", alarm_threshold=None,
    )  # fmt: skip
    near, _ = credit(drawn([1.0, 0.0, 0.0, 1.0]), gap=0.2, rollout_correction=rules)
    weight = torch.tensor(0.2).exp()
    assert live(near) == [True] * 4
    assert near.weighed.values[-1] == pytest.approx(float(0.5 * weight), rel=1e-5)
    assert near.advantages.values[-1] == 0.5
    far, _ = credit(drawn([1.0, 0.0, 0.0, 1.0]), gap=1.0, rollout_correction=rules)
    assert live(far) == [True, True, True, False]
    assert far.metrics["rollout_corr/rollout_rs_seq_masked_fraction"] == 0.25


def test_too_large_a_gap_stops_before_anything_is_trained() -> None:
    rules = RolloutCorrectionConfig(alarm_action="stop")
    with pytest.raises(ValueError, match=r"alarm_threshold=1\.05"):
        credit(drawn([1.0, 0.0, 0.0, 1.0]), gap=1.0, rollout_correction=rules)
    bypass = RolloutCorrectionConfig(alarm_action="stop", bypass_mode=True)
    credit(drawn([1.0, 0.0, 0.0, 1.0]), gap=1.0, rollout_correction=bypass)


def test_the_kl_in_the_reward_steers_its_coefficient() -> None:
    control = KLControlConfig(type="adaptive", target_kl=0.05, horizon=100)
    found, state = credit(drawn([1.0, 0.0, 0.0, 1.0]), use_kl_in_reward=True, kl_ctrl=control)
    assert found.metrics["actor/reward_kl_penalty"] == pytest.approx(0.1, rel=1e-5)
    assert found.metrics["actor/reward_kl_penalty_coeff"] == 0.5
    assert state.kl.coef == pytest.approx(0.5 * (1 + 0.2 * 4 / 100))
    # scores 1 0 0 1 less 0.5 * 0.1 a token of 2 1 3 3
    rows = [float(row.sum()) for row in found.rewards.rows()]
    assert rows == pytest.approx([0.9, -0.05, -0.15, 0.85], abs=1e-6)


def test_long_responses_are_penalised_before_they_are_compared() -> None:
    given = drawn([1.0, 1.0, 1.0, 1.0])
    config = Config(
        data=DataConfig(max_response_length=4),
        reward=RewardConfig(overlong_buffer=OverlongBufferConfig(True, 2, 1.0)),
        algorithm=AlgorithmConfig(adv_estimator="grpo", norm_adv_by_std_in_grpo=False),
    )
    log_probs = given.batch.rollout_log_probs
    found = Credit(config, 0.0)(1, given, log_probs, None, None)
    assert [float(row[0]) for row in found.advantages.rows()] == [0.25, 0.25, -0.25, -0.25]
