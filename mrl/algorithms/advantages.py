"""Advantage estimators: one signature, one registry.

Rows belong to a group by their prompt's uid, never by position or text. Rules that hold for all:

- an unscored row gets advantage 0 and does not enter its group's statistics;
- a row without unmasked tokens (an empty response, or one filtered out of the loss) keeps its
  bare score in its group's statistics: it still tells how hard the prompt is;
- a group whose scores are all equal gets exactly 0, and so does a group of one; where advantages
  are whitened over the batch afterwards, that 0 is one of the values;
- masked positions are never read and get 0.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from mrl.algorithms.masks import loss_mask, masked, masked_row_sums, spread, tokens_per_row
from mrl.config.schema import AlgorithmConfig
from mrl.types import AtEnd, Ragged, Repeated

GRPO_EPSILON = 1e-6  # added to the standard deviation, as in verl
WHITEN_EPSILON = 1e-8  # added to the variance, as in verl


@dataclass(frozen=True, slots=True)
class AdvantageInputs:
    """What is known of N responses after scoring; token columns are rows of R tokens."""

    uids: tuple[str, ...]  # [N] the prompt of each row
    scores: Tensor  # [N] float; not read where not scored
    scored: Tensor  # [N] bool
    mask: Ragged  # bool
    token_rewards: Ragged  # float: the score at the last real token, less any KL penalty
    values: Ragged | None  # float, of the critic
    baselines: Tensor | None = None  # [N] float: the score of the prompt's greedy response

    def __post_init__(self) -> None:
        rows = len(self.uids)
        if not (rows == self.scores.shape[0] == self.scored.shape[0] == len(self.mask)):
            raise ValueError(
                f"rows differ: {rows} uids, {self.scores.shape[0]} scores, "
                f"{self.scored.shape[0]} scored, {len(self.mask)} mask rows"
            )
        columns = {"token_rewards": self.token_rewards, "values": self.values}
        for name, column in columns.items():
            if column is not None and not torch.equal(column.lengths, self.mask.lengths):
                raise ValueError(f"{name} and mask have different row lengths")
        if not bool(torch.isfinite(self.scores[self.scored]).all()):
            bad = torch.nonzero(self.scored & ~torch.isfinite(self.scores)).flatten().tolist()
            raise ValueError(f"scored rows {bad} have no finite score; mark them unscored")


@dataclass(frozen=True, slots=True)
class AdvantageOutputs:
    """Advantages and returns of each response token, float32, 0 where masked."""

    advantages: Ragged
    returns: Ragged


Estimator = Callable[[AdvantageInputs, AlgorithmConfig], AdvantageOutputs]
ADVANTAGES: dict[str, Estimator] = {}


def register(name: str) -> Callable[[Estimator], Estimator]:
    """Enter an estimator under the name that algorithm.adv_estimator uses."""

    def enter(estimator: Estimator) -> Estimator:
        if name in ADVANTAGES:
            raise ValueError(f"advantage estimator {name!r} is already registered")
        ADVANTAGES[name] = estimator
        return estimator

    return enter


def compute_advantages(
    name: str, inputs: AdvantageInputs, config: AlgorithmConfig
) -> AdvantageOutputs:
    """Run the named estimator.

    Raises:
        ValueError: the name is unknown, or the estimator needs values and there are none.
    """
    if name not in ADVANTAGES:
        raise ValueError(
            f"algorithm.adv_estimator is {name!r}, expected one of {sorted(ADVANTAGES)}"
        )
    return ADVANTAGES[name](inputs, config)


@register("grpo")
def grpo(inputs: AdvantageInputs, config: AlgorithmConfig) -> AdvantageOutputs:
    """Compare each response with its group (Shao et al. 2024, DeepSeekMath, section 4.1).

    The standard deviation is the sample one (n - 1), as in verl; without it
    (algorithm.norm_adv_by_std_in_grpo=false) this is Dr. GRPO (Liu et al. 2025, section 3).
    """
    groups = group_statistics(inputs.uids, _outcomes(inputs), inputs.scored)
    _warn_singletons(groups)
    advantages = groups.centered
    if config.norm_adv_by_std_in_grpo:
        advantages = advantages / (groups.stds[groups.index] + GRPO_EPSILON)
    return _spread(advantages, inputs)


@register("rloo")
def rloo(inputs: AdvantageInputs, config: AlgorithmConfig) -> AdvantageOutputs:
    """Compare each response with the mean of the others (Ahmadian et al. 2024, section 3.3)."""
    groups = group_statistics(inputs.uids, _outcomes(inputs), inputs.scored)
    _warn_singletons(groups)
    sizes = groups.sizes[groups.index].double()
    # score - mean of the others = (score - mean of all) * n / (n - 1)
    return _spread(groups.centered * sizes / (sizes - 1).clamp(min=1), inputs)


@register("reinforce_plus_plus")
def reinforce_plus_plus(inputs: AdvantageInputs, config: AlgorithmConfig) -> AdvantageOutputs:
    """Whiten the returns over all tokens of the batch (Hu 2025, REINFORCE++, arXiv:2501.03262).

    A return is what a token and those after it are rewarded, discounted by algorithm.gamma.
    """
    mask = loss_mask(inputs.mask, inputs.scored)
    returns = _returns(inputs.token_rewards, mask, config.gamma)
    return AdvantageOutputs(whitened_column(returns, mask), returns)


@register("reinforce_plus_plus_baseline")
def reinforce_plus_plus_baseline(
    inputs: AdvantageInputs, config: AlgorithmConfig
) -> AdvantageOutputs:
    """Compare with the group's mean, then whiten over all tokens of the batch.

    REINFORCE++ with baseline (Hu 2025, arXiv:2501.03262): the spread is that of the batch, so
    that an easy prompt's rare failure is not blown up.
    """
    groups = group_statistics(inputs.uids, _outcomes(inputs), inputs.scored)
    _warn_singletons(groups)
    mask = loss_mask(inputs.mask, inputs.scored)
    centered = spread(groups.centered, mask)
    whitened = whitened_column(centered, mask)
    return AdvantageOutputs(whitened, whitened)


@register("remax")
def remax(inputs: AdvantageInputs, config: AlgorithmConfig) -> AdvantageOutputs:
    """Compare with the prompt's greedy response (Li et al. 2024, ReMax, arXiv:2310.10505).

    The returns are undiscounted, as published. Raises ValueError without baselines.
    """
    if inputs.baselines is None:
        raise ValueError("algorithm.adv_estimator 'remax' needs the scores of greedy responses")
    mask = loss_mask(inputs.mask, inputs.scored)
    returns = _returns(inputs.token_rewards, mask, 1.0)
    baselines = spread(inputs.baselines, mask)
    if isinstance(returns, Repeated) and isinstance(baselines, Repeated):
        numbers = returns.numbers - baselines.numbers
        return AdvantageOutputs(Repeated(numbers, mask.lengths), returns)
    return AdvantageOutputs(mask.with_values(returns.values - baselines.values), returns)


@register("opo")
def opo(inputs: AdvantageInputs, config: AlgorithmConfig) -> AdvantageOutputs:
    """Compare with the length-weighted mean of the group (Hao et al. 2025, OPO, arXiv:2505.23585).

    That mean has the least variance where the gradients of tokens are orthogonal and alike.
    """
    groups = group_statistics(inputs.uids, _outcomes(inputs), inputs.scored)
    _warn_singletons(groups)
    lengths = torch.where(inputs.scored, tokens_per_row(inputs.mask), 0).double()
    zeros = torch.zeros(len(groups.sizes), dtype=torch.float64)
    totals = zeros.index_add(0, groups.index, lengths).clamp(min=1)
    means = zeros.index_add(0, groups.index, lengths * groups.centered) / totals
    # exactly 0 where all scores are equal, as their distance from the plain mean is
    return _spread(torch.where(inputs.scored, groups.centered - means[groups.index], 0.0), inputs)


@register("gae")
def gae(inputs: AdvantageInputs, config: AlgorithmConfig) -> AdvantageOutputs:
    """Estimate advantages from a critic, then whiten them over the batch.

    Returns are taken before whitening. Raises ValueError without values.
    """
    if inputs.values is None:
        raise ValueError("algorithm.adv_estimator 'gae' needs the critic's values")
    mask = loss_mask(inputs.mask, inputs.scored)
    advantages = generalized_advantages(
        inputs.token_rewards, inputs.values, mask, config.gamma, config.lam
    )
    values = masked(inputs.values.values, mask.values).double()
    returns = mask.with_values((advantages.values + values).float())
    whitened = whiten(advantages.values, mask.values)
    return AdvantageOutputs(mask.with_values(whitened.float()), returns)


def generalized_advantages(
    rewards: Ragged, values: Ragged, mask: Ragged, gamma: float, lam: float
) -> Ragged:
    """Compute GAE (Schulman et al. 2016, equation 16) over the unmasked tokens of each row.

    Masked tokens are stepped over: the successor of a token is the next unmasked one, and
    after the last one the value is 0. Returns float64, 0 where masked.
    """
    real = _dense(mask, mask.values)
    reward = _dense(mask, masked(rewards.values, mask.values).double())
    value = _dense(mask, masked(values.values, mask.values).double())
    advantages = torch.zeros_like(value)
    next_value = torch.zeros(len(mask), dtype=torch.float64)
    next_advantage = torch.zeros(len(mask), dtype=torch.float64)
    for t in reversed(range(value.shape[1])):
        delta = reward[:, t] + gamma * next_value - value[:, t]
        advantage = delta + gamma * lam * next_advantage
        advantages[:, t] = torch.where(real[:, t], advantage, 0.0)
        next_advantage = torch.where(real[:, t], advantage, next_advantage)
        next_value = torch.where(real[:, t], value[:, t], next_value)
    return mask.with_values(advantages[mask.row_index(), _columns(mask)])


def whiten(values: Tensor, mask: Tensor) -> Tensor:
    """Shift and scale the unmasked values [T] to mean 0 and sample variance 1; 0 elsewhere.

    Fewer than two unmasked values, or all equal ones, become 0.
    """
    real = values[mask].double()
    whitened = torch.zeros(values.shape, dtype=torch.float64)
    if real.shape[0] > 1 and bool(real.max() > real.min()):
        whitened[mask] = (real - real.mean()) * torch.rsqrt(real.var() + WHITEN_EPSILON)
    return whitened.to(values.dtype)


def whitened_column(column: Ragged, mask: Ragged) -> Ragged:
    """Whiten the unmasked tokens of all rows; 0 elsewhere. Of the whole batch, whatever rank."""
    if not (isinstance(column, Repeated) and isinstance(mask, Repeated)):
        return mask.with_values(whiten(column.values, mask.values))
    counts = tokens_per_row(mask).double()
    numbers = column.numbers.double()
    live, total = counts > 0, float(counts.sum())
    whitened = torch.zeros_like(numbers)
    if total > 1 and bool(numbers[live].max() > numbers[live].min()):
        centered = numbers - (counts * numbers).sum() / total
        variance = (counts * centered.square()).sum() / (total - 1)
        whitened = torch.where(live, centered * torch.rsqrt(variance + WHITEN_EPSILON), 0.0)
    return Repeated(whitened.to(column.numbers.dtype), mask.lengths)


@dataclass(frozen=True, slots=True)
class Groups:
    """Statistics of G groups over their scored rows."""

    index: Tensor  # [N] int64, the group of each row
    sizes: Tensor  # [G] int64, scored rows
    means: Tensor  # [G] float64
    stds: Tensor  # [G] float64, sample standard deviation; 0 for one score or equal scores
    centered: Tensor  # [N] float64, score less mean; exactly 0 where unscored or all are equal


def group_statistics(uids: tuple[str, ...], scores: Tensor, scored: Tensor) -> Groups:
    """Gather the scored rows of each uid; groups are numbered by first appearance."""
    numbers: dict[str, int] = {}
    index = torch.tensor([numbers.setdefault(u, len(numbers)) for u in uids], dtype=torch.int64)
    count = len(numbers)
    kept, rows = scores[scored].double(), index[scored]
    sizes = torch.bincount(rows, minlength=count)
    zeros = torch.zeros(count, dtype=torch.float64)
    means = zeros.index_add(0, rows, kept) / sizes.clamp(min=1)
    low = torch.full((count,), torch.inf, dtype=torch.float64).scatter_reduce(0, rows, kept, "amin")
    high = (-torch.full_like(zeros, torch.inf)).scatter_reduce(0, rows, kept, "amax")
    # Rounding gives equal scores a tiny spread, which a division by it would blow up.
    varied = high > low
    centered = torch.zeros(len(uids), dtype=torch.float64)
    centered[scored] = torch.where(varied[rows], kept - means[rows], 0.0)
    variances = zeros.index_add(0, index, centered.square()) / (sizes - 1).clamp(min=1)
    return Groups(index, sizes, means, variances.sqrt(), centered)


def _outcomes(inputs: AdvantageInputs) -> Tensor:
    """Give each row's reward [N]: its token rewards' sum, or the score without any token."""
    sums = masked_row_sums(inputs.token_rewards, inputs.mask)
    return torch.where(tokens_per_row(inputs.mask) > 0, sums, inputs.scores.double())


def _returns(rewards: Ragged, mask: Ragged, gamma: float) -> Ragged:
    """Sum what each unmasked token and those after it are rewarded, discounted; float32."""
    if gamma == 1 and isinstance(rewards, AtEnd) and isinstance(mask, Repeated):
        return spread(rewards.numbers, mask)
    nothing = mask.with_values(torch.zeros(mask.total))
    # without values, advantages are returns
    found = generalized_advantages(rewards, nothing, mask, gamma, 1.0)
    return found.with_values(found.values.float())


def _spread(row_advantages: Tensor, inputs: AdvantageInputs) -> AdvantageOutputs:
    """Give every unmasked token its row's advantage; the returns are the same."""
    advantages = spread(row_advantages, inputs.mask)
    return AdvantageOutputs(advantages, advantages)


def _warn_singletons(groups: Groups) -> None:
    singles = int((groups.sizes == 1).sum())
    if singles:
        warnings.warn(
            f"{singles} of {len(groups.sizes)} groups have one scored response and so advantage 0; "
            "is rollout.n 1, or the uid not shared by the samples of a prompt?",
            stacklevel=3,
        )


def _columns(mask: Ragged) -> Tensor:
    """Give each token's position in its row, [T] int64."""
    starts = mask.lengths.cumsum(0) - mask.lengths
    return torch.arange(mask.values.shape[0]) - starts[mask.row_index()]


def _dense(mask: Ragged, values: Tensor) -> Tensor:
    """Lay values [T] out as [N, longest row], 0 (False) behind each row's end."""
    width = int(mask.lengths.max()) if len(mask) else 0
    dense = torch.zeros(len(mask), width, dtype=values.dtype)
    dense[mask.row_index(), _columns(mask)] = values
    return dense
