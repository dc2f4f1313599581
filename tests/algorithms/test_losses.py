from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from mrl.algorithms.losses import (
    AGGREGATIONS,
    entropy_loss,
    kl_loss,
    loss_counts,
    policy_loss,
    token_weights,
    value_loss,
)
from mrl.algorithms.masks import full_mask, loss_mask
from mrl.algorithms.reductions import merge, reduced
from mrl.types import Ragged

CLIPS = {"clip_low": 0.2, "clip_high": 0.28, "clip_c": 3.0}
MODES = sorted(AGGREGATIONS)


def mask_of(*lengths: int) -> Ragged:
    return full_mask(torch.tensor(lengths))


def tensors(count: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    log_probs = -torch.rand(count, generator=generator)
    old = log_probs + 0.4 * torch.randn(count, generator=generator)
    return log_probs, old, torch.randn(count, generator=generator)


def loss_and_grad(rows: list[list[int]], lengths: list[int], mode: str):
    """Sum the loss over micro-batches of rows; the gradient is that of a shared scale."""
    mask = mask_of(*lengths)
    tokens, sequences = loss_counts(mask)
    columns = [mask.with_values(c) for c in tensors(sum(lengths))]
    scale = torch.tensor(1.0, requires_grad=True)
    total = 0.0
    for micro in rows:
        part = mask.select(micro)
        if not micro:
            part = part.with_values(part.values.bool())
        weights = token_weights(part, mode, tokens, sequences).values
        log_probs, old, advantages = (c.select(micro).values for c in columns)
        out = policy_loss(log_probs * scale, old, advantages, weights, **CLIPS)
        out.loss.backward()
        total += out.loss.item()
    return total, float(scale.grad)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "split",
    [[[0], [1], [2], [3], [4]], [[3, 0], [4, 2, 1]], [[0, 1, 2, 3], [4], []]],
    ids=["one by one", "uneven and shuffled", "with an empty micro-batch"],
)
def test_the_split_into_micro_batches_changes_neither_loss_nor_gradient(mode: str, split):
    lengths = [1, 7, 3, 2, 5]
    whole = loss_and_grad([[0, 1, 2, 3, 4]], lengths, mode)
    assert loss_and_grad(split, lengths, mode) == pytest.approx(whole, rel=1e-5)


def test_token_mean_weighs_every_token_alike_over_micro_batches():
    advantages = torch.tensor([1.0, -1, -1, -1])
    zeros = torch.zeros(4)
    total = 0.0
    for rows, span in (([0], slice(0, 1)), ([1], slice(1, 4))):
        weights = token_weights(mask_of(1, 3).select(rows), "token-mean", 4, 2).values
        total += policy_loss(zeros[span], zeros[span], advantages[span], weights, **CLIPS).loss
    assert float(total) == pytest.approx(0.5)


def test_token_mean_weighs_every_token_alike_over_ranks():
    five, one = (token_weights(mask_of(n), "token-mean", 6, 2).values for n in (5, 1))
    assert five.tolist() + one.tolist() == pytest.approx([1 / 6] * 6)


def test_sequence_modes_weigh_every_sequence_alike():
    mask = mask_of(1, 3)
    sums = token_weights(mask, "seq-mean-token-sum", 4, 2).values
    means = token_weights(mask, "seq-mean-token-mean", 4, 2).values
    scaled = token_weights(mask, "seq-mean-token-sum-norm", 4, 2, 8).values
    assert scaled.tolist() == pytest.approx([1 / 16] * 4)
    assert sums.tolist() == pytest.approx([0.5] * 4)
    assert means.tolist() == pytest.approx([0.5, 1 / 6, 1 / 6, 1 / 6])


@pytest.mark.parametrize("mode", MODES)
def test_a_row_without_tokens_is_no_sequence(mode: str):
    with_masked = loss_mask(mask_of(2, 4, 3), torch.tensor([True, False, True]))
    without = mask_of(2, 3)
    assert loss_counts(with_masked) == loss_counts(without) == (5, 2)
    live = token_weights(with_masked, mode, 5, 2).values[with_masked.values]
    assert torch.equal(live, token_weights(without, mode, 5, 2).values)


@pytest.mark.parametrize("mode", MODES)
def test_a_step_with_every_sample_masked_has_loss_and_gradient_exactly_zero(mode: str):
    mask = loss_mask(mask_of(2, 3), torch.tensor([False, False]))
    assert loss_counts(mask) == (0, 0)
    weights = token_weights(mask, mode, 0, 0).values
    log_probs = torch.full((5,), float("nan"), requires_grad=True)
    out = policy_loss(log_probs, log_probs.detach(), torch.ones(5), weights, **CLIPS)
    out.loss.backward()
    assert out.loss.item() == 0.0
    assert log_probs.grad.tolist() == [0.0] * 5
    assert reduced(out.metrics()) == {"actor/pg_loss": 0.0}


@pytest.mark.parametrize("mode", MODES)
def test_a_rank_with_every_sample_masked_leaves_the_other_rank_right(mode: str):
    masked_rank = loss_mask(mask_of(4), torch.tensor([False]))
    live_rank = mask_of(2, 3)
    tokens, sequences = (
        a + b for a, b in zip(loss_counts(masked_rank), loss_counts(live_rank), strict=True)
    )
    assert token_weights(masked_rank, mode, tokens, sequences).values.sum() == 0.0
    assert torch.equal(
        token_weights(live_rank, mode, tokens, sequences).values,
        token_weights(live_rank, mode, *loss_counts(live_rank)).values,
    )


def test_local_counts_in_place_of_global_ones_are_refused():
    with pytest.raises(ValueError, match="pass the sums over the whole step"):
        token_weights(mask_of(3, 3), "token-mean", 3, 1)


def test_an_unknown_mode_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="'mean', expected one of"):
        token_weights(mask_of(1), "mean", 1, 1)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope"),
    [
        (1.0, 2.0, -2.0, True),
        (1.1, 1.0, -1.1, True),
        (1.5, 1.0, -1.28, False),  # raised far enough
        (0.5, 1.0, -0.5, True),  # lowered though good: corrected
        (0.5, -1.0, 0.8, False),  # lowered far enough
        (1.5, -1.0, 1.5, True),  # raised though bad: corrected
        (5.0, -1.0, 3.0, False),  # dual clip
    ],
)
def test_policy_loss_is_the_dual_clipped_surrogate(ratio, advantage, loss, slope):
    log_probs = torch.tensor([math.log(ratio)], requires_grad=True)
    out = policy_loss(log_probs, torch.zeros(1), torch.tensor([advantage]), torch.ones(1), **CLIPS)
    out.loss.backward()
    assert out.loss.item() == pytest.approx(loss, rel=1e-6)
    expected = -advantage * ratio if slope else 0.0
    assert log_probs.grad.item() == pytest.approx(expected, rel=1e-6)


def test_policy_counts_are_sums_over_live_tokens():
    ratios = torch.tensor([1.0, 1.5, 0.5, 5.0, 9.0])
    advantages = torch.tensor([1.0, 1.0, -1.0, -1.0, -1.0])
    weights = torch.tensor([0.25, 0.25, 0.25, 0.25, 0.0])
    out = policy_loss(ratios.log(), torch.zeros(5), advantages, weights, **CLIPS)
    assert (out.num_tokens, out.clipped, out.clipped_lower) == (4, 2, 1)
    assert out.kl.item() == pytest.approx(-math.log(1.5 * 0.5 * 5.0), rel=1e-5)


def test_policy_metrics_of_parts_reduce_to_those_of_the_whole():
    log_probs, old, advantages = tensors(12)
    weights = torch.full((12,), 1 / 12)
    columns = (log_probs, old, advantages, weights)
    whole = policy_loss(*columns, **CLIPS).metrics()
    parts = [
        policy_loss(*(c[a:b] for c in columns), **CLIPS).metrics()
        for a, b in itertools.pairwise([0, 1, 9, 12])
    ]
    assert reduced(merge(parts)) == pytest.approx(reduced(whole), rel=1e-5)
    assert whole["actor/pg_clipfrac"].value > 0


def test_on_policy_ratio_is_one_and_nothing_is_clipped():
    log_probs, _, advantages = tensors(8)
    out = policy_loss(log_probs, log_probs, advantages, torch.full((8,), 1 / 8), **CLIPS)
    assert out.loss.item() == pytest.approx(-advantages.mean().item(), rel=1e-6)
    assert (out.clipped, out.clipped_lower, out.kl) == (0, 0, 0)


@pytest.mark.parametrize("gap", [100.0, -100.0])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_policy_loss_stays_finite_at_extreme_ratios(gap: float, advantage: float):
    log_probs = torch.tensor([gap], requires_grad=True)
    out = policy_loss(log_probs, torch.zeros(1), torch.tensor([advantage]), torch.ones(1), **CLIPS)
    out.loss.backward()
    assert torch.isfinite(out.loss)
    assert torch.isfinite(log_probs.grad).all()


def test_value_loss_is_half_the_larger_squared_error():
    values = torch.tensor([1.0, 2.0, 0.1], requires_grad=True)
    out = value_loss(values, torch.zeros(3), torch.tensor([3.0, 0.0, 0.1]), torch.ones(3) / 3, 0.5)
    out.loss.backward()
    assert out.loss.item() == pytest.approx(0.5 * (2.5**2 + 2.0**2 + 0.0) / 3)
    assert values.grad.tolist() == pytest.approx([0.0, 2 / 3, 0.0])
    assert (out.num_tokens, out.clipped) == (3, 1)
    assert out.predicted.item() == pytest.approx(3.1)
    assert reduced(out.metrics())["critic/vf_clipfrac"] == pytest.approx(1 / 3)


def test_entropy_and_kl_terms_are_weighted_sums():
    weights = torch.tensor([0.5, 0.25, 0.0])
    assert entropy_loss(torch.tensor([2.0, 4.0, 9.0]), weights).item() == 2.0
    log_probs, ref = torch.tensor([-1.0, -2.0, 0.0]), torch.tensor([-2.0, -2.0, -9.0])
    assert kl_loss(log_probs, ref, weights, "kl").item() == 0.5


@pytest.mark.parametrize("planted", [float("nan"), float("inf"), -float("inf"), 1e38])
@pytest.mark.parametrize("term", ["policy", "value", "entropy", "kl"])
def test_what_lies_at_masked_positions_reaches_neither_loss_nor_gradient(term: str, planted: float):
    weights = torch.tensor([0.5, 0.0, 0.5])

    def run(filler: float) -> tuple[float, list[float]]:
        x, y, z = (torch.tensor([0.3, filler, 0.7]) * s for s in (1.0, 0.9, 1.1))
        x.requires_grad_()
        loss = {
            "policy": lambda: policy_loss(x, y, z, weights, **CLIPS).loss,
            "value": lambda: value_loss(x, y, z, weights, 0.5).loss,
            "entropy": lambda: entropy_loss(x, weights),
            "kl": lambda: kl_loss(x, y, weights, "low_var_kl"),
        }[term]()
        loss.backward()
        return loss.item(), x.grad.tolist()

    assert run(planted) == run(0.0)
    assert run(planted)[1][1] == 0.0
