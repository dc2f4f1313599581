"""Two rounds of the same batch, number by number."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import inf, isnan, sqrt

from torch import Tensor

from mrl.check_layout.round import Round

_SCALARS = (
    ("actor", "actor/pg_loss", "loss"),
    ("actor", "actor/grad_norm", "grad norm"),
    ("critic", "critic/vf_loss", "value loss"),
    ("critic", "critic/grad_norm", "value grad norm"),
)
_COLUMNS = (
    ("log_probs", "log-probs", False),
    ("entropies", "entropy", False),
    ("values", "values", False),
    ("later_log_probs", "later log-probs", True),
    ("later_values", "later values", True),
)
_ROUNDINGS_A_LAYER = 8  # norms, projections, attention, activation, residual sums: each to 8 bits
# A layout may be so many times as far from float32 as one rank of its own dtype is.
_LARGEST_RATIO, _MEAN_RATIO = 3.0, 2.0


@dataclass(frozen=True, slots=True)
class Bounds:
    """How far a layout may be from the reference."""

    largest: float  # of an output, relative to the outputs' largest magnitude
    scalar: float  # of a loss or gradient norm, relative
    mean: float | None  # of an output's mean difference, as `largest`; None: not judged
    later: float  # times as much after an update, whose step comes from rounded gradients
    reason: str

    def describe(self, has_yardstick: bool = False) -> str:
        """Say in words how a layout is judged."""
        if self.scalar == inf:
            return ""
        if has_yardstick:
            return (
                "bounds (bfloat16): outputs 3 times as far from float32 at the largest, and 2 "
                "times in the mean, as those of one rank in bfloat16"
            )
        largest = "" if self.largest == inf else f"largest {self.largest:.0e}, "
        mean = "" if self.mean is None else f"mean {self.mean:.0e}, "
        return (
            f"bounds ({self.reason}): {largest}{mean}of an output's magnitude; losses and gradient "
            f"norms {self.scalar:.0e} relative; after an update {self.later:g} times as much"
        )


@dataclass(frozen=True, slots=True)
class Difference:
    """One number of a comparison."""

    name: str
    found: float  # absolute: the largest, or the mean
    relative: float  # what is judged
    bound: float

    @property
    def ok(self) -> bool:
        """Say whether it is within the bound; not a number is not."""
        return self.relative <= self.bound and self.relative < inf


@dataclass(frozen=True, slots=True)
class Comparison:
    """All numbers of one layout against the reference."""

    differences: tuple[Difference, ...]

    @property
    def ok(self) -> bool:
        """Say whether all are within their bounds."""
        return all(difference.ok for difference in self.differences)

    @property
    def worst(self) -> Difference:
        """Give the difference that is largest for its bound."""

        def excess(difference: Difference) -> float:
            part = difference.relative / difference.bound
            return inf if isnan(part) else part

        return max(self.differences, key=excess)

    def named(self, name: str) -> Difference | None:
        """Give a difference by name, None where there is none."""
        return next((d for d in self.differences if d.name == name), None)


def bounds_of(dtype: str, layers: int, has_experts: bool, fp8: bool = False) -> Bounds:
    """Give the bounds of a dtype on its own.

    float32: sums in another order differ by some units of 1.2e-7, which layers and steps carry on;
    a router's softmax carries more. bfloat16: a layer rounds to 8 bits some 8 times. Such errors,
    up to 2**-9 each, add up like a random walk: sqrt(8 L) * 2**-9 of an output's scale is one
    standard deviation, and the largest of many tokens lies several out; models that magnify small
    changes have more. A near tie of two experts may fall to either then, which moves a token's
    outputs by any amount: with experts the mean is judged, not the largest.
    """
    if dtype == "float32":
        bound = 1e-4 if has_experts else 1e-5
        return Bounds(bound, bound, None, 10.0, f"float32, {'experts' if has_experts else 'dense'}")
    noise = sqrt(_ROUNDINGS_A_LAYER * layers) * 2.0**-9 * (4 if fp8 else 1)
    reason = f"{'FP8' if fp8 else 'bfloat16'}: rounding of {layers} layers is about {noise:.1e}"
    largest = inf if has_experts else 12 * noise
    return Bounds(largest, 8 * noise, 3 * noise, 2.0, reason)


def compare(
    found: Round, reference: Round, bounds: Bounds, yardstick: Comparison | None = None
) -> Comparison:
    """Judge every number of a round against the reference's.

    With a `yardstick`, how far one rank in the layout's dtype is from the same reference, outputs
    are judged by that: at most 3 times its largest and 2 times its mean differences. A loss and a
    gradient norm are single draws, of tokens that weigh by exponentials of their log-probs: they
    may differ by an eighth of `bounds`, or 2 times the yardstick's mean log-prob difference.

    Raises ValueError for rounds of different batches or roles.
    """
    differences = (*_scalars(found, reference, bounds), *_columns(found, reference, bounds))
    if yardstick is not None:
        differences = tuple(_measured(d, yardstick, bounds) for d in differences)
    return Comparison(differences)


def _measured(difference: Difference, yardstick: Comparison, bounds: Bounds) -> Difference:
    name, own = difference.name, yardstick.named(difference.name)
    assert own is not None
    ratio = _MEAN_RATIO if name.startswith("mean ") else _LARGEST_RATIO
    is_output = any(label in name for _, label, _ in _COLUMNS)
    floor = 2.0**-9
    if not is_output:
        nats = yardstick.named("mean log-probs")
        floor = max(bounds.scalar / 8, _MEAN_RATIO * nats.found if nats else 0.0)
    return Difference(name, difference.found, difference.relative, max(ratio * own.relative, floor))


def _scalars(found: Round, reference: Round, bounds: Bounds) -> Iterator[Difference]:
    for role, key, name in _SCALARS:
        mine, theirs = getattr(found, role), getattr(reference, role)
        if len(mine) != len(theirs):
            raise ValueError(f"{role}: {len(mine)} updates against the reference's {len(theirs)}")
        for number, (metrics, wanted) in enumerate(zip(mine, theirs, strict=True)):
            difference = abs(metrics[key] - wanted[key])
            relative = difference / max(abs(wanted[key]), 1e-12)
            label = name if number == 0 else f"{name} of update {number + 1}"
            factor = bounds.later if number else 1.0
            yield Difference(label, difference, relative, factor * bounds.scalar)


def _columns(found: Round, reference: Round, bounds: Bounds) -> Iterator[Difference]:
    for field, name, is_later in _COLUMNS:
        mine, theirs = getattr(found, field), getattr(reference, field)
        if (mine is None) != (theirs is None):
            raise ValueError(f"{name} are there on one side alone")
        if mine is not None:
            yield from _column(name, mine, theirs, bounds, bounds.later if is_later else 1.0)


def _column(
    name: str, found: Tensor, wanted: Tensor, bounds: Bounds, factor: float
) -> Iterator[Difference]:
    if found.shape != wanted.shape:
        raise ValueError(
            f"{name}: {found.shape[0]} tokens against the reference's {wanted.shape[0]}"
        )
    gaps, scale = (found - wanted).abs(), max(float(wanted.abs().max()), 1e-12)
    largest = float(gaps.max())
    yield Difference(name, largest, largest / scale, factor * bounds.largest)
    if bounds.mean is not None:
        mean = float(gaps.mean())
        yield Difference(f"mean {name}", mean, mean / scale, factor * bounds.mean)


def outputs_alone(bounds: Bounds) -> Bounds:
    """Judge outputs before the updates only, as of a yardstick."""
    return replace(bounds, scalar=inf, later=inf)
