"""The controller's side of the roles, on ranks that are plain functions."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from mrl.algorithms.reductions import Max, Sum, reduced
from mrl.config.plan import spread
from mrl.types import (
    Batching,
    PolicyBatch,
    Prompt,
    Ragged,
    Sample,
    SamplingParams,
    Sequences,
)
from mrl.workers.group import Answers, MegatronRanks, RolloutGroup, TrainGroup

SAMPLING = SamplingParams(n=2, temperature=1.0, top_p=1.0, top_k=-1, max_tokens=4, seed=0)


class LocalPool:
    """Ranks that are `answer(rank, method, args)` in this process."""

    def __init__(self, world_size: int, answer: Callable[..., Any]) -> None:
        self.world_size, self._answer = world_size, answer
        self.calls: list[tuple[int, str, str, tuple[Any, ...]]] = []

    def submit(
        self, ranks: Sequence[int], role: str, method: str, args: tuple[Any, ...]
    ) -> Answers:
        answers = Answers(ranks)
        for rank in ranks:
            self.calls.append((rank, role, method, args))
            answers.take(rank, self._answer(rank, method, args))
        return answers

    def wait(self, calls: Sequence[Answers]) -> list[list[Any]]:
        return [call.result() for call in calls]

    def close(self) -> None:
        pass


class Scorer:
    """A role whose outputs tell their row; like Megatron's, it answers once a part."""

    def __init__(self, ranks: MegatronRanks, pp: int) -> None:
        self.ranks, self.pp = ranks, pp
        self.rows: dict[int, list[int]] = {}  # first tokens of the rows each rank was given

    def __call__(self, rank: int, method: str, args: tuple[Any, ...]) -> Any:
        rows: Sequences = getattr(args[0], "sequences", args[0])
        self.rows[rank] = [int(row[0]) for row in rows.tokens.rows()]
        last_stage = rank >= self.ranks.tp * self.ranks.dp * (self.pp - 1)
        if not last_stage or rank % self.ranks.tp:
            return None
        if method == "update":
            total = float(args[0].weights.values.sum())
            return {"loss": Sum(total), "norm": Max(3.0)}
        column = Ragged.from_rows(
            [
                row[-int(n) :].float()
                for row, n in zip(rows.tokens.rows(), rows.response_lengths, strict=True)
            ]
        )
        return (column, column.with_values(-column.values)) if method == "log_probs" else column


def rows_of(count: int, seed: int) -> Sequences:
    """Draw rows of different length; each starts with its number."""
    draw = random.Random(seed)
    rows = [
        torch.tensor([i, *(1000 * i + k for k in range(draw.randint(1, 50)))]) for i in range(count)
    ]
    responses = torch.tensor([draw.randint(1, len(row) - 1) for row in rows])
    return Sequences(Ragged.from_rows(rows), responses)


def responses(rows: Sequences) -> torch.Tensor:
    pairs = zip(rows.tokens.rows(), rows.response_lengths.tolist(), strict=True)
    return torch.cat([row[-n:] for row, n in pairs]).float()


def train_group(
    tp: int, pp: int, dp: int, batching: Batching, balanced: bool = True
) -> tuple[TrainGroup, Scorer, LocalPool]:
    scorer = Scorer(MegatronRanks(tp, 1, dp, pp), pp)
    pool = LocalPool(tp * pp * dp, scorer)
    group = TrainGroup(pool, "actor", scorer.ranks, batching, batching, 64, balanced)
    return group, scorer, pool


@pytest.mark.parametrize("balanced", [True, False])
@pytest.mark.parametrize(("tp", "pp", "dp"), [(1, 1, 1), (2, 1, 3), (1, 2, 4), (2, 2, 2)])
def test_rows_come_back_in_order(tp: int, pp: int, dp: int, balanced: bool) -> None:
    for seed in range(10):
        for batching in (Batching(micro_batch_size=2), Batching(max_tokens=64)):
            rows = rows_of(12, seed)
            group, scorer, _ = train_group(tp, pp, dp, batching, balanced)
            log_probs, entropies = group.log_probs(rows)
            assert torch.equal(log_probs.values, responses(rows))
            assert torch.equal(entropies.values, -responses(rows))
            assert torch.equal(log_probs.lengths, rows.response_lengths)
            assert torch.equal(group.values(rows).values, responses(rows))
            parts = {tuple(given) for given in scorer.rows.values()}
            assert sorted(row for part in parts for row in part) == list(range(12))


def test_ranks_of_one_model_copy_get_the_same_rows() -> None:
    group, scorer, _ = train_group(2, 2, 3, Batching(micro_batch_size=1))
    group.log_probs(rows_of(6, 0))
    for rank, rows in scorer.rows.items():
        # tensor-parallel neighbours, and the same place in the other stage
        assert rows == scorer.rows[rank // 2 * 2] == scorer.rows[(rank + 6) % 12]


def test_balanced_parts_hold_as_many_rows_where_batches_are_counted() -> None:
    for seed in range(10):
        group, scorer, _ = train_group(1, 1, 4, Batching(micro_batch_size=2))
        group.values(rows_of(16, seed))
        assert [len(rows) for rows in scorer.rows.values()] == [4] * 4


def test_balanced_parts_are_even_in_tokens() -> None:
    rows = Sequences(
        Ragged.from_rows([torch.full((n,), i) for i, n in enumerate([40, 2, 2, 2, 30, 4, 4, 4])]),
        torch.ones(8, dtype=torch.int64),
    )
    group, scorer, _ = train_group(1, 1, 2, Batching(max_tokens=64))
    group.values(rows)
    lengths = rows.tokens.lengths
    tokens = [int(lengths[given].sum()) for given in scorer.rows.values()]
    assert max(tokens) - min(tokens) <= 4


def test_parts_without_rows_answer_with_none() -> None:
    rows = rows_of(3, 0)
    group, scorer, _ = train_group(1, 1, 8, Batching(micro_batch_size=1))
    assert torch.equal(group.log_probs(rows)[0].values, responses(rows))
    assert sum(map(len, scorer.rows.values())) == 3
    assert len(scorer.rows) == 8  # every rank is called: it may wait for its peers


def test_metrics_count_every_part_once() -> None:
    rows = rows_of(8, 0)
    column = Ragged(torch.ones(int(rows.response_lengths.sum())), rows.response_lengths)
    batch = PolicyBatch(rows, column, column, column, None)
    for tp, pp, dp in ((1, 1, 1), (2, 2, 2), (1, 1, 4)):
        group, _, _ = train_group(tp, pp, dp, Batching(micro_batch_size=2))
        found = reduced(group.update(batch))
        assert (found["loss"], found["norm"]) == (len(column.values), 3.0)
        assert 1 <= found["perf/imbalance/actor"] < 1.5


def test_the_next_mini_batch_is_sent_before_the_last_is_answered() -> None:
    rows = rows_of(8, 0)
    column = Ragged(torch.ones(int(rows.response_lengths.sum())), rows.response_lengths)
    batch = PolicyBatch(rows, column, column, column, None)
    group, _, pool = train_group(1, 1, 2, Batching(micro_batch_size=2))
    told: list[str] = []

    class Telling(LocalPool):
        def submit(self, *call: Any) -> Answers:
            told.append("sent")
            return pool.submit(*call)

        def wait(self, calls: Sequence[Answers]) -> list[list[Any]]:
            told.append("awaited")
            return pool.wait(calls)

    group.pool = Telling(2, lambda rank, method, args: None)
    parts = [batch.select(range(start, start + 2)) for start in range(0, 8, 2)]
    found = [reduced(metrics)["loss"] for metrics in group.updates(parts)]
    assert found == [float(part.weights.total) for part in parts]
    both = ["sent", "sent"]  # the two parts
    assert told == [*both, *both, "awaited", *both, "awaited", *both, "awaited", "awaited"]
    assert group.updates([]) == []


def test_checkpoints_are_asked_of_every_rank() -> None:
    pool = LocalPool(4, lambda rank, method, args: ())
    ranks = MegatronRanks(2, 1, 2, 1)
    one = Batching(micro_batch_size=1)
    group = TrainGroup(pool, "critic", ranks, one, one, 64)
    group.save(Path("folder"))
    group.load(Path("folder"))
    assert pool.calls == [
        (rank, "critic", method, (Path("folder"),))
        for method in ("save", "load")
        for rank in range(4)
    ]


def test_a_file_that_only_a_rank_can_see_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "seen").touch()
    pool = LocalPool(2, lambda rank, method, args: ("seen", "elsewhere")[: rank + 1])
    one = Batching(micro_batch_size=1)
    group = TrainGroup(pool, "actor", MegatronRanks(2, 1, 1, 1), one, one, 64)
    with pytest.raises(OSError, match=r"rank 1 wrote elsewhere .* all nodes share"):
        group.save(tmp_path)


def answer_prompts(tp: int) -> Callable[..., Any]:
    def answer(rank: int, method: str, args: tuple[Any, ...]) -> Any:
        requests, sampling = args
        groups = [
            tuple(
                Sample(uid, ids, (rank // tp, k), (0.0, 0.0), "", "stop", 0)
                for k in range(sampling.n)
            )
            for uid, ids in requests
        ]
        return groups if rank % tp == 0 else None

    return answer


def prompts(count: int) -> list[Prompt]:
    return [Prompt(f"row{i}", (i, i + 1), "", "test", None, {}) for i in range(count)]


@pytest.mark.parametrize(("count", "world", "tp"), [(3, 8, 1), (0, 2, 1), (7, 8, 2), (64, 6, 2)])
def test_every_prompt_is_answered_once_in_order(count: int, world: int, tp: int) -> None:
    pool = LocalPool(world, answer_prompts(tp))
    groups = RolloutGroup(pool, tp, spread).generate(prompts(count), SAMPLING)
    assert [group[0].uid for group in groups] == [f"row{i}" for i in range(count)]
    assert all(len(group) == 2 and group[0].uid == group[1].uid for group in groups)
    assert [rank for rank, *_ in pool.calls] == list(range(world))  # idle replicas too
    loads = [sum(g[0].response_ids[0] == r for g in groups) for r in range(world // tp)]
    assert max(loads) - min(loads) <= 1


def test_ranks_of_one_replica_get_the_same_prompts() -> None:
    pool = LocalPool(6, answer_prompts(2))
    RolloutGroup(pool, 2, spread).generate(prompts(10), SAMPLING)
    requests = [args[0] for *_, args in pool.calls]
    assert requests[0::2] == requests[1::2]
