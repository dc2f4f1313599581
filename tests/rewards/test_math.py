"""What math answers are equal."""

from __future__ import annotations

import threading

import pytest

from mrl.rewards.math import compute_score


@pytest.mark.parametrize(
    ("gold", "answer", "score"),
    [
        (r"\frac{2}{3}", "2/3", 1.0),
        (r"\frac12", r"\frac{1}{2}", 1.0),
        ("0.5", "1/2", 1.0),
        (r"-\frac{3}{4}", r"\frac{-3}{4}", 1.0),
        ("(1,9/2)", "(1,4.5)", 1.0),
        ("(0,1]", "(0,1)", 0.0),
        ("\u00b12021", "2021", 0.0),
        (r"\frac{100}{3}", "33.3", 0.0),
        (r"28\%", "28", 1.0),
        (r"28\%", "0.28", 1.0),
    ],
)
def test_equal_values_are_equal(gold: str, answer: str, score: float) -> None:
    assert compute_score("math", rf"so \boxed{{{answer}}}", gold) == score


def test_the_last_box_counts() -> None:
    assert compute_score("math", r"\boxed{11}, no, \boxed{12}", "12") == 1.0
    assert compute_score("math", r"\boxed{12}, no, \boxed{11}", "12") == 0.0


@pytest.mark.parametrize("answer", ["", "\u4f60\u597d {{{} \\boxed{", "no number"])
def test_no_answer_is_never_right(answer: str) -> None:
    assert compute_score("math", answer, "12") == 0.0


def test_an_empty_ground_truth_is_an_error() -> None:
    with pytest.raises(ValueError, match="ground truth"):
        compute_score("math", "12", "")


def test_a_thread_scores_as_the_main_thread_does() -> None:
    scores: list[float] = []
    thread = threading.Thread(
        target=lambda: scores.append(compute_score("math", r"\boxed{\frac13}", "1/3"))
    )
    thread.start()
    thread.join()
    assert scores == [1.0]
