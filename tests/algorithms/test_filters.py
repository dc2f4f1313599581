"""Which groups dynamic sampling keeps."""

from __future__ import annotations

import pytest

from mrl.algorithms.filters import is_mixed, metric_of, tell_constant
from mrl.types import Score


def group(*values: float | None, **extra: list[float]) -> list[Score]:
    return [
        Score(value, "ok", extra={name: numbers[i] for name, numbers in extra.items()} or None)
        for i, value in enumerate(values)
    ]


@pytest.mark.parametrize(
    ("values", "kept"),
    [
        ([0.4] * 4, False),
        ([0.1] * 7, False),
        ([0, 1, 0, 1], True),
        ([1.0, None, 1.0], False),
        ([1.0, None, 0.0], True),
        ([None, None], False),
        ([0.3], False),
        ([float("nan"), 1.0], False),
    ],
)
def test_groups_of_equal_scores_teach_nothing(values: list[float | None], kept: bool) -> None:
    assert is_mixed(group(*values), None) == kept


def test_groups_may_be_compared_by_another_number_of_the_reward_function() -> None:
    found = group(0.9, 1.1, acc=[1.0, 1.0])
    assert is_mixed(found, None) and is_mixed(found, "seq_reward") and not is_mixed(found, "acc")


def test_a_plain_number_is_its_own_accuracy_and_other_names_are_refused() -> None:
    assert metric_of(Score(0.5, "ok"), "acc") == 0.5
    with pytest.raises(ValueError, match=r"metric is 'acc', but .* returns score, length"):
        metric_of(Score(0.5, "ok", extra={"length": 3.0}), "acc")


def test_constant_groups_are_counted_by_their_score() -> None:
    found = [group(0, 0), group(0, 0), group(1, 1), group(None, None)]
    assert tell_constant(found, None) == "2 groups all 0, 1 groups all 1, 1 groups unscored"
