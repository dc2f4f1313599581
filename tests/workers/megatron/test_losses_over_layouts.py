"""GRPO's and PPO's losses in every aggregation mode, over layouts and odd batches."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mrl.algorithms.losses import AGGREGATIONS, loss_counts, token_weights
from mrl.algorithms.masks import full_mask
from mrl.algorithms.reductions import reduced
from mrl.config.schema import MegatronConfig
from mrl.types import Batching, Ragged, Sequences
from tests.ranks import Ranks
from tests.workers.jobs import (
    LENGTHS,
    RESPONSES,
    TWO_ROWS,
    both,
    group,
    layout,
    policy_batch,
    sequences,
    value_batch,
)

# odd lengths; three rows, of which some ranks have none
BATCHES = {"odd": sequences(), "few": sequences(LENGTHS[:3], RESPONSES[:3])}
MASKS = ("all", "one-token")
LAYOUTS = {
    "dp2": (2, layout(), TWO_ROWS),
    "dp4-by-tokens": (4, layout(), Batching(max_tokens=24)),
    "cp2": (2, layout(context_parallel_size=2), TWO_ROWS),
    "tp2-pp2": (4, layout(tp=2, pp=2), TWO_ROWS),
}
Found = dict[tuple[str, str, str], dict[str, float]]


def live(rows: Sequences, mask: str) -> Ragged:
    """Say which response tokens count."""
    every = full_mask(rows.response_lengths)
    if mask == "all":
        return every
    one = torch.zeros_like(every.values)
    one[len(one) // 2] = True
    return every.with_values(one)


def learn(ranks: Ranks, world: int, path: Path, where: MegatronConfig, cut: Batching) -> Found:
    """Take a step of both losses for every batch, mask and mode; give what they report."""
    spec, found = both(path, where), {}
    # no change of the weights: every case starts from the same model
    still = replace(spec.actor.optim, lr=0.0, min_lr=0.0)
    spec = replace(
        spec,
        actor=replace(spec.actor, optim=still),
        critic=replace(spec.critic, optim=still),
    )
    with ranks.job(world, spec) as pool:
        actor, critic = group(pool, spec.actor, cut), group(pool, spec.critic, cut)
        for name, rows in BATCHES.items():
            log_probs, values = actor.log_probs(rows)[0], critic.values(rows)
            for mask in MASKS:
                for mode in sorted(AGGREGATIONS):
                    kept = live(rows, mask)
                    weights = token_weights(kept, mode, *loss_counts(kept), 7)
                    policy = replace(policy_batch(rows, log_probs), weights=weights)
                    value = replace(value_batch(rows, values), weights=weights)
                    found[name, mask, mode] = {
                        **reduced(actor.update(policy)),
                        **reduced(critic.update(value)),
                    }
    return found


@pytest.fixture(scope="module")
def alone(ranks: Ranks, qwen2: Path) -> Found:
    return learn(ranks, 1, qwen2, layout(), TWO_ROWS)


@pytest.mark.parametrize(
    "case",
    [
        "dp4-by-tokens",
        "cp2",
        *(pytest.param(case, marks=pytest.mark.slow) for case in ("dp2", "tp2-pp2")),
    ],
)
def test_losses_in_every_aggregation_mode_are_those_of_one_rank(
    case: str, ranks: Ranks, qwen2: Path, alone: Found
) -> None:
    world, where, cut = LAYOUTS[case]
    found = learn(ranks, world, qwen2, where, cut)
    assert found.keys() == alone.keys()
    for key, wanted in alone.items():
        for name, value in wanted.items():
            if not name.startswith("perf/"):
                assert found[key][name] == pytest.approx(value, rel=1e-5, abs=1e-7), (key, name)


def test_the_modes_differ_and_every_loss_counts(alone: Found) -> None:
    for batch in BATCHES:
        losses = {alone[batch, "all", mode]["actor/pg_loss"] for mode in AGGREGATIONS}
        assert len(losses) == len(AGGREGATIONS)
    for found in alone.values():
        assert found["actor/grad_norm"] > 0 < found["critic/grad_norm"]
