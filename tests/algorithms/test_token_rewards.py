from __future__ import annotations

import pytest
import torch

from mrl.algorithms.token_rewards import (
    outcome_rewards,
    overlong_penalties,
    score_tensors,
    token_rewards,
)
from mrl.config.schema import OverlongBufferConfig
from mrl.types import Ragged, Sample, Score

NAN = float("nan")


def ragged(*rows: list) -> Ragged:
    return Ragged.from_rows([torch.tensor(row) for row in rows])


def scored(*flags: bool) -> torch.Tensor:
    return torch.tensor(flags)


def rows(column: Ragged) -> list[list[float]]:
    return [row.tolist() for row in column.rows()]


def test_the_score_lies_on_the_last_real_token():
    mask = ragged([True, True, True, False], [True, True])
    rewards = token_rewards(torch.tensor([1.0, 2.0]), scored(True, True), mask, None, 0.0)
    assert rows(rewards) == [[0, 0, 1, 0], [0, 2]]


def test_an_empty_response_gets_no_reward_and_touches_no_neighbour():
    mask = Ragged(torch.tensor([False, False, False, True]), torch.tensor([3, 0, 1]))
    rewards = token_rewards(
        torch.tensor([10.0, 10.0, 0.0]), scored(True, True, True), mask, None, 0
    )
    assert rows(rewards) == [[0, 0, 0], [], [0]]


def test_an_unscored_response_gets_no_score():
    mask = ragged([True], [True])
    rewards = token_rewards(torch.tensor([NAN, 1.0]), scored(False, True), mask, None, 0.0)
    assert rows(rewards) == [[0], [1]]


def test_the_kl_penalty_is_subtracted_on_each_unmasked_token():
    mask = ragged([True, True, False])
    kl = ragged([1.0, 2.0, NAN])
    rewards = token_rewards(torch.tensor([1.0]), scored(True), mask, kl, 0.1)
    assert rewards.values.tolist() == pytest.approx([-0.1, 0.8, 0.0])
    assert rewards.values.dtype == torch.float32


def test_a_verdict_without_a_finite_number_is_unscored():
    verdicts = [Score(0.5, "ok"), Score(None, "timeout"), Score(NAN, "ok"), Score(0.0, "ok")]
    values, flags = score_tensors(verdicts)
    assert values.tolist() == [0.5, 0.0, 0.0, 0.0]
    assert flags.tolist() == [True, False, False, True]


def test_the_penalty_grows_over_the_last_tokens_before_the_limit() -> None:
    # limit 100, buffer 20, factor 0.5: nothing to 80, half of it at 90, all of it at 100
    found = overlong_penalties(torch.tensor([0, 80, 81, 90, 100]), 100, 20, 0.5)
    assert found.tolist() == pytest.approx([0, 0, -0.025, -0.25, -0.5])


def greedy(length: int, value: float | None) -> tuple[Sample, Score]:
    return Sample("a", [1], [2] * length, [0.0] * length, "", "stop", 0), Score(value, "ok")


def test_rewards_are_scores_less_the_penalties_of_their_length() -> None:
    rules = OverlongBufferConfig(enable=True, len=4, penalty_factor=1.0)
    found = outcome_rewards(
        [Score(1.0, "ok"), Score(None, "timeout"), Score(0.5, "ok")],
        torch.tensor([8, 8, 5]), None, 8, rules,
    )  # fmt: skip
    assert found.rewards.tolist() == pytest.approx([0.0, 0.0, 0.25])
    assert found.scored.tolist() == [True, False, True] and found.baselines is None
    assert found.metrics["reward/overlong/mean"] == pytest.approx(-2.25 / 3)
    assert found.metrics["reward/overlong/ratio"] == 1.0


def test_a_prompt_whose_greedy_response_is_unscored_is_not_rewarded() -> None:
    verdicts = [Score(value, "ok") for value in (1.0, 2.0, 3.0, 4.0)]
    found = outcome_rewards(
        verdicts, torch.tensor([1, 2, 3, 4]), [greedy(2, 0.5), greedy(3, None)], 8,
        OverlongBufferConfig(),
    )  # fmt: skip
    assert found.scored.tolist() == [True, True, False, False]
    assert found.rewards.tolist() == [1.0, 2.0, 0.0, 0.0]
    assert found.baselines is not None and found.baselines.tolist() == [0.5, 0.5, 0.0, 0.0]
    assert found.metrics == {"critic/baseline/mean": 0.5, "reward/baseline_unscored": 1.0}
