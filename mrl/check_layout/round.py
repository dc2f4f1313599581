"""One round of work on a batch: score it, train on it, score it again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from mrl.algorithms.reductions import reduced
from mrl.check_layout.batch import Targets, policy_batch, value_batch
from mrl.config.schema import OptimConfig
from mrl.types import Ragged, Sequences
from mrl.workers.group import TrainGroup

# Adam divides by the gradient's size: a large eps keeps a gradient of nearly nothing from turning
# rounding into a whole step. Clipping is in force at every step.
LR, EPS, CLIP_GRAD, WEIGHT_DECAY = 1e-3, 1e-2, 0.5, 0.1
OPTIM = OptimConfig(lr=LR, eps=EPS, clip_grad=CLIP_GRAD, weight_decay=WEIGHT_DECAY)


@dataclass(frozen=True, slots=True)
class Round:
    """What the roles gave: outputs before and after their updates, rows in the batch's order."""

    log_probs: Tensor  # [T] float32, T response tokens
    entropies: Tensor  # [T] float32
    values: Tensor | None  # [T] float32; None without a critic
    later_log_probs: Tensor  # [T] float32, after the updates
    later_values: Tensor | None
    actor: tuple[Mapping[str, float], ...]  # metrics of each update
    critic: tuple[Mapping[str, float], ...]


def run_round(
    actor: TrainGroup,
    critic: TrainGroup | None,
    rows: Sequences,
    targets: Targets,
    around: Round | None = None,
    updates: int = 2,
) -> Round:
    """Score the rows, update actor and critic by turns, and score the rows again.

    The mini-batches are made near the outputs of `around` (None: this round's own), so that rounds
    of several layouts train on the same numbers.
    """
    log_probs, entropies = actor.log_probs(rows)
    values = None if critic is None else critic.values(rows)
    policies = policy_batch(rows, _at(log_probs, around and around.log_probs), targets)
    wanted = None
    if values is not None:
        wanted = value_batch(rows, _at(values, around and around.values), targets)
    actor_metrics, critic_metrics = [], []
    for _ in range(updates):
        actor_metrics.append(reduced(actor.update(policies)))
        if critic is not None and wanted is not None:
            critic_metrics.append(reduced(critic.update(wanted)))
    return Round(
        log_probs.values,
        entropies.values,
        None if values is None else values.values,
        actor.log_probs(rows)[0].values,
        None if critic is None else critic.values(rows).values,
        tuple(actor_metrics),
        tuple(critic_metrics),
    )


def _at(column: Ragged, values: Tensor | None) -> Ragged:
    return column if values is None else column.with_values(values)
