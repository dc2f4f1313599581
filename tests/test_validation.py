"""Every held-out row counts once, drawn as validation says and not as training does."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from mrl import load_config
from mrl.config import build_plan
from mrl.rewards.registry import ScoreItem
from mrl.tracking.rollouts import RolloutRow
from mrl.types import Prompt, Sample, SamplingParams, Score
from mrl.validation import Validator

ROWS = 5
TEXT = """
data: {train_batch_size: 4, val_batch_size: 2, max_response_length: 6}
actor: {ppo_mini_batch_size: 4, ppo_micro_batch_size_per_gpu: 1}
rollout: {n: 8, temperature: 0.9, top_p: 0.5, top_k: 3, seed: 7, stop: [";"]}
algorithm: {rollout_correction: {rollout_is: token}}
trainer: {n_gpus_per_node: 4}
"""


class Rows:
    """Held-out rows of two data sources."""

    def __len__(self) -> int:
        return ROWS

    def prompt(self, row: int, uid: str) -> Prompt:
        return Prompt(uid, (row,), f"ask {row}", "even" if row % 2 == 0 else "odd", str(row), {})


class Engine:
    """Answers a prompt with its number and that of the sample."""

    def __init__(self) -> None:
        self.asked: list[tuple[list[str], SamplingParams]] = []

    def generate(
        self, prompts: Sequence[Prompt], sampling: SamplingParams
    ) -> list[tuple[Sample, ...]]:
        self.asked.append(([prompt.uid for prompt in prompts], sampling))
        return [
            tuple(
                Sample(p.uid, p.token_ids, (k,), (0.0,), f"{p.token_ids[0]} {k}", "stop", 0)
                for k in range(sampling.n)
            )
            for p in prompts
        ]


class Scorer:
    """Scores an answer with its prompt's number; `lost` answers have no score."""

    def __init__(self, lost: Sequence[str], acc: bool) -> None:
        self.lost, self.acc = lost, acc

    def score(self, items: Sequence[ScoreItem]) -> tuple[Score, ...]:
        return tuple(map(self._one, items))

    def _one(self, item: ScoreItem) -> Score:
        if item.solution_str in self.lost:
            return Score(None, "timeout")
        number = float(item.solution_str.split()[0])
        return Score(number, "ok", extra={"acc": number > 2} if self.acc else {})


class Record:
    """Keeps the dumped rows."""

    def __init__(self) -> None:
        self.rows: list[RolloutRow] = []

    def rollouts(self, kind: str, step: int, rows: Sequence[RolloutRow]) -> None:
        assert kind == "validation"
        self.rows += rows

    def samples(self, step: int, rows: Sequence[RolloutRow]) -> None:
        pass


def validate(
    folder: Path, *overrides: str, lost: Sequence[str] = (), acc: bool = False
) -> tuple[dict[str, float], Engine, Record]:
    file = folder / "run.yaml"
    file.write_text(TEXT)
    config = load_config(file, overrides)
    engine, record = Engine(), Record()
    parts: tuple[Any, ...] = (Rows(), engine, Scorer(lost, acc), record)
    found = Validator(config, build_plan(config), *parts)(3)
    return dict(found), engine, record


@pytest.mark.parametrize("batch", ["1", "2", "3", "5", "9", "null"])
def test_every_row_is_scored_once_whatever_the_batches(tmp_path: Path, batch: str) -> None:
    found, engine, record = validate(tmp_path, f"data.val_batch_size={batch}")
    assert [uid for uids, _ in engine.asked for uid in uids] == [f"val-{i}" for i in range(ROWS)]
    assert [row.score.value for row in record.rows] == [0, 1, 2, 3, 4]
    assert found == {
        "val-core/even/reward/mean@1": (0 + 2 + 4) / 3,  # not a mean of batches' means
        "val-core/odd/reward/mean@1": (1 + 3) / 2,
        "val-aux/even/unscored": 0.0,
        "val-aux/odd/unscored": 0.0,
    }


def test_unscored_answers_are_counted_and_no_zeros(tmp_path: Path) -> None:
    found, _, record = validate(tmp_path, lost=("0 0", "3 0"))
    assert found["val-core/even/reward/mean@1"] == 3.0
    assert found["val-core/odd/reward/mean@1"] == 1.0
    assert (found["val-aux/even/unscored"], found["val-aux/odd/unscored"]) == (1.0, 1.0)
    assert len(record.rows) == ROWS


def test_an_accuracy_stands_for_the_reward(tmp_path: Path) -> None:
    found, *_ = validate(tmp_path, acc=True, lost=("1 0",))
    assert found["val-core/even/acc/mean@1"] == pytest.approx(1 / 3)
    assert found["val-core/odd/acc/mean@1"] == 1.0
    assert not any("/reward/" in name for name in found)


VAL = "rollout.val_kwargs"
SAMPLED = (f"{VAL}.do_sample=true", f"{VAL}.temperature=0.6", f"{VAL}.top_p=0.7", f"{VAL}.n=2")


@pytest.mark.parametrize(
    ("overrides", "n", "temperature", "top_p"),
    [((), 1, 0.0, 1.0), ((f"{VAL}.temperature=0.6",), 1, 0.0, 1.0), (SAMPLED, 2, 0.6, 0.7)],
)
def test_validation_draws_by_its_own_settings(
    tmp_path: Path, overrides: tuple[str, ...], n: int, temperature: float, top_p: float
) -> None:
    found, engine, record = validate(tmp_path, *overrides)
    wanted = SamplingParams(n, temperature, top_p, -1, 6, 7, (";",))
    assert [sampling for _, sampling in engine.asked] == [wanted] * 3
    assert len(record.rows) == n * ROWS
    assert f"val-core/even/reward/mean@{n}" in found
