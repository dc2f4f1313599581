"""Mathematical answers, compared by math-verify behind guards, for a wrong 1 is worse than a 0.

What counts: equality of value (`0.5` is `1/2`), exactly (`0.333333` is not `1/3`); of intervals
with their ends, of tuples in their order, of sets and bare lists by their elements, and none of
these is another; a percentage equals both its number and its fraction. A unit may be left out, but
not be another; a base or a ratio must be there on both sides. Equations in the answer must hold.
How the answer is found: `answers.final_answer`. A ground truth that does not parse is an error, so
the sample is unscored. math-verify's signal-based limits are off: the pool limits time.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from math_verify import LatexExtractionConfig, parse, verify
from sympy import Add, Basic, Float, Integer, MatrixBase, Mul, Pow, Rational, binomial, factorial

from mrl.rewards.answers import (
    clean,
    contradict,
    differ_in_case,
    final_answer,
    form,
    is_whole,
    letters,
    same_text,
    split_equation,
)
from mrl.rewards.registry import register

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its limits are off
_MOST_DIGITS = 5000.0  # of a number that is worth computing
_MOST_TERMS = 64.0  # of a power of a sum that is worth expanding
_DIGITS = 60  # of a numerical comparison


@register(
    "math",
    "lighteval/MATH",
    "DigitalLearningGmbH/MATH-lighteval",
    "HuggingFaceH4/MATH-500",
    "math_dapo",
    "aime",
)
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
    gold = clean(str(ground_truth))
    if not isinstance(ground_truth, str | int | float) or not is_whole(gold) or not _parse(gold):
        raise ValueError(f"ground truth {ground_truth!r} is not a mathematical expression")
    answer = final_answer(solution_str)
    return float(answer is not None and is_equal(gold, clean(answer)))


def is_equal(gold: str, answer: str) -> bool:
    """Compare two cleaned texts."""
    if same_text(gold, answer):
        return True
    if (name := letters(gold)) is not None:
        return letters(answer) == name
    if contradict(form(gold), form(answer)) or differ_in_case(gold, answer):
        return False
    sides = [answer] if len(split_equation(gold)) > 1 or "=" in gold else split_equation(answer)
    return all(_has_value(gold, side) for side in sides)


def _has_value(gold: str, answer: str) -> bool:
    wanted, found = _parse(gold), _parse(answer)
    if any(map(_is_huge, (*wanted, *found))):
        return False  # not the same text, and not worth the time
    try:
        return bool(
            found
            and verify(
                list(wanted),
                list(found),
                float_rounding=_DIGITS,
                numeric_precision=_DIGITS,
                timeout_seconds=None,
                raise_on_error=True,
            )
        )
    except Exception:  # SymPy raises anything over nonsense such as 1/0: no value, not this one
        return False


@lru_cache(maxsize=4096)
def _parse(text: str) -> tuple[Any, ...]:
    """Parse a whole text; no number is fished out of what does not parse."""
    try:
        found = parse(f"\\boxed{{{text}}}", [LatexExtractionConfig()], parsing_timeout=None)
    except RecursionError:
        return ()
    return tuple(map(_exact, found)) if text.strip() else ()


def _exact(found: Any) -> Any:
    """Make fractions of decimals, so that nothing is equal by rounding."""
    if not isinstance(found, Basic | MatrixBase):
        return found
    return found.xreplace({number: Rational(str(number)) for number in found.atoms(Float)})


def _is_huge(found: Any) -> bool:
    """Tell whether evaluating an expression would make a number beyond all use."""
    if not isinstance(found, Basic):
        return False
    if isinstance(found, Pow | factorial | binomial) and _digits(found) > _MOST_DIGITS:
        return True
    if isinstance(found, Pow) and isinstance(found.args[0], Add) and found.free_symbols:
        return _number(found.args[1], _digits(found.args[1])) > _MOST_TERMS
    return any(map(_is_huge, found.args))


def _digits(value: Basic) -> float:
    """Bound the decimal digits of a number, or of a power's coefficients, from above."""
    if isinstance(value, Integer):
        return len(str(abs(int(value)))) if abs(int(value)) < 1 << 4000 else _MOST_DIGITS
    if isinstance(value, Pow):
        base, exponent = map(_digits, value.args)
        return max(base, 1.0) * _number(value.args[1], exponent)
    if isinstance(value, factorial | binomial):
        count = _number(value.args[0], _digits(value.args[0]))
        return count * max(1.0, math.log10(max(count, 1.0))) if count < math.inf else count
    if isinstance(value, Mul):
        return sum(map(_digits, value.args))
    return max(map(_digits, value.args), default=1.0) + isinstance(value, Add)


def _number(value: Basic, digits: float) -> float:
    """Give a number, or a bound of it from its digits."""
    if isinstance(value, Integer):
        return float(abs(int(value))) if digits < 300 else math.inf
    return 10.0**digits if digits < 300 else math.inf
