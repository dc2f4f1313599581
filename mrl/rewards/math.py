"""Mathematical answers, compared by math-verify.

What counts (math-verify 0.9.0): equality of value (`0.5` is `1/2`), of intervals with their ends,
of sets by their elements; a percentage equals both its number and its fraction; no tolerance
(`100/3` is not 33.3). Of several `\\boxed{}` the last counts. A ground truth that does not parse
is an error, so the sample is unscored. Its signal-based limits are off: the pool limits time.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Any

from math_verify import parse, verify

from mrl.rewards.registry import register

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its limits are off
_BOX = re.compile(r"\\boxed\b")


def _parse(text: str) -> list[Any]:
    return parse(text, parsing_timeout=None, raise_on_error=True)


def last_boxed(text: str) -> str:
    """Cut a text down to its last box; the whole text if it has none."""
    boxes = list(_BOX.finditer(text))
    return text[boxes[-1].start() :] if boxes else text


@register("math", "lighteval/MATH", "DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500")
def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: Mapping[str, Any] | None = None,
) -> float:
    """Score 1.0 if the answer equals the ground truth mathematically, else 0.0.

    Raises:
        ValueError: if the ground truth does not parse.
    """
    gold = _parse(f"\\boxed{{{ground_truth}}}")
    if not gold or not str(ground_truth).strip():
        raise ValueError(f"ground truth {ground_truth!r} is not a mathematical expression")
    answer = _parse(last_boxed(solution_str))
    return float(bool(answer) and verify(gold, answer, timeout_seconds=None, raise_on_error=True))
