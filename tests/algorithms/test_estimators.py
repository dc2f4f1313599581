"""Each estimator's published formula on numbers worked by hand, and what must not change them."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from mrl.algorithms.advantages import ADVANTAGES, AdvantageInputs, compute_advantages
from mrl.algorithms.masks import full_mask
from mrl.algorithms.token_rewards import token_rewards
from mrl.config.check_values import CHOICES
from mrl.config.schema import AlgorithmConfig
from mrl.types import Ragged

CONFIG = AlgorithmConfig()
LENGTHS = (1, 3, 2, 2)


def batch(
    uids: str, scores: list[float], lengths: tuple[int, ...] = LENGTHS, whole: bool = True
) -> AdvantageInputs:
    """Rows of these lengths; columns of one number a row, or `not whole` of their tokens."""
    mask = full_mask(torch.tensor(lengths))
    if not whole:
        mask = Ragged(mask.values, mask.lengths)
    values, scored = torch.tensor(scores), torch.ones(len(scores), dtype=torch.bool)
    rewards = token_rewards(values, scored, mask, None, 0.0)
    return AdvantageInputs(
        tuple(uids), values, scored, mask, rewards, mask.with_values(torch.zeros(mask.total)),
        torch.tensor([0.25] * len(scores)),
    )  # fmt: skip


def advantages(name: str, given: AdvantageInputs, config: AlgorithmConfig = CONFIG):
    return [r.tolist() for r in compute_advantages(name, given, config).advantages.rows()]


def close(found: list[list[float]], wanted: list[list[float]]) -> bool:
    return all(row == pytest.approx(w, abs=1e-5) for row, w in zip(found, wanted, strict=True))


def test_the_config_knows_every_estimator() -> None:
    assert sorted(CHOICES["algorithm.adv_estimator"]) == sorted(ADVANTAGES)


def test_opo_compares_with_the_mean_weighted_by_length() -> None:
    # lengths 1 and 3: baseline (1*1 + 3*0) / 4 = 1/4; lengths 2 and 2: (2*0 + 2*3) / 4 = 3/2
    found = advantages("opo", batch("aabb", [1.0, 0.0, 0.0, 3.0]))
    assert close(found, [[0.75], [-0.25] * 3, [-1.5] * 2, [1.5] * 2])


def test_remax_compares_with_the_greedy_response() -> None:
    found = advantages("remax", batch("aabb", [1.0, 0.0, 0.25, 3.0]))
    assert close(found, [[0.75], [-0.25] * 3, [0.0] * 2, [2.75] * 2])


def test_remax_without_greedy_responses_is_refused() -> None:
    with pytest.raises(ValueError, match="needs the scores of greedy responses"):
        compute_advantages("remax", replace(batch("a", [1.0], (1,)), baselines=None), CONFIG)


def test_reinforce_plus_plus_whitens_returns_over_the_tokens_of_all_prompts() -> None:
    # eight tokens of return 1 0 0 0 0 0 2 2: mean 5/8, squares 9, variance (9 - 25/8) / 7 = 47/56
    found = advantages("reinforce_plus_plus", batch("abcd", [1.0, 0.0, 0.0, 2.0]))
    std = (47 / 56) ** 0.5
    assert close(
        found,
        [[0.375 / std], [-0.625 / std] * 3, [-0.625 / std] * 2, [1.375 / std] * 2],
    )


def test_reinforce_plus_plus_discounts_and_carries_the_kl_penalty_back() -> None:
    mask = Ragged(torch.ones(5, dtype=torch.bool), torch.tensor([3, 2]))
    rewards = mask.with_values(torch.tensor([-0.1, -0.2, 1.0, 0.0, -1.0]))
    given = AdvantageInputs(
        ("a", "b"), torch.tensor([1.0, -1.0]), torch.ones(2).bool(), mask, rewards, None
    )
    out = compute_advantages("reinforce_plus_plus", given, AlgorithmConfig(gamma=0.5))
    # r_t + gamma G_{t+1}: 1, -0.2 + 0.5, -0.1 + 0.15; -1, -0.5
    returns = torch.tensor([0.05, 0.3, 1.0, -0.5, -1.0])
    assert out.returns.values.tolist() == pytest.approx(returns.tolist())
    wanted = (returns - returns.mean()) / returns.std()
    assert out.advantages.values.tolist() == pytest.approx(wanted.tolist(), abs=1e-6)


def test_reinforce_plus_plus_baseline_whitens_what_the_group_leaves() -> None:
    # centered 1/2, -1/2, -1, 1; tokens 1/2, -1/2 x 3, -1 x 2, 1 x 2: mean -1/8, squares 5
    found = advantages("reinforce_plus_plus_baseline", batch("aabb", [1.0, 0.0, 0.0, 2.0]))
    std = ((5 - 1 / 8) / 7) ** 0.5
    assert close(
        found,
        [[0.625 / std], [-0.375 / std] * 3, [-0.875 / std] * 2, [1.125 / std] * 2],
    )


def test_dr_grpo_neither_divides_by_the_spread_nor_by_the_length() -> None:
    config = AlgorithmConfig(norm_adv_by_std_in_grpo=False)
    found = advantages("grpo", batch("aabb", [1.0, 0.0, 0.0, 3.0]), config)
    assert close(found, [[0.5], [-0.5] * 3, [-1.5] * 2, [1.5] * 2])


@pytest.mark.parametrize("name", sorted(ADVANTAGES))
@pytest.mark.parametrize("seed", range(3))
def test_neither_order_nor_how_columns_are_held_changes_an_advantage(name: str, seed: int) -> None:
    rng = random.Random(seed)
    uids = [rng.choice("abc") for _ in range(12)] + list("abc")
    scores = [round(rng.random(), 3) for _ in uids]
    lengths = [rng.randint(0, 5) for _ in uids]
    order = rng.sample(range(len(uids)), len(uids))
    whole = advantages(name, batch("".join(uids), scores, tuple(lengths)))
    tokens = advantages(name, batch("".join(uids), scores, tuple(lengths), whole=False))
    assert close(tokens, whole)
    moved = batch(
        "".join(uids[i] for i in order),
        [scores[i] for i in order],
        tuple(lengths[i] for i in order),
    )
    assert close(advantages(name, moved), [whole[i] for i in order])


@pytest.mark.parametrize("name", ["opo", "remax", "reinforce_plus_plus_baseline"])
def test_an_unscored_row_gets_zero_and_leaves_the_others_alone(name: str) -> None:
    given = batch("aabba", [1.0, 0.0, 0.0, 3.0, 9.0], (*LENGTHS, 5))
    scored = torch.tensor([True] * 4 + [False])
    rewards = token_rewards(given.scores, scored, given.mask, None, 0.0)
    found = advantages(name, replace(given, scored=scored, token_rewards=rewards))
    assert found[4] == [0.0] * 5
    assert close(found[:4], advantages(name, batch("aabb", [1.0, 0.0, 0.0, 3.0])))
