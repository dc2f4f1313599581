"""GSM8K: the number after `####`.

The rule is verl's (`verl/utils/reward_score/gsm8k.py`), so that scores compare: the last
`#### number` within the last 300 characters, commas removed, equal to the ground truth as text.
With `extra_info["method"] == "flexible"` the last number of the text counts, marked or not.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from mrl.rewards.registry import register

_TAIL = 300  # characters: a longer answer has its number at the end
_STRICT = re.compile(r"#### (-?[0-9.,]+)")
_NUMBER = re.compile(r"-?[0-9.,]+")


def extract(solution: str, method: str = "strict") -> str | None:
    """Find the final number of a solution, commas removed; None if there is none.

    Raises:
        ValueError: if the method is neither `strict` nor `flexible`.
    """
    tail = solution[-_TAIL:]
    if method == "strict":
        found = _STRICT.findall(tail)
    elif method == "flexible":
        found = [number for number in _NUMBER.findall(tail) if number.strip(".,-")]
    else:
        raise ValueError(f"gsm8k method is {method!r}, expected 'strict' or 'flexible'")
    return found[-1].replace(",", "") if found else None


@register("gsm8k", "openai/gsm8k")
def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: Mapping[str, Any] | None = None,
) -> float:
    """Score 1.0 if the final number equals the ground truth, else 0.0."""
    method = (extra_info or {}).get("method") or "strict"
    answer = extract(solution_str, method)
    return float(answer is not None and answer == str(ground_truth))
