"""tokens/<step>.jsonl: a few samples of a step, token by token.

Of the last steps: the best and the worst answers with the log-probs of engine and trainer and the
advantage of every token, for a report to shade. All samples would be as large as the training data.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mrl.checkpoint.atomic import write_atomically
from mrl.tracking.rollouts import RolloutRow
from mrl.types import Ragged

EACH = 2  # samples of either end, of different prompts
KEPT = 20  # steps: what a report shows is of the last ones
HEAD, TAIL = 250, 150  # tokens kept of a long response

Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True, slots=True)
class TokenColumns:
    """What is told of the response tokens of all samples of a step."""

    rollout_log_probs: Ragged  # float32, by the engine
    old_log_probs: Ragged | None  # float32, by the trainer; None: it computed none
    advantages: Ragged  # float32


def dump_tokens(
    folder: Path, step: int, rows: Sequence[RolloutRow], columns: TokenColumns, decode: Decode
) -> Path:
    """Write `<folder>/<step>.jsonl`, whole or not at all: a row for each sample chosen."""
    path = folder / f"{step}.jsonl"
    found = [_told(rows[i], end, i, columns, decode) for end, i in ends(rows)]
    write_atomically(path, "".join(json.dumps(row, default=repr) + "\n" for row in found))
    kept = sorted((int(file.stem) for file in folder.glob("*.jsonl")), reverse=True)
    for old in [number for number in kept if number <= step][KEPT:]:
        (folder / f"{old}.jsonl").unlink()
    return path


def ends(rows: Sequence[RolloutRow]) -> Iterator[tuple[str, int]]:
    """Choose ("best" or "worst", index), best first; no prompt and no sample twice at an end."""
    scored = [i for i, row in enumerate(rows) if row.score.value is not None]
    order = sorted(scored, key=lambda i: -(rows[i].score.value or 0.0))
    taken: set[int] = set()
    for end, indices in (("best", order), ("worst", order[::-1])):
        prompts: set[str] = set()
        for i in indices:
            if len(prompts) < EACH and i not in taken and rows[i].sample.uid not in prompts:
                prompts.add(rows[i].sample.uid)
                taken.add(i)
                yield end, i


def pieces(ids: Sequence[int], decode: Decode) -> list[str]:
    """Give the text that each token adds; one inside a character adds "", its last adds it all.

    A token is decoded behind those before it, since some tokenizers drop a leading space.
    """
    texts: list[str] = []
    start = read = 0
    for end in range(1, len(ids) + 1):
        before, now = decode(ids[start:read]), decode(ids[start:end])
        is_whole = len(now) > len(before) and not now.endswith("\ufffd")
        texts.append(now[len(before) :] if is_whole else "")
        if is_whole:
            start, read = read, end
    return texts


def _told(
    row: RolloutRow, end: str, index: int, columns: TokenColumns, decode: Decode
) -> dict[str, Any]:
    ids = list(row.sample.response_ids)
    kept = list(range(len(ids)))
    if len(ids) > HEAD + TAIL:
        kept = [*kept[:HEAD], *kept[-TAIL:]]
    head, tail = kept[:HEAD], kept[HEAD:]

    def column(values: Ragged | None) -> list[float | None] | None:
        if values is None:
            return None
        numbers = values.select([index]).values.tolist()
        return [_short(numbers[i]) for i in kept]

    return {
        "end": end,
        "step": row.step,
        "uid": row.sample.uid,
        "data_source": row.prompt.data_source,
        "input": row.prompt.text,
        "gts": row.prompt.ground_truth,
        "score": row.score.value,
        "finish_reason": row.sample.finish_reason,
        "response_length": len(ids),
        "left_out": len(ids) - len(kept),  # tokens
        "left_out_after": len(head),
        "pieces": [
            *pieces([ids[i] for i in head], decode),
            *pieces([ids[i] for i in tail], decode),
        ],
        "rollout_log_probs": column(columns.rollout_log_probs),
        "old_log_probs": column(columns.old_log_probs),
        "advantages": column(columns.advantages),
    }


def _short(value: float) -> float | None:
    return float(f"{value:.6g}") if math.isfinite(value) else None
