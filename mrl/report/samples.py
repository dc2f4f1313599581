"""The best and the worst answers of the last steps, token by token where that was recorded."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import nlargest, nsmallest
from itertools import zip_longest
from pathlib import Path
from typing import Any

from mrl.report.read import Run, rows_in

_STEPS = 3  # of the last ones
_EACH = 3  # samples of either end
_POOL = 256  # samples among which those of different prompts are looked for
_LONGEST = 1500  # characters of a text that is shown without its tokens
FULL_GAP = 0.5  # nats: the difference of log-probs that has the full colour


@dataclass(frozen=True, slots=True)
class Token:
    """A piece of text with its colours: 0 is none, 1 the full one."""

    text: str
    title: str
    gap: float  # -1 to 1: above 0 the trainer finds it likelier than the engine
    advantage: float  # -1 to 1


@dataclass(frozen=True, slots=True)
class Shown:
    """A sample as it goes onto the page."""

    end: str  # "best" or "worst"
    step: int
    score: float | None
    source: str
    prompt: str
    truth: str
    reason: str  # why it ended
    length: int  # tokens
    detail: str
    text: str  # "" where there are tokens
    tokens: tuple[Token, ...]
    left_out: int  # tokens in the middle
    head: int  # tokens before what is left out
    gap: float | None  # largest difference of log-probs, nats
    advantage: float | None  # mean


def samples(run: Run) -> list[Shown]:
    """Choose from the last recorded steps, best first."""
    told = [row for path in run.latest("tokens", _STEPS) for row in rows_in(path)]
    if told:
        most = max((abs(a) for row in told for a in _finite(row["advantages"])), default=0.0)
        found = [_with_tokens(row, most) for row in told]
        found.sort(key=lambda shown: -(shown.score or 0.0))
        best = [shown for shown in found if shown.end == "best"]
        worst = [shown for shown in found[::-1] if shown.end == "worst"]
        return best[:_EACH] + worst[:_EACH]
    return list(_without_tokens(next(run.latest("rollouts", 1), None)))


def _without_tokens(path: Path | None) -> Iterator[Shown]:
    """Choose from a file that may be larger than the memory."""
    if path is None:
        return
    taken: set[str] = set()
    for end, choose in (("best", nlargest), ("worst", nsmallest)):
        scored = (row for row in rows_in(path) if row["score"] is not None)
        prompts: set[str] = set()
        for row in choose(_POOL, scored, key=lambda row: row["score"]):
            text = json.dumps(row)
            if len(prompts) < _EACH and text not in taken and row["uid"] not in prompts:
                prompts.add(row["uid"])
                taken.add(text)
                yield _shown(row, end, text=_cut(row["output"]), detail=row["detail"])


def _with_tokens(row: Mapping[str, Any], most: float) -> Shown:
    engine, advantages = row["rollout_log_probs"], row["advantages"]
    trainer = row["old_log_probs"] or []
    gaps = [None if p is None or q is None else q - p for p, q in zip_longest(engine, trainer)]
    known = _finite(gaps)
    tokens = tuple(
        Token(
            piece,
            _title(p, q, a),
            0.0 if d is None else max(-1.0, min(1.0, d / FULL_GAP)),
            0.0 if a is None or not most else a / most,
        )
        for piece, p, q, d, a in zip_longest(row["pieces"], engine, trainer, gaps, advantages)
    )
    values = _finite(advantages)
    return _shown(
        row,
        row["end"],
        tokens=tokens,
        left_out=row["left_out"],
        head=row["left_out_after"],
        gap=max(map(abs, known)) if known else None,
        advantage=sum(values) / len(values) if values else None,
    )


def _shown(
    row: Mapping[str, Any],
    end: str,
    text: str = "",
    detail: str = "",
    tokens: tuple[Token, ...] = (),
    left_out: int = 0,
    head: int = 0,
    gap: float | None = None,
    advantage: float | None = None,
) -> Shown:
    return Shown(
        end,
        row["step"],
        row["score"],
        row["data_source"],
        _cut(row["input"]),
        _cut(str(row["gts"])),
        row["finish_reason"],
        row["response_length"],
        detail,
        text,
        tokens,
        left_out,
        head,
        gap,
        advantage,
    )


def _title(engine: float | None, trainer: float | None, advantage: float | None) -> str:
    words = [
        f"{name} {value:.4g}"
        for name, value in (("engine", engine), ("trainer", trainer), ("advantage", advantage))
        if value is not None
    ]
    return ", ".join(words)


def _finite(values: Sequence[float | None]) -> list[float]:
    return [value for value in values if value is not None and math.isfinite(value)]


def _cut(text: str) -> str:
    if len(text) <= _LONGEST:
        return text
    return f"{text[:_LONGEST]} ... ({len(text) - _LONGEST:,} characters more)"
