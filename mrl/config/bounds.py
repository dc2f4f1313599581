"""Bounds written as text, as verl writes them: `2.0`, or `0.5_2.0` for a lower and an upper one."""

from __future__ import annotations

import math
from dataclasses import dataclass

from mrl.config.schema import RolloutCorrectionConfig

STATISTICS = ("k1", "k2", "k3")
LEVELS = ("token", "seq_sum", "seq_mean", "seq_max")
# the largest k1 of a response says nothing of its smallest one
REJECTIONS = tuple(
    f"{level}_{kind}"
    for level in LEVELS
    for kind in STATISTICS
    if (level, kind) != ("seq_max", "k1")
)


@dataclass(frozen=True, slots=True)
class Rejection:
    """A statistic of REJECTIONS, and the values of it that are kept."""

    name: str
    low: float
    high: float

    @property
    def level(self) -> str:
        """Say over what it is taken: a name in LEVELS."""
        return self.name.rpartition("_")[0]

    @property
    def statistic(self) -> str:
        """Say which of a token's numbers it is made of: a name in STATISTICS."""
        return self.name.rpartition("_")[2]


@dataclass(frozen=True, slots=True)
class Correction:
    """How the difference between engine and trainer is made good; plain numbers."""

    level: str | None  # of the importance weights: token | sequence
    low: float | None  # weights below it become 0, and so do those above high; None: truncate
    high: float
    normalize: bool  # divide by their mean over the batch
    rejections: tuple[Rejection, ...]

    @property
    def acts(self) -> bool:
        """Say whether anything is changed."""
        return self.level is not None or bool(self.rejections)


def parse_correction(config: RolloutCorrectionConfig) -> Correction:
    """Read the bounds of a config; raises ValueError as `parse_bounds` and `parse_rejections`."""
    low, high = parse_bounds(config.rollout_is_threshold)
    return Correction(
        config.rollout_is,
        low,
        high,
        config.rollout_is_batch_normalize,
        parse_rejections(config.rollout_rs, config.rollout_rs_threshold),
    )


def parse_bounds(text: str) -> tuple[float | None, float]:
    """Read `upper` or `lower_upper`; raises ValueError unless 0 < lower <= upper."""
    parts = text.strip().split("_")
    try:
        numbers = [float(part) for part in parts]
    except ValueError:
        numbers = []
    if not 1 <= len(numbers) <= 2 or not all(0 < n < math.inf for n in numbers):
        raise ValueError("must be an upper bound such as 2.0, or both such as 0.5_2.0")
    if sorted(numbers) != numbers:
        raise ValueError(f"the lower bound {numbers[0]:g} is above the upper one {numbers[1]:g}")
    return (numbers[0] if len(numbers) == 2 else None), numbers[-1]


def parse_rejections(names: str | None, bounds: str | None) -> tuple[Rejection, ...]:
    """Read statistics and one bound for all of them, or one for each, between commas.

    A bound of a k1 is that of the ratio engine / trainer, its logarithm: an upper one alone means
    its reciprocal as the lower one. Raises ValueError for anything else.
    """
    if names is None:
        return ()
    asked = list(dict.fromkeys(name.strip() for name in names.split(",") if name.strip()))
    unknown = [name for name in asked if name not in REJECTIONS]
    if unknown or not asked:
        raise ValueError(f"{', '.join(unknown) or 'nothing'} is none of {', '.join(REJECTIONS)}")
    texts = [text for text in (bounds or "").split(",") if text.strip()]
    if len(texts) not in (1, len(asked)):
        raise ValueError(f"{len(asked)} statistics need one bound, or one each; found {bounds}")
    texts = texts * len(asked) if len(texts) == 1 else texts
    return tuple(_rejection(name, text) for name, text in zip(asked, texts, strict=True))


def _rejection(name: str, text: str) -> Rejection:
    low, high = parse_bounds(text)
    if name.endswith("k1"):
        return Rejection(name, math.log(1 / high if low is None else low), math.log(high))
    if low is not None:
        raise ValueError(f"{name} is never negative and takes an upper bound alone; found {text}")
    return Rejection(name, -math.inf, high)
