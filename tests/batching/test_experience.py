"""From samples to optimizer steps: nothing added to a response, no step without a token."""

from __future__ import annotations

import random

import pytest
import torch

from mrl.algorithms.losses import AGGREGATIONS
from mrl.algorithms.masks import loss_mask
from mrl.batching.experience import Experience, Splits, collect, policy_batches, value_batches
from mrl.types import Ragged, Sample

EOS = 1


def sample(uid: str, prompt: int, response: list[int], reason: str = "stop") -> Sample:
    log_probs = [-0.5 - token for token in response]
    return Sample(uid, tuple(range(2, 2 + prompt)), response, log_probs, "", reason, 0)


def draw(seed: int, groups: int = 6, n: int = 4) -> list[tuple[Sample, ...]]:
    rng = random.Random(seed)
    return [
        tuple(
            sample(
                f"p{g}", rng.randint(1, 9), [rng.randint(2, 40) for _ in range(rng.randint(0, 7))]
            )
            for _ in range(n)
        )
        for g in range(groups)
    ]


@pytest.mark.parametrize("response", [[5, 6, EOS], [5, 6, 7, 8], [EOS], [5, EOS, EOS, 6], []])
def test_a_response_is_trained_as_it_was_drawn(response: list[int]) -> None:
    """A cut one gets no stop token, a stop token within one ends nothing."""
    batch = collect([(sample("a", 3, response, "length"), sample("a", 3, [9, 9, 9, 9, 9]))])
    assert batch.sequences.tokens.rows()[0].tolist() == [2, 3, 4, *response]
    assert batch.sequences.response_lengths.tolist() == [len(response), 5]
    assert batch.mask.rows()[0].tolist() == [True] * len(response)
    assert batch.rollout_log_probs.rows()[0].tolist() == [-0.5 - t for t in response]


@pytest.mark.parametrize("seed", range(5))
def test_rows_keep_the_order_of_prompts_and_samples(seed: int) -> None:
    groups = draw(seed)
    batch = collect(groups)
    flat = [s for group in groups for s in group]
    assert batch.uids == tuple(s.uid for s in flat)
    rows = zip(batch.sequences.tokens.rows(), flat, strict=True)
    assert all(row.tolist() == [*s.prompt_ids, *s.response_ids] for row, s in rows)


def batches(kind: str, experience: Experience, live: Ragged, mode: str, splits: Splits):
    column = experience.rollout_log_probs
    if kind == "value":
        return list(value_batches(experience, splits, live, mode, column, column))
    return list(policy_batches(experience, splits, live, mode, column, column, None))


@pytest.mark.parametrize("kind", ["policy", "value"])
@pytest.mark.parametrize("mode", sorted(AGGREGATIONS))
def test_an_optimizer_step_without_a_live_token_is_not_taken(kind: str, mode: str) -> None:
    """Adam would move by its momentum and its decay, were it asked."""
    experience = collect(draw(3))
    splits = Splits(rows=8, epochs=2, shuffle=False, seed=0)
    rows = torch.arange(24)
    dead = {"none": rows < 0, "second": (rows >= 8) & (rows < 16), "all": rows >= 0}
    for name, steps in (("none", 6), ("second", 4), ("all", 0)):
        live = loss_mask(experience.mask, ~dead[name])
        found = batches(kind, experience, live, mode, splits)
        assert len(found) == steps, name
        assert all(batch.weights.values.any() for batch in found)


@pytest.mark.parametrize("kind", ["policy", "value"])
@pytest.mark.parametrize("shuffle", [False, True])
def test_weights_of_a_step_count_its_own_tokens_alone(kind: str, shuffle: bool) -> None:
    experience = collect(draw(4))
    alive = torch.tensor([i % 3 != 0 for i in range(24)])
    live = loss_mask(experience.mask, alive)
    splits = Splits(rows=10, epochs=2, shuffle=shuffle, seed=5)  # the last step has four rows
    order = [row for rows in splits(24) for row in rows]
    assert sorted(order) == sorted([*range(24)] * 2)
    found = batches(kind, experience, live, "token-mean", splits)
    for batch, rows in zip(found, splits(24), strict=True):
        tokens = sum(len(experience.samples[i].response_ids) for i in rows if alive[i])
        weights = batch.weights.values
        assert weights[weights > 0].tolist() == pytest.approx([1 / tokens] * tokens)
        assert batch.sequences.response_lengths.tolist() == [
            len(experience.samples[i].response_ids) for i in rows
        ]
