"""Old log-probs that come with their update are those of a pass before: the run is the same."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from mrl import RayPPOTrainer, load_config
from mrl.batching.experience import Experience
from mrl.config import build_plan
from mrl.own_log_probs import pass_before, pass_over
from mrl.types import Ragged, Repeated, Sequences
from tests.runs import Inputs, Recording, overrides, steps_of

GRPO = (
    "algorithm={adv_estimator: grpo, use_kl_in_reward: false}",
    "trainer={critic_warmup: 0, val_before_train: false, test_freq: -1, save_freq: -1}",
)
# The first mini-batch of the first step, of four prompts in order, has no score at all.
UNSCORED = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return None if extra_info["index"] in {first} else len(solution_str) / 8
"""


def fit(inputs: Inputs, run: Path, *changes: str) -> Path:
    config = load_config(inputs.config, overrides(run, *GRPO, *changes))
    RayPPOTrainer(config, AutoTokenizer.from_pretrained(config.model.path)).fit(max_steps=2)
    return run


def told(run: Path, step: int) -> list[dict[str, object]]:
    return [json.loads(text) for text in (run / f"tokens/{step}.jsonl").open()]


@pytest.mark.parametrize(
    "minibatches",
    [
        pytest.param("actor.ppo_mini_batch_size=4", id="two-updates"),
        pytest.param("actor.ppo_mini_batch_size=8", id="one-update", marks=pytest.mark.slow),
    ],
)
def test_a_run_is_the_same_with_and_without_the_pass_before(
    minibatches: str, warm_pools: list[Recording], inputs: Inputs, tmp_path: Path
) -> None:
    runs = [
        fit(inputs, tmp_path / str(own), f"actor.first_log_probs_from_update={own}", minibatches)
        for own in (True, False)
    ]
    mine, wanted = map(steps_of, runs)
    assert mine.keys() == wanted.keys() == {1, 2}
    for step, row in wanted.items():
        assert mine[step].keys() == row.keys()
        for name, value in row.items():
            # a first mini-batch's ratios are 1 to the last bit, and a pass before is off by some
            assert mine[step][name] == pytest.approx(value, rel=1e-4, abs=1e-5), name
        for a, b in zip(told(runs[0], step), told(runs[1], step), strict=True):
            assert a["old_log_probs"] == pytest.approx(b["old_log_probs"], rel=1e-4, abs=1e-5)
    fresh = [batch.old_log_probs is None for pool in warm_pools for batch in pool.batches]
    updates = 2 if minibatches.endswith("4") else 1
    once = [True, False][:updates] * 2
    assert fresh == [*once, *[False] * len(once)]


def test_rows_that_nothing_is_learnt_from_are_scored_by_a_pass(
    warm_pools: list[Recording], inputs: Inputs, tmp_path: Path
) -> None:
    probe = fit(inputs, tmp_path / "probe", "actor.shuffle=false")
    lines = (probe / "rollouts/1.jsonl").read_text().splitlines()
    first = {int(json.loads(line)["uid"].split("-")[1]) for line in lines[: 4 * 4]}
    (tmp_path / "reward.py").write_text(UNSCORED.format(first=first))
    run = fit(
        inputs, tmp_path / "run", "actor.shuffle=false",
        f"reward.custom_reward_function.path={tmp_path / 'reward.py'}",
    )  # fmt: skip
    row = steps_of(run)[1]
    assert row["actor/skipped_updates"] == 1.0
    assert row["actor/entropy"] == pytest.approx(steps_of(probe)[1]["actor/entropy"], rel=1e-5)
    assert all(None not in line["old_log_probs"] for line in told(run, 1))  # type: ignore[operator]
    assert warm_pools[-1].batches[0].old_log_probs is not None


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ((), True),
        (("actor.first_log_probs_from_update=false",), False),
        (("actor.ppo_epochs=2",), False),
        (("algorithm.use_kl_in_reward=true",), False),
        (("actor.use_kl_loss=true",), True),
        (("algorithm.rollout_correction.rollout_is=token",), False),
        (("algorithm.rollout_correction.bypass_mode=true",), False),
        (("algorithm.rollout_correction.alarm_action=stop",), False),
    ],
)
def test_what_asks_for_log_probs_before_the_update_gets_them(
    changes: Sequence[str], expected: bool, inputs: Inputs, tmp_path: Path
) -> None:
    config = load_config(inputs.config, overrides(tmp_path, *GRPO, *changes))
    assert build_plan(config).first_log_probs_from_update is expected


@dataclass
class Asked:
    """An actor whose log-prob of a token is its id, as is its routing; its entropy is twice it."""

    rows: list[int] = field(default_factory=list)

    def log_probs(self, sequences: Sequences, routing: Ragged | None = None) -> tuple[Ragged, ...]:
        self.rows.append(len(sequences))
        assert routing is not None and torch.equal(routing.values, sequences.tokens.values)
        column = sequences.tokens.with_values(sequences.tokens.values.float())
        return column, column.with_values(2 * column.values)


@pytest.mark.parametrize("due", [(), (2, 0), (1, 0, 2)])
def test_rows_that_are_due_are_left_out_of_the_pass_and_filled_in_later(due: list[int]) -> None:
    lengths = torch.tensor([2, 1, 3])
    tokens = Ragged(torch.arange(6), lengths)
    none = Repeated(torch.zeros(3), lengths)
    batch = Experience((), (), Sequences(tokens, lengths), none, none, routing=tokens)
    actor = Asked()
    own, _ = pass_before(actor, batch, list(due))  # type: ignore[arg-type]
    assert actor.rows == ([3 - len(due)] if len(due) < 3 else [])
    unknown = own.log_probs.values.isnan()
    assert unknown.tolist() == [row in due for row, n in enumerate([2, 1, 3]) for _ in range(n)]
    if due:
        own = own.complete(pass_over(Asked(), batch, due))  # type: ignore[arg-type]
    assert own.log_probs.values.tolist() == list(range(6)) and not own.due
    assert own.entropies.values.tolist() == [2 * i for i in range(6)]
