from __future__ import annotations

import pytest
import torch

from mrl.algorithms.advantages import (
    ADVANTAGES,
    AdvantageInputs,
    compute_advantages,
    generalized_advantages,
    group_statistics,
    whiten,
)
from mrl.algorithms.token_rewards import token_rewards
from mrl.config.schema import AlgorithmConfig
from mrl.types import Ragged

NAN = float("nan")
CONFIG = AlgorithmConfig()


def ragged(*rows: list[float] | list[bool]) -> Ragged:
    return Ragged.from_rows([torch.tensor(row) for row in rows])


def inputs(
    uids: str,
    scores: list[float | None],
    mask: Ragged | None = None,
    baselines: list[float] | None = None,
) -> AdvantageInputs:
    """One row a letter of `uids`; None is unscored."""
    mask = mask or ragged(*([True, True] for _ in uids))
    scored = torch.tensor([s is not None for s in scores])
    values = torch.tensor([NAN if s is None else s for s in scores])
    rewards = token_rewards(values, scored, mask, None, 0.0)
    greedy = None if baselines is None else torch.tensor(baselines)
    return AdvantageInputs(tuple(uids), values, scored, mask, rewards, None, greedy)


def row_advantages(name: str, given: AdvantageInputs, config: AlgorithmConfig = CONFIG):
    return [row.tolist() for row in compute_advantages(name, given, config).advantages.rows()]


def first(rows: list[list[float]]) -> list[float]:
    return [row[0] for row in rows]


def test_grpo_divides_by_the_sample_standard_deviation():
    rows = row_advantages("grpo", inputs("aaaa", [1, 0, 1, 0]))
    assert first(rows) == pytest.approx([0.8660, -0.8660, 0.8660, -0.8660], abs=1e-4)
    assert all(row[0] == row[1] for row in rows)


def test_grpo_without_std_only_centers():
    config = AlgorithmConfig(norm_adv_by_std_in_grpo=False)
    assert first(row_advantages("grpo", inputs("aaaa", [1, 0, 1, 0]), config)) == [
        0.5,
        -0.5,
        0.5,
        -0.5,
    ]


def test_rloo_compares_with_the_mean_of_the_others():
    rows = row_advantages("rloo", inputs("aaa", [3, 0, 6]))
    assert first(rows) == pytest.approx([0.0, -4.5, 4.5])


@pytest.mark.parametrize("name", ["grpo", "rloo", "opo"])
def test_groups_follow_the_uid_whatever_the_order_of_rows(name: str):
    scores = {"a": [1.0, 0.0, 0.25], "b": [5.0, 6.0, 9.0]}
    together = row_advantages(name, inputs("aaabbb", scores["a"] + scores["b"]))
    mixed = row_advantages(name, inputs("abbaba", [1, 5, 6, 0, 9, 0.25]))
    order = [0, 3, 4, 1, 5, 2]
    assert mixed == [together[i] for i in order]


@pytest.mark.parametrize("name", ["grpo", "rloo", "opo", "reinforce_plus_plus_baseline"])
@pytest.mark.parametrize("scores", [[0.1] * 7, [1.0] * 4, [0.3, 0.3], [1e6 + 0.1] * 3])
def test_a_constant_group_gets_exactly_zero(name: str, scores: list[float]):
    assert set(first(row_advantages(name, inputs("a" * len(scores), scores)))) == {0.0}


@pytest.mark.parametrize("name", ["grpo", "rloo", "opo"])
def test_a_group_of_one_gets_zero_and_a_warning(name: str):
    with pytest.warns(UserWarning, match="1 of 2 groups have one scored response"):
        rows = row_advantages(name, inputs("abb", [5, 0, 1]))
    assert rows[0] == [0.0, 0.0]
    assert rows[1] != [0.0, 0.0]


def test_an_unscored_row_gets_zero_and_leaves_the_others_alone():
    rows = row_advantages("grpo", inputs("aaaa", [1, None, 0, 1]))
    assert first(rows) == pytest.approx([0.5773, 0.0, -1.1547, 0.5773], abs=1e-4)


@pytest.mark.parametrize("name", ["grpo", "rloo", "opo", "reinforce_plus_plus_baseline"])
@pytest.mark.filterwarnings("ignore:1 of 1 groups")
def test_groups_without_any_score_are_zero(name: str):
    assert first(row_advantages(name, inputs("aa", [None, None]))) == [0.0, 0.0]
    assert first(row_advantages(name, inputs("aa", [None, 3.0]))) == [0.0, 0.0]


def test_a_scored_row_without_a_finite_score_is_refused():
    with pytest.raises(ValueError, match=r"scored rows \[1\] have no finite score"):
        AdvantageInputs(
            ("a", "a"),
            torch.tensor([1.0, NAN]),
            torch.tensor([True, True]),
            ragged([True], [True]),
            ragged([1.0], [0.0]),
            None,
        )


def test_a_row_without_tokens_keeps_its_score_in_the_group_and_gets_no_advantage():
    mask = ragged([False, False, False], [True], [True])
    rows = row_advantages("grpo", inputs("aaa", [10, 0, 0], mask))
    assert rows[0] == [0.0, 0.0, 0.0]
    assert first(rows[1:]) == pytest.approx([-0.57735, -0.57735], abs=1e-4)


def test_the_kl_penalty_in_token_rewards_enters_the_group():
    mask = ragged([True, True], [True, True])
    rewards = ragged([-0.5, 1.0], [0.0, 1.0])
    given = AdvantageInputs(
        ("a", "a"), torch.ones(2), torch.tensor([True, True]), mask, rewards, None
    )
    config = AlgorithmConfig(norm_adv_by_std_in_grpo=False)
    assert first(row_advantages("grpo", given, config)) == [-0.25, 0.25]


def test_gae_reads_no_masked_position():
    mask = ragged([True, True, False])
    advantages = generalized_advantages(
        ragged([0.0, 1.0, 0.0]), ragged([0.0, 0.0, 100.0]), mask, gamma=1.0, lam=0.95
    )
    assert advantages.values.tolist() == pytest.approx([0.95, 1.0, 0.0])


def test_whitening_reads_no_masked_position():
    mask = torch.tensor([True, True, True, False])
    assert whiten(torch.tensor([1.0, 2, 3, 100]), mask).tolist() == pytest.approx([-1, 0, 1, 0])
    assert whiten(torch.tensor([1.0, 2, 3, NAN]), mask).tolist() == pytest.approx([-1, 0, 1, 0])


@pytest.mark.parametrize("values", [[], [7.0], [0.1, 0.1, 0.1]])
def test_whitening_of_too_little_or_equal_values_is_zero(values: list[float]):
    given = torch.tensor(values)
    assert whiten(given, torch.ones(len(values), dtype=torch.bool)).tolist() == [0.0] * len(values)


def test_gae_equals_the_definition_on_rows_of_different_length():
    generator = torch.Generator().manual_seed(0)
    lengths = [5, 1, 3]
    rewards = [torch.randn(n, generator=generator) for n in lengths]
    values = [torch.randn(n, generator=generator) for n in lengths]
    gamma, lam = 0.9, 0.8
    mask = ragged(*([True] * n for n in lengths))
    got = generalized_advantages(
        Ragged.from_rows(rewards), Ragged.from_rows(values), mask, gamma, lam
    )
    for row, (reward, value) in enumerate(zip(rewards, values, strict=True)):
        following = torch.cat([value[1:], torch.zeros(1)])
        deltas = reward + gamma * following - value
        for t in range(len(deltas)):
            discounts = (gamma * lam) ** torch.arange(len(deltas) - t)
            expected = (discounts * deltas[t:]).sum()
            assert got.rows()[row][t] == pytest.approx(float(expected), rel=1e-5)


def test_gae_steps_over_masked_tokens_inside_a_row():
    with_gap = generalized_advantages(
        ragged([0.5, NAN, 1.0]), ragged([0.2, NAN, 0.7]), ragged([True, False, True]), 0.9, 0.8
    )
    without = generalized_advantages(
        ragged([0.5, 1.0]), ragged([0.2, 0.7]), ragged([True, True]), 0.9, 0.8
    )
    assert with_gap.values[[0, 2]].tolist() == without.values.tolist()
    assert with_gap.values[1] == 0.0


def test_gae_returns_come_before_whitening_and_unscored_rows_stay_out_of_it():
    mask = ragged([True, True], [True], [True])
    given = AdvantageInputs(
        ("a", "b", "c"),
        torch.tensor([1.0, NAN, 0.0]),
        torch.tensor([True, False, True]),
        mask,
        ragged([0.0, 1.0], [0.0], [0.0]),
        ragged([0.5, 0.25], [50.0], [1.0]),
    )
    out = compute_advantages("gae", given, CONFIG)
    assert out.returns.values.tolist() == pytest.approx([1.0, 1.0, 0.0, 0.0])
    raw = torch.tensor([0.5, 0.75, -1.0])
    expected = (raw - raw.mean()) / raw.std()
    assert out.advantages.values[[0, 1, 3]].tolist() == pytest.approx(expected.tolist())
    assert out.advantages.values[2] == 0.0


def test_gae_without_values_is_refused():
    with pytest.raises(ValueError, match="needs the critic's values"):
        compute_advantages("gae", inputs("a", [1]), CONFIG)


def test_an_unknown_estimator_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"'grpo2', expected one of \['gae', 'grpo', 'opo', "):
        compute_advantages("grpo2", inputs("a", [1]), CONFIG)


@pytest.mark.parametrize("name", sorted(ADVANTAGES))
@pytest.mark.parametrize("planted", [NAN, float("inf"), 1e30])
def test_what_lies_at_masked_positions_changes_nothing(name: str, planted: float):
    mask = ragged([True, True, False], [False, True], [True])

    def run(filler: float):
        given = AdvantageInputs(
            ("a", "a", "a"),
            torch.tensor([1.0, 0.0, 0.5]),
            torch.ones(3, dtype=torch.bool),
            mask,
            ragged([0.0, 1.0, filler], [filler, 0.0], [0.5]),
            ragged([0.1, 0.2, filler], [filler, 0.3], [0.4]),
            torch.tensor([0.5, 0.5, 0.5]),
        )
        return compute_advantages(name, given, CONFIG)

    clean, spoiled = run(0.0), run(planted)
    assert torch.equal(clean.advantages.values, spoiled.advantages.values)
    assert torch.equal(clean.returns.values, spoiled.returns.values)
    assert clean.advantages.values.dtype == torch.float32
    assert clean.advantages.values[~mask.values].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("name", sorted(ADVANTAGES))
def test_an_empty_batch_gives_empty_columns(name: str):
    empty = Ragged.from_rows([])
    nothing = torch.zeros(0, dtype=torch.bool)
    mask = Ragged(nothing, empty.lengths)
    given = AdvantageInputs((), torch.zeros(0), nothing, mask, empty, empty, torch.zeros(0))
    assert compute_advantages(name, given, CONFIG).advantages.values.shape == (0,)


def test_group_sizes_count_scored_rows():
    groups = group_statistics(
        ("b", "a", "b", "b"), torch.tensor([1.0, 2, NAN, 3]), torch.tensor([1, 1, 0, 1]).bool()
    )
    assert groups.sizes.tolist() == [2, 1]
    assert groups.means.tolist() == [2.0, 2.0]
    assert groups.stds.tolist() == pytest.approx([2**0.5, 0.0])
