"""Dynamic sampling: which groups have something to teach (Yu et al. 2025, DAPO, section 3.2)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from mrl.algorithms.token_rewards import is_scored
from mrl.types import Score

# The score itself, by verl's names; any other is a number that the reward function returned.
_SCORE = ("score", "seq_reward", "seq_final_reward")


def metric_of(score: Score, metric: str | None) -> float | None:
    """Give the number of a verdict that groups are compared by; None where it is unscored.

    A function that returns a plain number returns its accuracy, as verl has it.

    Raises:
        ValueError: the reward function returns no number of that name.
    """
    if not is_scored(score):
        return None
    extra = score.extra or {}
    if metric is not None and metric in extra:
        return extra[metric]
    if metric is None or metric in _SCORE or (metric == "acc" and not extra):
        return score.value
    raise ValueError(
        f"algorithm.filter_groups.metric is {metric!r}, but the reward function returns "
        f"{', '.join(['score', *sorted(extra)])}"
    )


def is_mixed(group: Sequence[Score], metric: str | None) -> bool:
    """Tell whether a group's scored responses differ: if not, the score teaches nothing."""
    values = [v for v in (metric_of(score, metric) for score in group) if v is not None]
    return bool(values) and min(values) < max(values)


def tell_constant(groups: Sequence[Sequence[Score]], metric: str | None) -> str:
    """Count groups of equal numbers by that number, and those without one, in words."""
    found: Counter[str] = Counter()
    for group in groups:
        values = [v for v in (metric_of(score, metric) for score in group) if v is not None]
        found[f"all {values[0]:g}" if values else "unscored"] += 1
    return ", ".join(f"{count} groups {kind}" for kind, count in found.most_common(5))
