"""A ground truth that cannot be read scores nobody; an answer that cannot be read is not right."""

from __future__ import annotations

import pytest

from mrl.rewards.math import compute_score

ANSWERS = (r"\boxed{12}", r"\boxed{}", "", "so 12", "\u4f60\u597d }}{ \\boxed{")
UNBALANCED = ["{{{", r"\frac{1}{", r"\left("]


@pytest.mark.parametrize("truth", ["", "  ", "\n", r"\text{}", r"\boxed{}", "$", "$$"])
def test_a_truth_without_content_is_an_error(truth: str) -> None:
    for answer in (*ANSWERS, truth, rf"\boxed{{{truth}}}"):
        with pytest.raises(ValueError, match="ground truth"):
            compute_score("math", answer, truth)


@pytest.mark.parametrize("truth", [*UNBALANCED, None])
def test_a_truth_that_is_no_latex_is_an_error(truth: str | None) -> None:
    with pytest.raises(ValueError, match="ground truth"):
        compute_score("math", r"\boxed{12}", truth)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "truth", ["12", r"\frac{1}{3}", "(1,2)", "x^2", r"28\%", r"\sqrt{2}", r"\text{blue}"]
)
def test_no_answer_is_never_right(truth: str) -> None:
    """Not by being part of the truth either, nor the truth of it."""
    empty = ["", " ", r"\boxed{}", r"\boxed{ }", r"\boxed{\text{}}", "no idea", *UNBALANCED]
    for answer in (*empty, truth[:1], truth + truth, rf"\boxed{{{truth}9}}"):
        if answer != truth:
            assert compute_score("math", answer, truth) == 0.0, answer


@pytest.mark.parametrize(
    ("truth", "answer", "score"),
    [
        (r"\frac{7}{2}", "3.5", 1.0),
        ("-0.75", r"-\frac{3}{4}", 1.0),
        (r"\frac{-2}{3}", r"-\frac23", 1.0),
        ("[0,1)", "(0,1]", 0.0),
        ("(0,1)", "[0,1]", 0.0),
        ("(1,2)", "(2,1)", 0.0),
        (r"\pm 3", "3", 0.0),
        ("3", r"\pm 3", 0.0),
        (r"\frac{2}{3}", "0.6667", 0.0),
        (r"\pi", "3.14", 0.0),
        (r"\sqrt{8}", r"2\sqrt{2}", 1.0),
        ("1000", "1{,}000", 1.0),
    ],
)
def test_values_are_compared_exactly(truth: str, answer: str, score: float) -> None:
    assert compute_score("math", rf"thus \boxed{{{answer}}}.", truth) == score
