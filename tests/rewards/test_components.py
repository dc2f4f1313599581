"""Several rewards as one weighted sum, each logged by its name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from mrl.config.components import reward_components
from mrl.config.schema import CustomRewardConfig, RewardConfig
from mrl.rewards.registry import ScoreItem
from mrl.rewards.runner import RewardRunner
from mrl.rewards.verdict import Component, Verdict, weighted_sum

A, B = Component("a", 1.0), Component("b", -0.5)


def ok(value: float, **extra: float) -> Verdict:
    return value, "ok", "", extra


def test_the_score_is_the_weighted_sum_and_each_part_keeps_its_own_value() -> None:
    value, status, _, extra = weighted_sum([A, B], [ok(1.0), ok(3.0)])
    assert (value, status, extra) == (-0.5, "ok", {"a": 1.0, "b": 3.0})


def test_further_numbers_carry_the_name_and_the_first_acc_is_the_samples() -> None:
    *_, extra = weighted_sum([A, B], [ok(1.0, x=2.0), ok(0.0, acc=1.0, x=3.0)])
    assert extra == {"a": 1.0, "a/x": 2.0, "b": 0.0, "acc": 1.0, "b/x": 3.0}


def test_one_unscored_part_leaves_the_sample_unscored_with_every_cause() -> None:
    failed: Verdict = (None, "error", "no idea", {})
    late: Verdict = (None, "timeout", "late", {})
    assert weighted_sum([A, B], [ok(1.0), failed]) == (None, "error", "b: no idea", {"a": 1.0})
    assert weighted_sum([A, B], [late, failed])[1:3] == ("timeout", "a: late; b: no idea")


def test_a_sum_beyond_all_numbers_is_unscored() -> None:
    big = Component("big", 1e308)
    assert weighted_sum([big], [ok(1e308)])[:2] == (None, "error")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "parts.py"
    path.write_text(
        "import time\n"
        "def short(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return 1.0 / max(1, len(solution_str))\n"
        "def picky(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    if solution_str == 'hang': time.sleep(1e9)\n"
        "    if 'bad' in solution_str: raise KeyError(solution_str)\n"
        "    return {'score': 2.0, 'words': len(solution_str.split()), 'nan': float('nan')}\n"
    )
    return path


@pytest.fixture
def runner(file: Path) -> Iterator[RewardRunner]:
    components = {
        "correct": {},
        "short": {"path": str(file), "name": "short", "weight": 0.1},
        "picky": {"path": str(file), "name": "picky", "weight": 0.0625},
        "math": {"data_source": "math", "weight": 2},
    }
    reward = RewardConfig(components=components)
    with RewardRunner(
        CustomRewardConfig(), 2, timeout_s=3.0, components=reward_components(reward.components)
    ) as pool:
        yield pool


@pytest.mark.multiprocess
def test_the_pool_sums_functions_of_the_row_of_files_and_of_other_sources(
    runner: RewardRunner,
) -> None:
    texts = ["#### 12", r"\boxed{12}", "bad 12", "hang", "#### 12"]
    scores = runner.score([ScoreItem("gsm8k", text, "12", {}) for text in texts])
    first, second, bad, hung, again = scores
    assert first == again
    assert first.value == pytest.approx(1.0 + 0.1 / 7 + 0.0625 * 2)
    assert first.extra == {
        "correct": 1.0, "short": 1 / 7, "picky": 2.0, "picky/words": 2.0, "math": 0.0,
    }  # fmt: skip
    assert second.value == pytest.approx(0.1 / len(texts[1]) + 0.0625 * 2 + 2.0)
    assert (bad.value, bad.status, bad.detail) == (None, "error", "picky: KeyError: 'bad 12'")
    assert bad.extra is not None and bad.extra["short"] == pytest.approx(1 / 6)
    assert (hung.value, hung.status) == (None, "timeout")


@pytest.mark.multiprocess
def test_a_component_without_its_function_fails_at_construction(file: Path) -> None:
    components = reward_components({"x": {"path": str(file), "name": "shor"}})
    with pytest.raises(ValueError, match="did you mean 'short'"):
        RewardRunner(CustomRewardConfig(), 1, timeout_s=1.0, components=components)
