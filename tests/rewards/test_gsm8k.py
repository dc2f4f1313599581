from __future__ import annotations

import pytest

from mrl.rewards.gsm8k import compute_score


@pytest.mark.parametrize(
    ("solution", "truth", "score"),
    [
        ("it is\n#### 72", "72", 1.0),
        ("#### 1,234", "1234", 1.0),
        ("#### -5", "-5", 1.0),
        ("#### 1 then #### 2", "2", 1.0),
        ("#### 1 then #### 2", "1", 0.0),
        ("72", "72", 0.0),  # no mark
        ("####72", "72", 0.0),
        ("#### 172", "72", 0.0),
        ("#### 72" + " " * 300, "72", 0.0),  # not in the last 300 characters
        ("", "72", 0.0),
        ("#### 72\n3 are left", "72", 1.0),
        ("#### 1234", "1,234", 1.0),  # a ground truth with its commas
        ("#### 72, I think", "72", 1.0),
        ("#### 72/5", "72", 0.0),
        ("#### 72 1/2", "72", 0.0),
        ("#### 72 * 2", "72", 0.0),
        ("#### 72^2", "72", 0.0),
        ("#### 72e3", "72", 0.0),
        ("#### 7:2", "7", 0.0),
        ("#### 1,2", "12", 0.0),  # no thousands
        ("#### 12,34", "1234", 0.0),
        ("#### 5\n#### 72/5", "5", 0.0),  # the last mark is the answer
        ("#### -", "72", 0.0),
    ],
)
def test_the_marked_number_counts(solution: str, truth: str, score: float) -> None:
    assert compute_score("gsm8k", solution, truth) == score


@pytest.mark.parametrize(
    ("solution", "truth", "score"),
    [("3 and 72 .", "72", 1.0), ("#### 72", "72", 1.0), ("none.", "72", 0.0), ("", "7", 0.0)],
)
def test_flexible_takes_the_last_number(solution: str, truth: str, score: float) -> None:
    assert compute_score("gsm8k", solution, truth, {"method": "flexible"}) == score


@pytest.mark.parametrize("truth", ["", " ", "####", "none", None])
def test_a_truth_without_a_number_is_an_error(truth: str | None) -> None:
    for answer in ("#### 72", "", f"#### {truth}"):
        with pytest.raises(ValueError, match="ground truth"):
            compute_score("gsm8k", answer, truth)  # type: ignore[arg-type]


def test_an_unknown_method_is_refused() -> None:
    with pytest.raises(ValueError, match="'loose'"):
        compute_score("gsm8k", "#### 1", "1", {"method": "loose"})
