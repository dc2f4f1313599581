from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from mrl.algorithms.masks import full_mask
from mrl.tracking.metrics import ScoredBatch, distributions, summarise_batch
from mrl.types import AtEnd, Ragged, Repeated, Score


def ragged(*rows: list) -> Ragged:
    return Ragged.from_rows([torch.tensor(row) for row in rows])


MASK = ragged([True, True, False], [True], [True, True])
ZEROS = MASK.with_values(torch.zeros(6))
BATCH = ScoredBatch(
    uids=("a", "b", "a"),
    scores=(Score(1.0, "ok", extra={"format": 0.5}), Score(None, "timeout"), Score(0.0, "ok")),
    prompt_lengths=(4, 8, 3),
    max_prompt_length=8,
    truncated=(True, False, False),
    mask=MASK,
    rollout_log_probs=ZEROS,
    old_log_probs=ZEROS,
    token_rewards=ragged([0.0, 1.0, math.nan], [0.0], [-0.25, -0.25]),
    advantages=ragged([2.0, 2.0, math.nan], [0.0], [-1.0, -1.0]),
    returns=ragged([1.0, 1.0, math.nan], [9.0], [0.0, 0.0]),
)


def test_names_are_those_of_verl():
    batch = dataclasses.replace(BATCH, values=BATCH.returns)
    names = set(summarise_batch(batch))
    for name in ("score", "rewards", "advantages", "returns", "values"):
        assert {f"critic/{name}/{kind}" for kind in ("mean", "max", "min")} <= names
    for name in ("response_length", "prompt_length"):
        assert {f"{name}/{kind}" for kind in ("mean", "max", "min", "clip_ratio")} <= names
    assert {"training/rollout_probs_diff_mean", "training/rollout_probs_diff_max"} <= names


def test_statistics_skip_unscored_rows_and_masked_tokens():
    metrics = summarise_batch(BATCH)
    assert metrics["critic/score/mean"] == 0.5
    assert metrics["critic/rewards/mean"] == 0.25
    assert metrics["critic/rewards/min"] == -0.5
    assert metrics["critic/advantages/mean"] == 0.5
    assert metrics["critic/returns/max"] == 1.0
    assert "critic/values/mean" not in metrics
    assert all(math.isfinite(value) for value in metrics.values())


def test_lengths_and_cut_responses():
    metrics = summarise_batch(BATCH)
    assert metrics["response_length/mean"] == 2.0
    assert metrics["response_length/clip_ratio"] == pytest.approx(1 / 3)
    assert metrics["prompt_length/max"] == 8.0
    assert metrics["prompt_length/clip_ratio"] == pytest.approx(1 / 3)


def test_unscored_samples_are_counted_by_cause():
    scores = (Score(None, "timeout"), Score(None, "error"), Score(math.nan, "ok"))
    metrics = summarise_batch(dataclasses.replace(BATCH, scores=scores))
    assert metrics["reward/timeouts"] == 1
    assert metrics["reward/errors"] == 1
    assert metrics["reward/unscored"] == 3
    assert "critic/score/mean" not in metrics


def test_further_reward_numbers_are_averaged_over_those_that_have_them():
    assert summarise_batch(BATCH)["reward/format/mean"] == 0.5


def test_group_sizes_are_shown():
    metrics = summarise_batch(BATCH)
    assert (metrics["group/size/max"], metrics["group/size/min"]) == (2.0, 0.0)
    assert metrics["group/zero_variance_ratio"] == 0.5


def test_engine_log_probs_of_a_truncated_distribution_show_their_bias():
    # p = [.5, .3, .2], top_p .8: the engine renormalises token 0 to .5 / .8
    engine = MASK.with_values(torch.full((6,), math.log(0.5 / 0.8)))
    trainer = MASK.with_values(torch.full((6,), math.log(0.5)))
    metrics = summarise_batch(
        dataclasses.replace(BATCH, rollout_log_probs=engine, old_log_probs=trainer)
    )
    assert engine.values[0].item() == pytest.approx(-0.4700, abs=1e-4)
    assert metrics["training/rollout_log_probs_diff_mean"] == pytest.approx(0.2231, abs=1e-4)
    assert metrics["training/rollout_log_probs_diff_max"] == pytest.approx(0.2231, abs=1e-4)
    assert metrics["training/rollout_probs_diff_mean"] == pytest.approx(0.125, abs=1e-6)


def test_explained_variance_is_one_for_a_perfect_critic():
    metrics = summarise_batch(dataclasses.replace(BATCH, values=BATCH.returns))
    assert metrics["critic/vf_explained_var"] == 1.0


def test_histograms_are_over_the_values_behind_the_means():
    old = MASK.with_values(torch.tensor([-1.0, -2, 9, -3, -4, -5]))
    found = distributions(dataclasses.replace(BATCH, old_log_probs=old))
    values = {name: torch.cat(list(chunks())).tolist() for name, chunks in found.items()}
    assert values == {
        "response_length": [3, 1, 2],
        "critic/score": [1.0, 0.0],
        "critic/advantages": [2.0, 2.0, -1.0, -1.0],
        "training/rollout_log_probs_diff": [-1.0, -2.0, -3.0, -4.0, -5.0],
    }
    assert [len(list(chunks())) for chunks in found.values()] == [1, 1, 1, 1]  # asked again
    bypassed = distributions(dataclasses.replace(BATCH, old_log_probs=None))
    assert "training/rollout_log_probs_diff" not in bypassed


@pytest.mark.parametrize("scored", [(True, True, True, True), (True, False, True, True)])
def test_columns_of_a_number_a_row_are_summarised_as_their_values(scored):
    lengths = torch.tensor([3, 0, 70_000, 2])
    noise = torch.Generator().manual_seed(0)
    columns = [Ragged(-torch.rand(int(lengths.sum()), generator=noise), lengths) for _ in range(2)]
    rows = torch.tensor([0.5, 7.0, -1.25, 2.0])
    short = dataclasses.replace(
        BATCH,
        uids=("a", "a", "b", "b"),
        scores=tuple(Score(float(i) if ok else None, "ok") for i, ok in enumerate(scored)),
        prompt_lengths=(1, 2, 3, 4),
        truncated=(False,) * 4,
        mask=full_mask(lengths),
        rollout_log_probs=columns[0],
        old_log_probs=columns[1],
        token_rewards=AtEnd(rows, lengths),
        advantages=Repeated(rows, lengths),
        returns=Repeated(rows, lengths),
    )
    names = ("mask", "token_rewards", "advantages", "returns")
    long = dataclasses.replace(
        short, **{name: Ragged(getattr(short, name).values, lengths) for name in names}
    )
    found, wanted = summarise_batch(short), summarise_batch(long)
    assert found.keys() == wanted.keys()
    assert found == pytest.approx(wanted, rel=1e-12)
    gaps = (columns[0].values.double() - columns[1].values.double()).abs()
    assert found["training/rollout_log_probs_diff_mean"] == pytest.approx(
        float(gaps.mean()), rel=1e-6
    )
    assert found["training/rollout_log_probs_diff_max"] == pytest.approx(
        float(gaps.max()), rel=1e-6
    )
    gaps = (columns[0].values.double().exp() - columns[1].values.double().exp()).abs()
    assert found["training/rollout_probs_diff_mean"] == pytest.approx(float(gaps.mean()), rel=1e-6)
    assert found["training/rollout_probs_diff_max"] == pytest.approx(float(gaps.max()), abs=1e-7)
