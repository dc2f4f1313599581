"""Filling the batch of a step: dynamic sampling, its limit, and greedy baselines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from mrl.config import Config
from mrl.config.schema import AlgorithmConfig, DataConfig, FilterGroupsConfig, RolloutConfig
from mrl.generation import Generated, Generator
from mrl.rewards.registry import ScoreItem
from mrl.tracking.timers import Timers
from mrl.types import Prompt, Sample, SamplingParams, Score

N, BATCH = 4, 3


class Stream:
    """Prompts that are numbered on and on."""

    def __init__(self, size: int) -> None:
        self.size, self.taken = size, 0

    def next_batch(self) -> tuple[Prompt, ...]:
        first, self.taken = self.taken, self.taken + self.size
        return tuple(
            Prompt(str(i), (i,), "", "test", i, {}) for i in range(first, first + self.size)
        )


class Engine:
    """Answers with the prompt's number and the sample's; remembers what was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[list[str], SamplingParams]] = []
        self.asleep = 0

    def generate(
        self, prompts: Sequence[Prompt], sampling: SamplingParams
    ) -> list[tuple[Sample, ...]]:
        self.asked.append(([p.uid for p in prompts], sampling))
        return [
            tuple(
                Sample(p.uid, p.token_ids, [k, 7], [0.0, 0.0], f"{p.uid} {k}", "stop", 0)
                for k in range(sampling.n)
            )
            for p in prompts
        ]

    def sleep(self) -> list[int]:
        self.asleep += 1
        return [0]


class Judge:
    """Scores the text by a function of prompt and sample number."""

    def __init__(self, score: Callable[[int, int], float | None]) -> None:
        self.rule = score

    def score(self, items: Sequence[ScoreItem]) -> tuple[Score, ...]:
        pairs = [item.solution_str.split() for item in items]
        assert [int(prompt) for prompt, _ in pairs] == [item.ground_truth for item in items]
        return tuple(Score(self.rule(int(p), int(k)), "ok") for p, k in pairs)


def run(
    score: Callable[[int, int], float | None], name: str = "grpo", gen: int = 2, **rules: Any
) -> tuple[Generated, Engine, Stream]:
    config = Config(
        data=DataConfig(train_batch_size=BATCH, gen_batch_size=gen),
        rollout=RolloutConfig(n=N, seed=5),
        algorithm=AlgorithmConfig(adv_estimator=name, filter_groups=FilterGroupsConfig(**rules)),
    )
    engine, stream = Engine(), Stream(gen)
    generator = Generator(config, stream, engine, Judge(score))  # type: ignore[arg-type]
    return generator(11, Timers()), engine, stream


def uids(found: Generated) -> list[str]:
    return [group.prompt.uid for group in found.groups]


def test_without_a_filter_a_batch_is_what_was_drawn() -> None:
    found, engine, _ = run(lambda p, k: 1.0, gen=BATCH)
    assert uids(found) == ["0", "1", "2"] and found.metrics == {} and engine.asleep == 1
    assert found.batch.uids == tuple(uid for uid in "012" for _ in range(N))
    assert [sampling.seed for _, sampling in engine.asked] == [5 + 11]


@pytest.mark.parametrize("seed", range(3))
def test_constant_groups_make_room_and_the_batch_keeps_its_size(seed: int) -> None:
    found, engine, stream = run(
        lambda p, k: float(k % 2) if p % 3 == seed else float(p % 2), enable=True
    )
    mixed = [p for p in range(stream.taken) if p % 3 == seed]
    assert uids(found) == [str(p) for p in mixed[:BATCH]]
    assert len(found.scores) == len(found.batch.samples) == BATCH * N
    rounds = len(engine.asked)
    assert found.metrics == {
        "train/num_gen_batches": rounds,
        "training/filter_groups/evicted_samples": N * (2 * rounds - len(mixed)),
        "training/filter_groups/discarded_surplus_samples": N * (len(mixed) - BATCH),
    }
    seeds = [sampling.seed for _, sampling in engine.asked]
    assert len(set(seeds)) == rounds > 1 and seeds[0] == 16 and engine.asleep == 1


def test_every_sample_keeps_its_own_score() -> None:
    found, *_ = run(lambda p, k: 10.0 * p + k, enable=True)
    wanted = [10.0 * int(s.uid) + s.response_ids[0] for s in found.batch.samples]
    assert [score.value for score in found.scores] == wanted


def test_at_the_limit_the_run_ends_with_counts_and_advice() -> None:
    with pytest.raises(ValueError, match=r"=3 generations gave 0 of 3 .*: 4 groups all 0, 2 gr"):
        run(lambda p, k: float(p % 3 == 0), enable=True, max_num_gen_batches=3)


def test_at_the_limit_the_batch_may_be_filled_with_the_others() -> None:
    found, *_ = run(
        lambda p, k: float(k) if p == 1 else 0.0, enable=True, max_num_gen_batches=2,
        at_limit="fill",
    )  # fmt: skip
    assert uids(found) == ["1", "0", "2"] and len(found.scores) == BATCH * N
    assert found.metrics["training/filter_groups/evicted_samples"] == N


def test_too_few_prompts_for_a_batch_are_no_batch() -> None:
    with pytest.raises(ValueError, match="2 prompts were generated for a batch of 3"):
        run(lambda p, k: 0.0, enable=True, max_num_gen_batches=1, at_limit="fill")


def test_a_group_with_one_score_alone_has_nothing_to_compare() -> None:
    found, *_ = run(lambda p, k: float(k) if p % 2 or k == 0 else None, enable=True)
    assert uids(found) == ["1", "3", "5"]


def test_remax_answers_each_prompt_once_more_greedily() -> None:
    found, engine, _ = run(lambda p, k: p + 0.1 * k, "remax", gen=BATCH)
    asked, sampling = engine.asked[1]
    assert asked == ["0", "1", "2"] and (sampling.n, sampling.temperature) == (1, 0.0)
    assert found.greedy is not None and engine.asleep == 1
    assert [(s.uid, score.value) for s, score in found.greedy] == [("0", 0), ("1", 1), ("2", 2)]
    assert len(found.scores) == BATCH * N
