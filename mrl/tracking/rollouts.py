"""rollouts/<step>.jsonl: what was asked, answered and scored at a step."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mrl.checkpoint.atomic import write_atomically
from mrl.types import Prompt, Sample, Score


@dataclass(frozen=True, slots=True)
class RolloutRow:
    """One answer and its verdict, with what was asked."""

    step: int
    prompt: Prompt
    sample: Sample
    score: Score

    def to_json(self) -> dict[str, Any]:
        """Give a row of the file; `input`, `output`, `gts`, `score` and `step` as in verl."""
        prompt, sample, score = self.prompt, self.sample, self.score
        return {
            "input": prompt.text,
            "output": sample.text,
            "gts": prompt.ground_truth,
            "score": score.value,
            "step": self.step,
            "uid": sample.uid,
            "data_source": prompt.data_source,
            "status": score.status,
            "detail": score.detail,
            "finish_reason": sample.finish_reason,
            "response_length": len(sample.response_ids),  # tokens
            "policy_version": sample.policy_version,
            "extra": dict(score.extra or {}),
        }


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
        RolloutRow(step, prompts[sample.uid], sample, score)
        for sample, score in zip(samples, scores, strict=True)
    ]


def dump_rollouts(folder: Path, step: int, rows: Sequence[RolloutRow]) -> Path:
    """Write `<folder>/<step>.jsonl`, whole or not at all.

    A value that JSON does not know (a ground truth may be anything) is written as its repr.
    """
    path = folder / f"{step}.jsonl"
    lines = [json.dumps(row.to_json(), ensure_ascii=False, default=repr) for row in rows]
    write_atomically(path, "".join(line + "\n" for line in lines))
    return path
