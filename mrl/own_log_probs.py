"""The trainer's own log-probs of a step's responses: by a pass before the updates, or with one.

The first mini-batch is trained on by the policy that sampled it, so its update's own forward pass
gives the same numbers as one before would: that pass is left out for these rows (all rows, with
one update a step).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from mrl.batching.experience import Experience
from mrl.types import Ragged, Repeated
from mrl.workers.group import TrainGroup


@dataclass(frozen=True, slots=True)
class OwnLogProbs:
    """Columns of all response tokens, float32; NaN in the rows that are due."""

    log_probs: Ragged
    entropies: Ragged
    due: Sequence[int] = ()  # rows that come with the first update

    def complete(self, columns: Sequence[Ragged]) -> OwnLogProbs:
        """Fill in log-probs and entropies of the rows that were due, in their order."""
        rest = _others(self.due, len(self.log_probs))
        log_probs, entropies = (
            Ragged.in_order([held.select(rest), new], [*rest, *self.due])
            for held, new in zip((self.log_probs, self.entropies), columns, strict=True)
        )
        return OwnLogProbs(log_probs, entropies)

    def metrics(self) -> dict[str, float]:
        """Give the mean entropy."""
        return {"actor/entropy": self.entropies.mean()}


def pass_before(
    actor: TrainGroup, batch: Experience, due: Sequence[int]
) -> tuple[OwnLogProbs, Experience]:
    """Compute log-probs and entropies of all rows but those that are due.

    Gives the batch with the routing that the actor recorded, where it records any.
    """
    if not due:
        log_probs, entropies, *recorded = actor.log_probs(batch.sequences, batch.routing)
        return OwnLogProbs(log_probs, entropies), (
            replace(batch, routing=recorded[0]) if recorded else batch
        )
    lengths = batch.mask.lengths
    unknown = Repeated(torch.full((len(lengths),), torch.nan), lengths)
    own, rest = OwnLogProbs(unknown, unknown, due), _others(due, len(lengths))
    if rest:
        own = replace(replace(own, due=rest).complete(pass_over(actor, batch, rest)), due=due)
    return own, batch


def pass_over(actor: TrainGroup, batch: Experience, rows: Sequence[int]) -> Sequence[Ragged]:
    """Compute log-probs and entropies of some rows, by the experts that they are routed to."""
    routing = batch.routing.select(rows) if batch.routing is not None else None
    columns: Sequence[Ragged] = actor.log_probs(batch.sequences.select(rows), routing)
    return columns


def _others(rows: Sequence[int], total: int) -> list[int]:
    named = set(rows)
    return [row for row in range(total) if row not in named]
