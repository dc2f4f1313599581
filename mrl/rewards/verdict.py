"""What a reward function returned, judged; several functions as one weighted sum."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mrl.rewards.registry import ComputeScore, ScoreItem

Verdict = tuple[float | None, str, str, dict[str, float]]  # the fields of mrl.types.Score


@dataclass(frozen=True, slots=True)
class Component:
    """One reward of several, where its function is found, and its weight in the sum."""

    name: str
    weight: float
    custom: tuple[str, str] | None = None  # a file and a function in it
    data_source: str | None = None  # whose function scores every row; None: the row's own


def _number(value: object) -> float | None:
    """Read anything that converts to float, but not text."""
    if value is None or isinstance(value, str | bytes) or not hasattr(value, "__float__"):
        return None
    return float(value)


def verdict(result: object) -> Verdict:
    """Judge what a reward function returned: a finite number, or a dict with one as `score`.

    Other finite numbers of the dict go with it, to be averaged.
    """
    extra: dict[str, float] = {}
    score = result
    if isinstance(result, Mapping):
        if "score" not in result:
            return None, "error", f"returned a dict without 'score': has {[*result]}", {}
        score = result["score"]
        others = {str(key): _number(value) for key, value in result.items() if key != "score"}
        extra = {key: v for key, v in others.items() if v is not None and math.isfinite(v)}
    value = _number(score)
    if value is None or not math.isfinite(value):
        return None, "error", f"returned {score!r}, expected a finite number", extra
    return value, "ok", "", extra


def score_one(function: ComputeScore, item: ScoreItem) -> Verdict:
    """Score one item; whatever the function raises is its verdict."""
    try:
        return verdict(
            function(
                data_source=item.data_source,
                solution_str=item.solution_str,
                ground_truth=item.ground_truth,
                extra_info=item.extra_info,
            )
        )
    except (Exception, SystemExit) as error:  # foreign code: its faults belong to this sample
        return None, "error", f"{type(error).__name__}: {error}", {}


def weighted_sum(components: Sequence[Component], verdicts: Sequence[Verdict]) -> Verdict:
    """Join the verdicts of all components on one sample.

    Each component's own value goes with the sum as `<name>`, its further numbers as
    `<name>/<key>`, and the first `acc` as the sample's. One unscored component leaves the sample
    unscored: a part that is not known is not 0.
    """
    extra: dict[str, float] = {}
    total, failures = 0.0, []
    for component, (value, status, detail, others) in zip(components, verdicts, strict=True):
        for key, number in others.items():
            extra.setdefault("acc" if key == "acc" else f"{component.name}/{key}", number)
        if value is None:
            failures.append((status, f"{component.name}: {detail}"))
        else:
            extra[component.name] = value
            total += component.weight * value
    if failures:
        return None, failures[0][0], "; ".join(detail for _, detail in failures), extra
    if not math.isfinite(total):
        return None, "error", f"the weighted sum is {total!r}", extra
    return total, "ok", "", extra
