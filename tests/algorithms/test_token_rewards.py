from __future__ import annotations

import pytest
import torch

from mrl.algorithms.token_rewards import score_tensors, token_rewards
from mrl.types import Ragged, Score

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
