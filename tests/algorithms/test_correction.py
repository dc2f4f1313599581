"""Weights and rejections between engine and trainer, on numbers worked by hand."""

from __future__ import annotations

import math

import pytest
import torch

from mrl.algorithms.correction import LEVELS, STATISTICS, correct, factors
from mrl.algorithms.masks import full_mask, loss_mask
from mrl.config import bounds
from mrl.config.bounds import Correction, Rejection, parse_bounds, parse_rejections
from mrl.types import Ragged

LENGTHS = torch.tensor([2, 1, 0, 3])
RATIOS = [2.0, 0.5, 4.0, 0.25, 1.0, 8.0]  # trainer / engine; products 1, 4, 2
PREFIX = "rollout_corr/rollout_"


def columns(ratios: list[float] = RATIOS) -> tuple[Ragged, Ragged, Ragged]:
    """Give the trainer's log-probs, the engine's and the mask."""
    mask = full_mask(LENGTHS)
    engine = torch.full((len(ratios),), -1.0)
    return mask.with_values(engine + torch.tensor(ratios).log()), mask.with_values(engine), mask


def weights(level: str, low: float | None, high: float, normalize: bool = False):
    correction = Correction(level, low, high, normalize, ())
    return correct(*columns(), correction)


def test_every_statistic_and_level_of_the_config_is_here() -> None:
    assert tuple(STATISTICS) == bounds.STATISTICS and tuple(LEVELS) == bounds.LEVELS


def test_token_weights_are_ratios_truncated_above() -> None:
    found = weights("token", None, 2.0)
    assert found.weights.values.tolist() == pytest.approx([2, 0.5, 2, 0.25, 1, 2])
    metrics = found.metrics
    assert metrics[f"{PREFIX}is_mean"] == pytest.approx(7.75 / 6)
    assert metrics[f"{PREFIX}is_eff_sample_size"] == pytest.approx((7.75 / 6) ** 2 / (13.3125 / 6))
    assert (metrics[f"{PREFIX}is_max"], metrics[f"{PREFIX}is_min"]) == pytest.approx((2, 0.25))


def test_between_two_bounds_a_weight_outside_is_zero() -> None:
    found = weights("token", 0.4, 4.1)
    assert found.weights.values.tolist() == pytest.approx([2, 0.5, 4, 0, 1, 0])
    assert found.metrics[f"{PREFIX}is_oob_ratio"] == pytest.approx(1 / 3)
    assert torch.equal(found.live.values, torch.ones(6, dtype=torch.bool))  # the mask stays


def test_sequence_weights_are_products() -> None:
    found = weights("sequence", None, 3.0)
    assert found.weights.values.tolist() == pytest.approx([1, 1, 3, 2, 2, 2], rel=1e-5)


@pytest.mark.parametrize(("level", "mean"), [("token", 7.75 / 6), ("sequence", (1 + 2 + 2) / 3)])
def test_normalised_weights_have_mean_one(level: str, mean: float) -> None:
    plain, found = weights(level, None, 2.0), weights(level, None, 2.0, normalize=True)
    assert found.metrics[f"{PREFIX}is_batch_norm_factor"] == pytest.approx(mean, rel=1e-5)
    wanted = (plain.weights.values / mean).tolist()
    assert found.weights.values.tolist() == pytest.approx(wanted, rel=1e-5)


KEPT = {
    # log 2 = 0.693: k1 = -log r is that of engine / trainer
    ("token_k1", "0.4_2.5"): [1, 1, 0, 0, 1, 0],
    ("token_k1", "2.5"): [1, 1, 0, 0, 1, 0],
    ("token_k1", "0.2_1.1"): [1, 0, 1, 0, 1, 0],
    # 0.5 log(r)^2: 0.240, 0.240, 0.961, 0.961, 0, 2.162
    ("token_k2", "1.0"): [1, 1, 1, 1, 1, 0],
    # r - 1 - log r: 0.307, 0.193, 1.614, 0.636, 0, 4.921
    ("token_k3", "0.5"): [1, 1, 0, 0, 1, 0],
    # sums of -log r: 0, -1.386, -0.693; of k3: 0.5, 1.614, 5.557; of k2: 0.480, 0.961, 3.123
    ("seq_sum_k1", "0.4_2.5"): [1, 1, 0, 1, 1, 1],
    ("seq_sum_k2", "0.5"): [1, 1, 0, 0, 0, 0],
    ("seq_sum_k3", "2.0"): [1, 1, 1, 0, 0, 0],
    # means: of -log r 0, -1.386, -0.231; of k3 0.25, 1.614, 1.852; largest of k3 0.307, 1.614, 4.92
    ("seq_mean_k1", "0.4_2.5"): [1, 1, 0, 1, 1, 1],
    ("seq_mean_k2", "0.99"): [1, 1, 1, 0, 0, 0],
    ("seq_mean_k3", "1.7"): [1, 1, 1, 0, 0, 0],
    ("seq_max_k2", "0.5"): [1, 1, 0, 0, 0, 0],
    ("seq_max_k3", "2.0"): [1, 1, 1, 0, 0, 0],
}


@pytest.mark.parametrize(("name", "bound"), KEPT)
def test_a_rejection_keeps_what_its_statistic_allows(name: str, bound: str) -> None:
    wanted = [bool(x) for x in KEPT[name, bound]]
    correction = Correction(None, None, 2.0, False, parse_rejections(name, bound))
    found = correct(*columns(), correction)
    assert found.live.values.tolist() == wanted and found.weights is None
    lost = sum(not keep for keep in wanted) / 6
    assert found.metrics[f"{PREFIX}rs_masked_fraction"] == pytest.approx(lost)
    trainer, engine, mask = columns()
    shares = factors(trainer.values - engine.values, mask.values, LENGTHS, correction)
    assert shares.tolist() == [float(keep) for keep in wanted]


def test_every_rejection_has_an_example() -> None:
    assert {name for name, _ in KEPT} == set(bounds.REJECTIONS)


def test_several_rejections_must_all_be_passed() -> None:
    rules = parse_rejections("token_k2,seq_sum_k1", "1.0,0.4_2.5")
    found = correct(*columns(), Correction(None, None, 2.0, False, rules))
    assert found.live.values.tolist() == [True, True, False, True, True, False]
    metrics = found.metrics
    assert metrics[f"{PREFIX}rs_seq_masked_fraction"] == pytest.approx(2 / 3)
    assert metrics[f"{PREFIX}rs_token_k2_masked_fraction"] == pytest.approx(1 / 6)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("planted", [math.nan, math.inf, -math.inf])
def test_masked_tokens_are_not_read(level: str, planted: float) -> None:
    trainer, engine, mask = columns()
    live = loss_mask(mask, torch.tensor([True, True, True, False]))
    rules = parse_rejections(",".join(bounds.REJECTIONS), "2.0")
    spoiled = trainer.with_values(torch.where(live.values, trainer.values, torch.tensor(planted)))
    correction = Correction(level, 0.5, 2.0, False, rules)
    clean, found = (correct(t, engine, live, correction) for t in (trainer, spoiled))
    assert torch.equal(found.weights.values, clean.weights.values)
    assert torch.equal(found.live.values, clean.live.values)
    assert found.metrics == clean.metrics
    assert not found.live.values[3:].any() and not found.weights.values[3:].any()


@pytest.mark.parametrize("level", [None, "token", "sequence"])
def test_on_policy_nothing_is_changed(level: str | None) -> None:
    rules = parse_rejections(",".join(bounds.REJECTIONS), "1.5")
    found = correct(*columns([1.0] * 6), Correction(level, None, 2.0, False, rules))
    assert found.live.values.all()
    assert found.weights is None or found.weights.values.tolist() == [1.0] * 6


@pytest.mark.parametrize("level", [None, "token", "sequence"])
def test_a_split_by_rows_changes_neither_weight_nor_rejection(level: str | None) -> None:
    rules = parse_rejections("token_k3,seq_mean_k1,seq_max_k2", "2.0")
    correction = Correction(level, None, 3.0, False, rules)
    noise = torch.Generator().manual_seed(3)
    lengths = torch.tensor([3, 0, 5, 1, 2])
    ratios = Ragged(torch.randn(11, generator=noise), lengths)
    whole = ratios.with_values(
        factors(ratios.values, torch.ones(11, dtype=torch.bool), lengths, correction)
    )
    for rows in ([4, 0], [1], [2, 3]):
        part = ratios.select(rows)
        live = torch.ones(part.total, dtype=torch.bool)
        found = factors(part.values, live, part.lengths, correction)
        assert found.tolist() == pytest.approx(whole.select(rows).values.tolist(), rel=1e-6)


def test_a_weight_makes_truncated_sampling_good() -> None:
    # p = .5 .3 .2 of which top_p .8 keeps two: the engine's 0.625 and 0.375
    p, q = torch.tensor([0.5, 0.3]), torch.tensor([0.625, 0.375])
    mask = full_mask(torch.tensor([1, 1]))
    correction = Correction("token", None, 2.0, False, ())
    found = correct(mask.with_values(p.log()), mask.with_values(q.log()), mask, correction)
    assert found.weights.values.tolist() == pytest.approx([0.8, 0.8])
    assert (q * found.weights.values).tolist() == pytest.approx(p.tolist())


@pytest.mark.parametrize(
    ("text", "wanted"), [("2.0", (None, 2.0)), ("0.5_5.0", (0.5, 5.0)), (" 3 ", (None, 3.0))]
)
def test_bounds_are_read_as_verl_writes_them(text: str, wanted: tuple[float | None, float]) -> None:
    assert parse_bounds(text) == wanted


@pytest.mark.parametrize("text", ["", "x", "-1", "2_1", "1_2_3", "0_1", "inf", "nan"])
def test_other_bounds_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"must be an upper bound|is above"):
        parse_bounds(text)


def test_a_k1_takes_a_ratio_and_a_k3_an_upper_bound() -> None:
    (k1,) = parse_rejections("seq_sum_k1", "2.0")
    assert k1 == Rejection("seq_sum_k1", -math.log(2), math.log(2))
    for names, bound in (("token_k3", "0.5_2.0"), ("token_k3", None), ("seq_max_k1", "2")):
        with pytest.raises(ValueError, match=r"upper bound alone|need one bound|is none of"):
            parse_rejections(names, bound)
