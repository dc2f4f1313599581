"""Responses that are told whole are those that vLLM tells token by token."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file

from mrl.resharding.families import ModelShape
from mrl.types import Sample, SamplingParams
from tests.ranks import Ranks
from tests.resharding import engines

LENGTH = 160  # the CPU backend caches blocks of 128 tokens: long rows take two
SAMPLING = SamplingParams(n=3, temperature=1.0, top_p=1.0, top_k=-1, max_tokens=40, stop=(), seed=3)
NEVER = ("no such text",)  # a stop string makes the engine look at every token


@dataclass(frozen=True)
class Drawn:
    """What an engine drew, and how."""

    groups: list[tuple[Sample, ...]]
    told: int  # outputs that the scheduler gave
    allocations: int
    preempted: int


def draw(engine: Any, sampling: SamplingParams, lengths: tuple[int, ...], alone: bool) -> Drawn:
    """Generate, with vLLM's own asking for cache blocks if `alone`."""
    scheduler = engine._scheduler
    manager = scheduler.kv_cache_manager
    requests = [(f"p{i}", tuple(2 + (i + k) % 48 for k in range(n))) for i, n in enumerate(lengths)]
    allocate = scheduler._allocate
    with (
        mock.patch.object(scheduler, "_allocate", side_effect=allocate) as allocations,
        mock.patch.object(
            manager, "allocate_slots", allocate if alone else scheduler._allocate_when_full
        ),
        mock.patch.object(
            scheduler, "_preempt_request", side_effect=scheduler._preempt_request
        ) as preempted,
        mock.patch.object(
            scheduler, "update_from_output", side_effect=scheduler.update_from_output
        ) as updates,
    ):
        told: list[int] = []
        update = updates.side_effect
        updates.side_effect = lambda *args: _counted(update(*args), told)
        torch.manual_seed(sampling.seed)
        groups = engine.generate(requests, sampling, 1)
    return Drawn(groups, sum(told), allocations.call_count, preempted.call_count)


def _counted(outputs: dict[int, Any], told: list[int]) -> dict[int, Any]:
    told += [len(entry.outputs) for entry in outputs.values()]
    return outputs


@contextmanager
def few_blocks(engine: Any, left: int | None) -> Iterator[None]:
    """Leave so many cache blocks to an engine that forgets its prefixes."""
    pool, taken = engine._scheduler.kv_cache_manager.block_pool, []
    forget = engine._forget_prefixes

    def forget_and_take() -> None:
        pool.free_blocks(taken)
        taken.clear()
        forget()
        if left is not None:
            taken.extend(pool.get_new_blocks(pool.get_num_free_blocks() - left))

    with mock.patch.object(engine, "_forget_prefixes", forget_and_take):
        yield
    pool.free_blocks(taken)


def compare(folder: Path) -> list[tuple[Drawn, Drawn]]:
    """Draw whole responses and the same token by token, with room and without."""
    from mrl.workers.rollout_vllm import VLLMEngine

    engine = VLLMEngine(engines.spec(folder, length=LENGTH), torch.device("cpu"))
    layout = engine.layout(ModelShape.from_folder(folder).tensors("float32"), 0)
    engines.write(engine, load_file(folder / "model.safetensors"), layout)
    found = []
    # the second with fewer blocks than the eight sequences at once come to need
    for lengths, left in (((3, 7, 20, 119, 126, 127, 128, 150), None), ((100, 110, 120, 127), 9)):
        with few_blocks(engine, left):
            whole = draw(engine, SAMPLING, lengths, alone=False)
            by_token = draw(engine, replace(SAMPLING, stop=NEVER), lengths, alone=True)
        found.append((whole, by_token))
    assert not engine._scheduler._open and not engine._scheduler.log_probs
    engine.close()
    return found


@pytest.fixture(scope="module")
def pairs(policy: Path, ranks: Ranks) -> list[tuple[Drawn, Drawn]]:
    (found,) = ranks.run(1, compare, folder=policy)
    return found


def test_whole_responses_equal_those_told_token_by_token(pairs: list[tuple[Drawn, Drawn]]) -> None:
    for whole, by_token in pairs:
        assert whole.groups == by_token.groups
        samples = [sample for group in whole.groups for sample in group]
        assert {sample.finish_reason for sample in samples} == {"stop", "length"}
        assert all(len(sample.log_probs) == len(sample.response_ids) for sample in samples)


def test_a_response_is_told_once(pairs: list[tuple[Drawn, Drawn]]) -> None:
    for whole, by_token in pairs:
        samples = [sample for group in whole.groups for sample in group]
        assert whole.told == len(samples)
        assert by_token.told == sum(len(sample.response_ids) for sample in samples)


def test_cache_blocks_are_asked_for_when_a_sequence_fills_its_own(
    pairs: list[tuple[Drawn, Drawn]],
) -> None:
    (whole, _), _ = pairs
    samples = [sample for group in whole.groups for sample in group]
    assert whole.preempted == 0
    # each prompt in at most two passes, each row over one end of a block at most
    assert len(samples) <= whole.allocations <= 3 * len(samples)


def test_sequences_that_lose_their_cache_go_on_where_they_were(
    pairs: list[tuple[Drawn, Drawn]],
) -> None:
    _, (whole, by_token) = pairs
    assert whole.preempted == by_token.preempted > 0
