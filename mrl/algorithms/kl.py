"""Per-token KL estimators and the controllers of the KL coefficient in the reward.

Estimators are those of Schulman, "Approximating KL Divergence" (2020), for tokens sampled from
the policy. They are finite, gradient included, for any finite log-probs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from torch import Tensor

from mrl.algorithms.masks import masked, masked_row_sums, tokens_per_row
from mrl.config.schema import KLControlConfig
from mrl.types import Ragged

Estimator = Callable[[Tensor, Tensor], Tensor]  # (policy, reference) log-probs [T] -> KL [T]

LOG_RATIO_LIMIT = 20.0  # exp overflows float32 above 88.7; verl's limit
LOW_VAR_KL_LIMIT = 10.0  # verl's limit of one token's k3


def k1(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """Estimate KL by the log-ratio: unbiased, may be negative."""
    return log_probs - ref_log_probs


def absolute(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """Give the absolute log-ratio."""
    return (log_probs - ref_log_probs).abs()


def k2(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """Estimate KL by half the squared log-ratio; its gradient is unbiased."""
    return 0.5 * (log_probs - ref_log_probs).square()


def k3(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """Estimate KL by r - 1 - log r, with r = reference / policy: unbiased, never negative.

    As in verl, log r is limited to +-20 and the estimate to 10. The limit comes before the
    exponential: after it, the value would be finite and the gradient 0 * inf.
    """
    log_ratio = (ref_log_probs - log_probs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return (log_ratio.exp() - log_ratio - 1).clamp(-LOW_VAR_KL_LIMIT, LOW_VAR_KL_LIMIT)


KL_ESTIMATORS: dict[str, Estimator] = {
    "k1": k1,
    "kl": k1,
    "abs": absolute,
    "k2": k2,
    "mse": k2,
    "k3": k3,
    "low_var_kl": k3,
}


def kl_estimate(log_probs: Tensor, ref_log_probs: Tensor, mask: Tensor, kind: str) -> Tensor:
    """Estimate the KL of each token, [T]; 0 where masked, whatever lies there.

    Raises:
        ValueError: the kind is unknown.
    """
    if kind not in KL_ESTIMATORS:
        raise ValueError(f"KL estimator {kind!r} is none of {sorted(KL_ESTIMATORS)}")
    return KL_ESTIMATORS[kind](masked(log_probs, mask), masked(ref_log_probs, mask))


def kl_column(log_probs: Ragged, ref_log_probs: Ragged, mask: Ragged, kind: str) -> Ragged:
    """Estimate the KL of each response token; 0 where masked."""
    return mask.with_values(kl_estimate(log_probs.values, ref_log_probs.values, mask.values, kind))


def mean_kl(kl: Ragged, mask: Ragged) -> float:
    """Average KL over tokens, then over responses that have any: what controllers steer by."""
    counts = tokens_per_row(mask)
    live = counts > 0
    if not bool(live.any()):
        return 0.0
    return float((masked_row_sums(kl, mask)[live] / counts[live]).mean())


class KLController(Protocol):
    """A coefficient and how it follows the observed KL; `coef` is all the state to save."""

    @property
    def coef(self) -> float: ...

    def update(self, current_kl: float, num_sequences: int) -> KLController:
        """Give the controller of the next step."""
        ...

    def with_coef(self, coef: float) -> KLController:
        """Resume at a saved coefficient."""
        ...


@dataclass(frozen=True, slots=True)
class FixedKLController:
    """A constant coefficient."""

    coef: float

    def update(self, current_kl: float, num_sequences: int) -> FixedKLController:
        """Stay."""
        return self

    def with_coef(self, coef: float) -> FixedKLController:
        """Stay: the coefficient is the config's."""
        return self


@dataclass(frozen=True, slots=True)
class AdaptiveKLController:
    """A coefficient steered towards a target KL (Ziegler et al. 2019, section 2.2)."""

    coef: float
    target_kl: float
    horizon: int  # sequences

    def update(self, current_kl: float, num_sequences: int) -> AdaptiveKLController:
        """Raise the coefficient where the KL is above the target, lower it below."""
        error = min(max(current_kl / self.target_kl - 1.0, -0.2), 0.2)
        return replace(self, coef=self.coef * (1.0 + error * num_sequences / self.horizon))

    def with_coef(self, coef: float) -> AdaptiveKLController:
        """Resume at a saved coefficient."""
        return replace(self, coef=coef)


KL_CONTROLLERS: dict[str, Callable[[KLControlConfig], KLController]] = {
    "fixed": lambda config: FixedKLController(config.kl_coef),
    "adaptive": lambda config: AdaptiveKLController(
        config.kl_coef, config.target_kl, config.horizon
    ),
}


def kl_controller(config: KLControlConfig) -> KLController:
    """Make the controller that a config names.

    Raises:
        ValueError: algorithm.kl_ctrl.type is unknown.
    """
    if config.type not in KL_CONTROLLERS:
        raise ValueError(
            f"algorithm.kl_ctrl.type is {config.type!r}, expected one of {sorted(KL_CONTROLLERS)}"
        )
    return KL_CONTROLLERS[config.type](config)
