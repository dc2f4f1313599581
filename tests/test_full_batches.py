"""With dynamic sampling a batch keeps its size, whatever the groups come out as."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from mrl import load_config
from mrl.algorithms.filters import is_mixed
from mrl.config import build_plan
from mrl.generation import Generator
from mrl.rewards.registry import ScoreItem
from mrl.tracking.timers import Timers
from mrl.types import Prompt, Sample, SamplingParams, Score

SIZE, N = 8, 4
TEXT = f"""
data: {{train_batch_size: {SIZE}}}
actor: {{ppo_mini_batch_size: 4, ppo_micro_batch_size_per_gpu: 2}}
rollout: {{n: {N}}}
algorithm: {{adv_estimator: grpo, filter_groups: {{enable: true, max_num_gen_batches: 3}}}}
trainer: {{n_gpus_per_node: 4}}
"""
Fate = Callable[[int, int], float | None]  # a prompt's number and a sample's to a score


def scores(*values: float | None) -> list[Score]:
    return [Score(v, "ok" if v is not None else "timeout") for v in values]


@pytest.mark.parametrize(
    ("values", "mixed"),
    [
        ((0.4, 0.4, 0.4, 0.4), False),  # constant, but neither 0 nor 1
        ((0, 1, 0, 1), True),
        ((0, 0, 0, 0), False),
        ((1, 1, 1, 1), False),
        ((-1, -1), False),
        ((0.1, 0.1 + 1e-7), True),
        ((0.1,) * 7, False),
        ((1, None, 1, None), False),  # unscored is no zero
        ((1, None, 0, None), True),
        ((None, None), False),
        ((1,), False),
    ],
)
def test_a_group_teaches_if_its_scores_differ(
    values: tuple[float | None, ...], mixed: bool
) -> None:
    assert is_mixed(scores(*values), None) is mixed


class Stream:
    """Endless prompts, numbered."""

    def __init__(self) -> None:
        self.taken = 0

    def next_batch(self) -> tuple[Prompt, ...]:
        numbers = range(self.taken, self.taken + SIZE)
        self.taken += SIZE
        return tuple(Prompt(f"p{i}", (i,), "", "x", i, {}) for i in numbers)


class Engine:
    """Answers a prompt with its number and the sample's; keeps the seeds."""

    def __init__(self) -> None:
        self.seeds: list[int] = []

    def generate(
        self, prompts: Sequence[Prompt], sampling: SamplingParams
    ) -> list[tuple[Sample, ...]]:
        self.seeds.append(sampling.seed)
        return [
            tuple(
                Sample(p.uid, p.token_ids, (k,), (0.0,), f"{p.token_ids[0]} {k}", "stop", 0)
                for k in range(sampling.n)
            )
            for p in prompts
        ]

    def sleep(self) -> list[int]:
        return [0]


class Scorer:
    def __init__(self, fate: Fate) -> None:
        self.fate = fate

    def score(self, items: Sequence[ScoreItem]) -> tuple[Score, ...]:
        found = [self.fate(*map(int, item.solution_str.split())) for item in items]
        return tuple(scores(*found))


def fill(folder: Path, fate: Fate, *overrides: str) -> tuple[Any, Stream, Engine]:
    file = folder / "run.yaml"
    file.write_text(TEXT)
    config = load_config(file, overrides)
    build_plan(config)
    stream, engine = Stream(), Engine()
    parts: tuple[Any, ...] = (stream, engine, Scorer(fate))
    return Generator(config, *parts)(3, Timers()), stream, engine


@pytest.mark.parametrize("seed", range(5))
def test_the_batch_is_full_of_groups_that_teach(tmp_path: Path, seed: int) -> None:
    teaches = {i for i in range(99) if random.Random(100 * seed + i).random() < 0.5}
    found, stream, engine = fill(tmp_path, lambda i, k: float(i in teaches and k == 1))
    kept = [int(group.prompt.uid[1:]) for group in found.groups]
    assert kept == sorted(teaches)[:SIZE]  # in the stream's order, none left out
    assert len(found.batch.samples) == len(found.scores) == SIZE * N
    assert found.batch.uids == tuple(f"p{i}" for i in kept for _ in range(N))
    assert len(engine.seeds) == stream.taken / SIZE == found.metrics["train/num_gen_batches"]
    assert len(set(engine.seeds)) == len(engine.seeds)


@pytest.mark.parametrize(
    ("fate", "told"),
    [
        (lambda i, k: 0.0, "24 groups all 0"),
        (lambda i, k: 1.0, "24 groups all 1"),
        (lambda i, k: 0.4, "24 groups all 0.4"),
        (lambda i, k: None, "24 groups unscored"),
        (lambda i, k: float(i % 2), "12 groups all 0, 12 groups all 1"),
    ],
)
def test_data_that_teach_nothing_end_the_step_with_counts_and_advice(
    tmp_path: Path, fate: Fate, told: str
) -> None:
    with pytest.raises(ValueError, match="max_num_gen_batches=3 generations gave 0 of 8") as error:
        fill(tmp_path, fate)
    assert told in str(error.value)
    assert "rollout.n" in str(error.value) and "at_limit=fill" in str(error.value)


def test_a_batch_may_be_filled_up_at_the_limit(tmp_path: Path) -> None:
    found, stream, _ = fill(
        tmp_path, lambda i, k: float(i == 9 and k), "algorithm.filter_groups.at_limit=fill"
    )
    assert stream.taken == 3 * SIZE
    assert len(found.groups) == SIZE and len(found.batch.samples) == SIZE * N
    assert "p9" in found.prompts


def test_without_the_filter_every_prompt_is_trained_on_once(tmp_path: Path) -> None:
    found, stream, _ = fill(tmp_path, lambda i, k: 0.0, "algorithm.filter_groups.enable=false")
    assert stream.taken == SIZE
    assert [group.prompt.uid for group in found.groups] == [f"p{i}" for i in range(SIZE)]
