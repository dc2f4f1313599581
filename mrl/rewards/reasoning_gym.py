"""reasoning-gym tasks, judged by their own verifiers.

A row's `extra_info` holds `task` (the reasoning-gym data set; else the part of `data_source` after
the slash) and `entry` (the generated entry as a JSON string). A verifier may give part of the
score for a near miss (text around the answer, for one); `acc` is 1 only for the full score.
The answer is what stands in the last `<answer>` tag, or the whole response without one.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from typing import Any

from reasoning_gym import get_score_answer_fn
from reasoning_gym.utils import extract_answer

from mrl.rewards.registry import register

_verifier: Callable[[str], Callable[..., float]] = functools.cache(get_score_answer_fn)


@register("reasoning_gym")
def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
) -> dict[str, float]:
    """Score a response with the verifier of its task; `score` in [0, 1].

    Raises:
        ValueError: if the row has no entry or the task is unknown.
    """
    info = extra_info or {}
    task = info.get("task") or data_source.partition("/")[2]
    if not info.get("entry"):
        raise ValueError(
            f"{data_source}: extra_info has no 'entry' (the task's JSON); has {[*info]}"
        )
    entry = json.loads(info["entry"])
    answer = extract_answer(solution_str)
    score = _verifier(task)(answer=solution_str if answer is None else answer, entry=entry)
    return {"score": float(score), "acc": float(score == 1.0)}
