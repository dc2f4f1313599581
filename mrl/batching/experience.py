"""From the engine's samples to the batches of each optimizer step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from mrl.algorithms.losses import loss_counts, token_weights
from mrl.algorithms.masks import full_mask
from mrl.types import Joined, PolicyBatch, Ragged, Repeated, Sample, Sequences, ValueBatch, as_array


@dataclass(frozen=True, slots=True)
class Experience:
    """All samples of one step; rows of one prompt are neighbours."""

    samples: tuple[Sample, ...]  # [N]
    uids: tuple[str, ...]  # [N]
    sequences: Sequences
    mask: Ragged  # bool: every response token
    rollout_log_probs: Ragged  # float32
    routing: Ragged | None = None  # as in PolicyBatch

    @property
    def num_tokens(self) -> int:
        """Count prompt and response tokens."""
        return int(self.sequences.tokens.lengths.sum())


def collect(groups: Sequence[Sequence[Sample]]) -> Experience:
    """Join the samples of all prompts, in the prompts' order."""
    samples = tuple(sample for group in groups for sample in group)
    lengths = torch.tensor([len(s.response_ids) for s in samples], dtype=torch.int64)
    totals = lengths + torch.tensor([len(s.prompt_ids) for s in samples], dtype=torch.int64)
    tokens = [(as_array(s.prompt_ids), as_array(s.response_ids)) for s in samples]
    log_probs = [(as_array(s.log_probs),) for s in samples]
    routing = [sample.routing for sample in samples if sample.routing is not None]
    return Experience(
        samples,
        tuple(sample.uid for sample in samples),
        Sequences(Joined(tokens, totals, torch.empty(0, dtype=torch.int32)), lengths),
        full_mask(lengths),
        Joined(log_probs, lengths, torch.empty(0)),
        Ragged.from_rows(routing) if routing else None,
    )


@dataclass(frozen=True, slots=True)
class Splits:
    """How a step's rows become mini-batches."""

    rows: int  # of one optimizer step
    epochs: int
    shuffle: bool
    seed: int

    def __call__(self, total: int) -> Iterator[list[int]]:
        """Yield the rows of each optimizer step; whole prompts stay together unless shuffled."""
        for epoch in range(self.epochs):
            order = list(range(total))
            if self.shuffle:
                generator = torch.Generator().manual_seed(self.seed + epoch)
                order = torch.randperm(total, generator=generator).tolist()
            for start in range(0, total, self.rows):
                yield order[start : start + self.rows]

    def count(self, total: int) -> int:
        """Count the optimizer steps over so many rows."""
        return self.epochs * -(-total // self.rows)


def policy_batches(
    experience: Experience,
    splits: Splits,
    loss_mask: Ragged,
    agg_mode: str,
    old_log_probs: Ragged,
    advantages: Ragged,
    ref_log_probs: Ragged | None,
    loss_scale: float = 1.0,
    fresh: Sequence[int] = (),
) -> Iterator[PolicyBatch]:
    """Yield the actor's batch of each optimizer step; steps without a live token are left out.

    The mini-batch whose rows are `fresh` goes without old log-probs.
    """

    def build(weights: Ragged, rows: list[int], sequences: Sequences) -> PolicyBatch:
        old = None if rows == fresh else old_log_probs.select(rows)
        reference = ref_log_probs.select(rows) if ref_log_probs is not None else None
        routing = experience.routing.select(rows) if experience.routing is not None else None
        return PolicyBatch(sequences, old, advantages.select(rows), weights, reference, routing)

    return _batches(experience, splits, loss_mask, agg_mode, loss_scale, build)


def value_batches(
    experience: Experience,
    splits: Splits,
    loss_mask: Ragged,
    agg_mode: str,
    old_values: Ragged,
    returns: Ragged,
    loss_scale: float = 1.0,
) -> Iterator[ValueBatch]:
    """Yield the critic's batch of each optimizer step; steps without a live token are left out."""

    def build(weights: Ragged, rows: list[int], sequences: Sequences) -> ValueBatch:
        return ValueBatch(sequences, old_values.select(rows), returns.select(rows), weights)

    return _batches(experience, splits, loss_mask, agg_mode, loss_scale, build)


def supervised_batch(examples: Sequence[tuple[Sequence[int], Sequence[int]]]) -> PolicyBatch:
    """Join (prompt ids, response ids) pairs for a supervised step; every response token counts."""
    rows = [torch.tensor([*prompt, *response], dtype=torch.int64) for prompt, response in examples]
    lengths = torch.tensor([len(response) for _, response in examples], dtype=torch.int64)
    mask = full_mask(lengths)
    nothing = Repeated(torch.zeros(len(lengths)), lengths)
    weights = token_weights(mask, "token-mean", *loss_counts(mask))
    return PolicyBatch(Sequences(Ragged.from_rows(rows), lengths), nothing, nothing, weights, None)


def _batches[B](
    experience: Experience,
    splits: Splits,
    loss_mask: Ragged,
    agg_mode: str,
    loss_scale: float,
    build: Callable[[Ragged, list[int], Sequences], B],
) -> Iterator[B]:
    for rows in splits(len(experience.samples)):
        mask = loss_mask.select(rows)
        # The denominator of the whole optimizer step, before any rank or micro-batch is cut off.
        counts = loss_counts(mask)
        if any(counts):
            weights = token_weights(mask, agg_mode, *counts, loss_scale)
            yield build(weights, rows, experience.sequences.select(rows))
