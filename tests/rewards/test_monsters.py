"""An answer that cannot be computed costs its own time limit and nothing else."""

from __future__ import annotations

import threading

import psutil
import pytest

from mrl.config.schema import CustomRewardConfig
from mrl.rewards.registry import ScoreItem
from mrl.rewards.runner import RewardRunner
from mrl.types import Score

pytestmark = pytest.mark.multiprocess
TOWER = r"\boxed{\dfrac{5^{(5^{(5^{(5^5)})}-4)}-5}{16}}"
GARBAGE = "\u4f60\u597d }}{ \\boxed{\\frac{1}{ \\left( \u7b54\u6848"
LIMIT_S = 4.0


def math(answer: str, truth: str) -> ScoreItem:
    return ScoreItem("math", answer, truth, {})


def processes() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True)}


def test_towers_and_garbage_leave_the_scores_around_them_as_they_are() -> None:
    """Asked from a thread that is not the main one, where signals do not reach."""
    before, found = processes(), list[Score]()
    items = [
        math(r"so \boxed{\frac13}", "1/3"),
        math(TOWER, "3"),
        math(r"\boxed{1/3}", r"\frac13"),
        math(GARBAGE, "12"),
        math(r"\boxed{9^{9^{9^9}}}", "1"),
        math(r"\boxed{2}", "3"),
        math(r"\boxed{12}", "12"),
    ]
    with RewardRunner(CustomRewardConfig(), 2, LIMIT_S) as runner:
        thread = threading.Thread(target=lambda: found.extend(runner.score(items)))
        thread.start()
        thread.join()
        again = runner.score([items[0], items[6]])
    assert [found[i].value for i in (0, 2, 3, 5, 6)] == [1.0, 1.0, 0.0, 0.0, 1.0]
    for tower in (found[1], found[4]):  # never right; where it is not computed, counted as such
        assert tower.value == 0.0 or (tower.value is None and tower.status == "timeout")
    assert [score.value for score in again] == [1.0, 1.0]
    assert processes() == before
