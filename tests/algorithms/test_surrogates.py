"""The policy losses: published formulas on numbers worked by hand, and any split of a batch."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from mrl.algorithms.losses import loss_counts, policy_loss, token_weights
from mrl.algorithms.masks import full_mask
from mrl.algorithms.surrogates import POLICY_LOSSES
from mrl.config.check_values import CHOICES

CLIPS = (0.2, 0.28, 3.0)
LENGTHS = torch.tensor([2, 1])


def run(mode: str, ratios: list[float], advantages: list[float], weights: list[float], logp=-0.5):
    """Give the loss, the gradient of each log-prob, and what was clipped."""
    log_probs = torch.full((len(ratios),), logp, requires_grad=True)
    old = log_probs.detach() - torch.tensor(ratios).log()
    out = policy_loss(
        log_probs, old, torch.tensor(advantages), torch.tensor(weights), *CLIPS, mode, LENGTHS
    )
    out.loss.backward()
    return out.loss.item(), log_probs.grad.tolist(), (int(out.clipped), int(out.clipped_lower))


def test_the_config_knows_every_loss() -> None:
    assert sorted(CHOICES["actor.policy_loss.loss_mode"]) == sorted(POLICY_LOSSES)


def test_gspo_has_one_ratio_a_response_the_geometric_mean() -> None:
    # sqrt(1.44 * 0.64) = 0.96, advantage 2; then 1.1, advantage -1
    loss, grad, clipped = run("gspo", [1.44, 0.64, 1.1], [2.0, 2.0, -1.0], [0.25, 0.25, 0.5])
    assert loss == pytest.approx(-2 * 0.96 / 2 + 1.1 / 2, rel=1e-5)
    # d/dlogp_t of -A s / (2 |y|) is -A s / (2 |y|): each token's share of the sequence's gradient
    assert grad == pytest.approx([-0.48, -0.48, 0.55], rel=1e-5)
    assert clipped == (0, 0)


def test_gspo_clips_all_tokens_of_a_response_or_none() -> None:
    # 1.3 is above 1.28 where the advantage is positive; 0.5 below 0.8 where it is negative
    loss, grad, clipped = run("gspo", [1.69, 1.0, 0.5], [1.0, 1.0, -1.0], [0.25, 0.25, 0.5])
    assert loss == pytest.approx(-1.28 / 2 + 0.8 / 2, rel=1e-5)
    assert grad == [0.0] * 3 and clipped == (3, 0)


def test_gspo_counts_live_tokens_alone() -> None:
    loss, grad, _ = run("gspo", [1.1, 9.0, 1.0], [1.0, 1.0, 0.0], [0.5, 0.0, 0.5])
    assert loss == pytest.approx(-0.55, rel=1e-5)
    assert grad == pytest.approx([-0.55, 0.0, 0.0], rel=1e-5)


def test_cispo_clips_the_weight_and_keeps_every_gradient() -> None:
    ratios, advantages = [1.5, 1.1, 0.5], [1.0, -1.0, 2.0]
    loss, grad, clipped = run("cispo", ratios, advantages, [0.5, 0.25, 0.25])
    # -sg(clip(r)) A log p: weights 1.28, 1.1, 0.8 of log p = -0.5
    assert loss == pytest.approx(0.5 * 1.28 * 0.5 - 0.25 * 1.1 * 0.5 + 0.25 * 0.8 * 2 * 0.5)
    assert grad == pytest.approx([-0.5 * 1.28, 0.25 * 1.1, -0.25 * 0.8 * 2], rel=1e-5)
    assert clipped == (2, 0)


def test_gpg_is_the_policy_gradient_as_it_is() -> None:
    loss, grad, clipped = run("gpg", [1.5, 0.1, 1.0], [1.0, -1.0, 2.0], [0.5, 0.25, 0.25])
    assert loss == pytest.approx(0.5 * 0.5 - 0.25 * 0.5 + 0.25 * 2 * 0.5)
    assert grad == pytest.approx([-0.5, 0.25, -0.5]) and clipped == (0, 0)


@pytest.mark.parametrize("mode", sorted(POLICY_LOSSES))
def test_on_policy_every_loss_has_the_policy_gradient(mode: str) -> None:
    _, grad, clipped = run(mode, [1.0] * 3, [2.0, 2.0, -1.0], [0.25, 0.25, 0.5])
    assert grad == pytest.approx([-0.5, -0.5, 0.5]) and clipped == (0, 0)


def rows(mode: str, order: list[list[int]]) -> tuple[float, list[float]]:
    """Sum the loss over micro-batches of rows; the gradient is that of each row's shift."""
    lengths = torch.tensor([1, 5, 3, 2, 4])
    mask = full_mask(lengths)
    noise = torch.Generator().manual_seed(0)
    total = mask.total
    log_probs, gaps, advantages = (torch.randn(total, generator=noise) for _ in range(3))
    columns = [mask.with_values(c) for c in (log_probs, log_probs + 0.3 * gaps, advantages)]
    shift = torch.zeros(5, requires_grad=True)
    loss = 0.0
    for micro in order:
        weights = token_weights(mask.select(micro), "seq-mean-token-mean", *loss_counts(mask))
        now, old, advantage = (c.select(micro).values for c in columns)
        own = lengths[micro]
        moved = now + shift[micro].repeat_interleave(own)
        out = policy_loss(moved, old, advantage, weights.values, *CLIPS, mode, own)
        out.loss.backward()
        loss += out.loss.item()
    return loss, shift.grad.tolist()


@pytest.mark.parametrize("mode", sorted(POLICY_LOSSES))
@pytest.mark.parametrize("order", [[[0], [1], [2], [3], [4]], [[3, 0], [4, 2, 1]]])
def test_neither_split_nor_order_changes_a_loss(mode: str, order: list[list[int]]) -> None:
    loss, grad = rows(mode, order)
    whole, whole_grad = rows(mode, [[0, 1, 2, 3, 4]])
    assert loss == pytest.approx(whole, rel=1e-5)
    assert grad == pytest.approx(whole_grad, rel=1e-4, abs=1e-7)


@pytest.mark.parametrize("mode", sorted(POLICY_LOSSES))
@pytest.mark.parametrize("factor", [0.0, 0.5, 3.0])
def test_a_weight_of_the_sample_is_a_factor_of_its_advantage(mode: str, factor: float) -> None:
    ratios, weights = [1.5, 0.6, 0.3], [0.3, 0.3, 0.4]
    loss, grad, _ = run(mode, ratios, [1.0, 1.0, -1.0], weights)
    scaled, scaled_grad, _ = run(mode, ratios, [factor, factor, -factor], weights)
    assert scaled == pytest.approx(factor * loss, rel=1e-5)
    assert scaled_grad == pytest.approx([factor * g for g in grad], rel=1e-5)


@pytest.mark.parametrize("mode", sorted(POLICY_LOSSES))
@pytest.mark.parametrize("planted", [math.nan, math.inf, -math.inf])
def test_what_lies_at_masked_positions_is_not_read(mode: str, planted: float) -> None:
    def found(filler: float) -> tuple[float, list[float]]:
        x, y, z = (torch.tensor([0.3, filler, 0.7]) * s for s in (1.0, 0.9, 1.1))
        x.requires_grad_()
        weights = torch.tensor([0.5, 0.0, 0.5])
        out = policy_loss(x, y, z, weights, *CLIPS, mode, LENGTHS)
        out.loss.backward()
        return out.loss.item(), x.grad.tolist()

    assert found(planted) == found(0.0)


@pytest.mark.parametrize("mode", sorted(POLICY_LOSSES))
@pytest.mark.parametrize("gap", [100.0, -100.0])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_extreme_ratios_stay_finite(mode: str, gap: float, advantage: float) -> None:
    log_probs: Tensor = torch.tensor([gap], requires_grad=True)
    one = torch.ones(1)
    out = policy_loss(log_probs, torch.zeros(1), advantage * one, one, *CLIPS, mode)
    out.loss.backward()
    assert torch.isfinite(out.loss) and torch.isfinite(log_probs.grad).all()
