from __future__ import annotations

import json
from pathlib import Path

import pytest

from mrl.batching.balance import balance
from mrl.tracking.rollouts import dump_rollouts, rollout_rows
from mrl.types import Prompt, Sample, Score


def prompt(uid: str) -> Prompt:
    return Prompt(uid, (1, 2), f"ask {uid}", "arithmetic", {"answer": uid}, {})


def sample(uid: str, number: int) -> Sample:
    ids = tuple(range(number + 1))
    return Sample(uid, (1, 2), ids, (0.0,) * len(ids), f"{uid} says {number}", "stop", 3)


PROMPTS = {uid: prompt(uid) for uid in "ab"}
SAMPLES = [sample(uid, number) for number in range(4) for uid in "ab"]
SCORES = [Score(float(len(s.response_ids)), "ok") for s in SAMPLES]


def test_each_row_carries_the_reward_of_its_own_text_under_balancing(tmp_path: Path):
    lengths = [len(s.response_ids) for s in SAMPLES]
    order = [i for part in balance(lengths, 2, equal_counts=True) for i in part]
    assert order != sorted(order)
    shuffled = rollout_rows(5, PROMPTS, [SAMPLES[i] for i in order], [SCORES[i] for i in order])
    path = dump_rollouts(tmp_path / "rollouts", 5, shuffled)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert path.name == "5.jsonl"
    assert len(rows) == len(SAMPLES)
    for row in rows:
        uid, number = row["output"].split(" says ")
        assert row["score"] == int(number) + 1
        assert (row["uid"], row["input"], row["gts"]) == (uid, f"ask {uid}", {"answer": uid})
        assert row["step"] == 5


def test_an_unscored_row_says_why(tmp_path: Path):
    rows = rollout_rows(1, PROMPTS, SAMPLES[:1], [Score(None, "timeout", "30 s")])
    (line,) = dump_rollouts(tmp_path, 1, rows).read_text().splitlines()
    row = json.loads(line)
    assert (row["score"], row["status"], row["detail"]) == (None, "timeout", "30 s")


def test_text_of_any_kind_stays_one_line_a_row(tmp_path: Path):
    odd = Sample("a", (1,), (1,), (0.0,), "line\nbreak \u2028 \u00e9", "stop", 0)
    text = dump_rollouts(tmp_path, 1, rollout_rows(1, PROMPTS, [odd], SCORES[:1])).read_bytes()
    assert text.count(b"\n") == 1
    assert json.loads(text)["output"] == odd.text


def test_unmatched_scores_or_prompts_are_refused():
    with pytest.raises(ValueError, match="8 samples and 7 scores"):
        rollout_rows(1, PROMPTS, SAMPLES, SCORES[:-1])
    with pytest.raises(ValueError, match=r"unknown prompts: uids \['b'\]"):
        rollout_rows(1, {"a": prompt("a")}, SAMPLES, SCORES)
