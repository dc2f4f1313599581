"""rollouts/<step>.jsonl: what was asked, answered and scored at a step."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from mrl.checkpoint.atomic import write_atomically
from mrl.types import Prompt, Sample, Score


@dataclass(frozen=True, slots=True)
class RolloutRow:
    """One answer and its verdict; `input`, `output`, `gts`, `score` and `step` as in verl."""

    input: str
    output: str
    gts: Any
    score: float | None
    step: int
    uid: str
    data_source: str
    status: str
    detail: str
    finish_reason: str
    response_length: int  # tokens
    policy_version: int
    extra: dict[str, float]


def rollout_rows(
    step: int, prompts: Mapping[str, Prompt], samples: Sequence[Sample], scores: Sequence[Score]
) -> list[RolloutRow]:
    """Pair each sample with its own prompt, by uid, and its own score, by position.

    Raises:
        ValueError: samples and scores differ in number, or a sample's prompt is unknown.
    """
    if len(samples) != len(scores):
        raise ValueError(f"{len(samples)} samples and {len(scores)} scores")
    unknown = sorted({s.uid for s in samples} - set(prompts))
    if unknown:
        raise ValueError(f"samples of unknown prompts: uids {unknown[:5]}")
    return [
        RolloutRow(
            input=prompts[sample.uid].text,
            output=sample.text,
            gts=prompts[sample.uid].ground_truth,
            score=score.value,
            step=step,
            uid=sample.uid,
            data_source=prompts[sample.uid].data_source,
            status=score.status,
            detail=score.detail,
            finish_reason=sample.finish_reason,
            response_length=len(sample.response_ids),
            policy_version=sample.policy_version,
            extra=dict(score.extra or {}),
        )
        for sample, score in zip(samples, scores, strict=True)
    ]


def dump_rollouts(folder: Path, step: int, rows: Sequence[RolloutRow]) -> Path:
    """Write `<folder>/<step>.jsonl`, whole or not at all.

    A value that JSON does not know (a ground truth may be anything) is written as its repr.
    """
    path = folder / f"{step}.jsonl"
    names = [field.name for field in fields(RolloutRow)]
    # `asdict` would copy each value, however deep, only to have it written.
    shown = ({name: getattr(row, name) for name in names} for row in rows)
    lines = [json.dumps(row, ensure_ascii=False, default=repr) for row in shown]
    write_atomically(path, "".join(line + "\n" for line in lines))
    return path
