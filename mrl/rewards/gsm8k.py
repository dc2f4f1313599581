"""GSM8K: the number after `####`.

The rule is verl's (`verl/utils/reward_score/gsm8k.py`), so that scores compare: the last
`#### number` within the last 300 characters, commas removed, equal to the ground truth as text.
With `extra_info["method"] == "flexible"` the last number of the text counts, marked or not.
Stricter than verl where it would find right what is not: `72/5`, `72-5` and `72k` are
not 72, `1,2` is not 12, and a ground truth without a number is an error.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from mrl.rewards.registry import register

_TAIL = 300  # characters: a longer answer has its number at the end
# Nothing may follow that makes it a part of another number.
_REST = (
    r"(?![0-9.,]| *[-+/^*\u00d7:] *\(?\d|\\frac|[eE][-+]?\d| \d+/\d"
    r"|[kKmM]\b| (?:dozen|hundred|thousand|million|billion)\b)"
)
_STRICT = re.compile(rf"#### (-?[0-9.,]+){_REST}")
_NUMBER = re.compile(r"-?[0-9.,]+")
_GROUPED = re.compile(r"-?\d{1,3}(?:,\d{3})+(?:\.\d*)?")


def extract(solution: str, method: str = "strict") -> str | None:
    """Find the final number of a solution, commas removed; None if there is none.

    Raises:
        ValueError: if the method is neither `strict` nor `flexible`.
    """
    tail = solution[-_TAIL:]
    if method == "strict":
        marks = tail.rpartition("#### ")
        found = [match[1]] if (match := _STRICT.match("".join(marks[1:]))) else []
    elif method == "flexible":
        found = [number for number in _NUMBER.findall(tail) if number.strip(".,-")]
    else:
        raise ValueError(f"gsm8k method is {method!r}, expected 'strict' or 'flexible'")
    return _without_commas(found[-1]) if found else None


def _without_commas(number: str) -> str:
    """Take out commas where they part thousands or end a clause; others make it no number."""
    number = number.rstrip(",")
    return number.replace(",", "") if _GROUPED.fullmatch(number) else number


@register("gsm8k", "openai/gsm8k")
def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: Mapping[str, Any] | None = None,
) -> float:
    """Score 1.0 if the final number equals the ground truth, else 0.0.

    Raises:
        ValueError: if the ground truth has no number, or the method is unknown.
    """
    gold = _without_commas(str(ground_truth).strip())
    if not any(map(str.isdigit, gold)):
        raise ValueError(f"ground truth {ground_truth!r} is not a number")
    method = (extra_info or {}).get("method") or "strict"
    answer = extract(solution_str, method)
    return float(answer is not None and answer == gold)
