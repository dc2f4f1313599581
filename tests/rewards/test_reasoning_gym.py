from __future__ import annotations

import json

import pytest
import reasoning_gym

from mrl.rewards.reasoning_gym import compute_score


@pytest.mark.parametrize("task", ["chain_sum", "countdown", "spell_backward"])
def test_the_verifier_accepts_its_own_answer_and_refuses_none(task: str) -> None:
    for entry in reasoning_gym.create_dataset(task, size=3, seed=5):
        info = {"task": task, "entry": json.dumps(entry)}
        answer = entry["answer"]
        if task == "countdown":
            answer = entry["metadata"]["expression"]
        right = compute_score("reasoning_gym", answer, entry["answer"], info)
        assert right == {"score": 1.0, "acc": 1.0}
        assert compute_score("reasoning_gym", "", entry["answer"], info)["acc"] == 0.0


def test_the_task_may_stand_in_the_data_source_and_the_answer_in_a_tag() -> None:
    entry = reasoning_gym.create_dataset("chain_sum", size=1, seed=5)[0]
    info = {"entry": json.dumps(entry)}
    text = f"I think 7 <answer>{entry['answer']}</answer>"
    assert compute_score("reasoning_gym/chain_sum", text, None, info)["score"] == 1.0


def test_a_near_miss_keeps_the_verifiers_part_but_is_not_right() -> None:
    info = {"entry": json.dumps({"answer": "3", "metadata": {}})}
    assert compute_score("reasoning_gym/chain_sum", "73", "3", info) == {"score": 0.5, "acc": 0.0}


def test_a_row_without_entry_or_with_an_unknown_task_is_an_error() -> None:
    with pytest.raises(ValueError, match="no 'entry'"):
        compute_score("reasoning_gym/chain_sum", "3", "3", {"index": 1})
    with pytest.raises(ValueError, match="'no_task' not registered"):
        compute_score("reasoning_gym/no_task", "3", "3", {"entry": "{}"})
