from __future__ import annotations

import math

import pytest
import torch

from mrl.algorithms.kl import (
    KL_ESTIMATORS,
    AdaptiveKLController,
    FixedKLController,
    kl_column,
    kl_controller,
    kl_estimate,
    mean_kl,
)
from mrl.config.schema import KLControlConfig
from mrl.types import Ragged

ONE = torch.ones(1, dtype=torch.bool)


def estimate(log_ratio: float, kind: str) -> float:
    """KL of a token whose reference log-prob exceeds the policy's by `log_ratio`."""
    return kl_estimate(torch.zeros(1), torch.tensor([log_ratio]), ONE, kind).item()


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("k1", -0.1), ("abs", 0.1), ("k2", 0.005), ("k3", math.exp(0.1) - 1.1)],
)
def test_estimators_have_their_textbook_values(kind: str, expected: float):
    assert estimate(0.1, kind) == pytest.approx(expected, rel=1e-5)


def test_k3_of_a_tenth():
    assert estimate(0.1, "k3") == pytest.approx(0.0051709, abs=1e-7)


@pytest.mark.parametrize(("short", "verl"), [("k1", "kl"), ("k2", "mse"), ("k3", "low_var_kl")])
def test_both_spellings_name_one_estimator(short: str, verl: str):
    assert KL_ESTIMATORS[short] is KL_ESTIMATORS[verl]


@pytest.mark.parametrize("kind", sorted(KL_ESTIMATORS))
@pytest.mark.parametrize("log_ratio", [100.0, -100.0, 1e4, -1e4])
def test_value_and_gradient_are_finite_at_extreme_log_ratios(kind: str, log_ratio: float):
    log_probs = torch.zeros(1, requires_grad=True)
    kl = kl_estimate(log_probs, torch.tensor([log_ratio]), ONE, kind)
    kl.sum().backward()
    assert torch.isfinite(kl).all()
    assert torch.isfinite(log_probs.grad).all()


@pytest.mark.parametrize("kind", sorted(KL_ESTIMATORS))
def test_masked_tokens_are_zero_whatever_lies_there(kind: str):
    mask = Ragged(torch.tensor([True, False, False]), torch.tensor([2, 1]))
    column = mask.with_values(torch.tensor([-1.0, float("nan"), float("inf")]))
    kl = kl_column(column, mask.with_values(torch.tensor([-1.5, 0.0, 0.0])), mask, kind)
    assert kl.values[1:].tolist() == [0.0, 0.0]
    assert kl.values[0] != 0.0


def test_an_unknown_estimator_is_refused():
    with pytest.raises(ValueError, match="'k4' is none of"):
        estimate(0.1, "k4")


def test_mean_kl_averages_tokens_then_responses_that_have_any():
    mask = Ragged(torch.tensor([True, True, True, False]), torch.tensor([2, 1, 1]))
    kl = mask.with_values(torch.tensor([1.0, 3.0, 4.0, float("nan")]))
    assert mean_kl(kl, mask) == 3.0
    nothing = mask.with_values(torch.zeros(4, dtype=torch.bool))
    assert mean_kl(kl, nothing) == 0.0


def test_the_fixed_controller_stays():
    controller = kl_controller(KLControlConfig(kl_coef=0.02))
    assert controller == FixedKLController(0.02)
    assert controller.update(9.0, 1000).coef == 0.02


def test_the_adaptive_controller_moves_towards_its_target_in_bounded_steps():
    controller = kl_controller(KLControlConfig("adaptive", 0.1, horizon=1000, target_kl=0.5))
    assert controller == AdaptiveKLController(0.1, 0.5, 1000)
    assert controller.update(0.55, 100).coef == pytest.approx(0.1 * (1 + 0.1 * 0.1))
    assert controller.update(50.0, 100).coef == pytest.approx(0.1 * 1.02)
    assert controller.update(0.0, 100).coef == pytest.approx(0.1 * 0.98)
    assert controller.coef == 0.1  # frozen


def test_a_resumed_controller_continues_where_it_was():
    config = KLControlConfig("adaptive", 0.1, horizon=100, target_kl=0.5)
    straight = kl_controller(config).update(1.0, 64).update(0.2, 64)
    saved = kl_controller(config).update(1.0, 64).coef
    assert kl_controller(config).with_coef(saved).update(0.2, 64) == straight


def test_an_unknown_controller_is_refused():
    with pytest.raises(ValueError, match=r"kl_ctrl\.type is 'pid'"):
        kl_controller(KLControlConfig("pid"))
