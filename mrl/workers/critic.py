"""The critic on one rank: values and value updates."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from mrl.algorithms.losses import value_loss
from mrl.algorithms.reductions import Mean, Metric, Sum
from mrl.types import Cuts, Ragged, Sequences, ValueBatch
from mrl.workers.actor import batch_metrics, update_metrics
from mrl.workers.megatron.engine import MegatronEngine


class Critic:
    """The value model; its head sits on the last pipeline stage."""

    def __init__(self, engine: MegatronEngine, cliprange_value: float) -> None:
        self.engine, self.cliprange_value = engine, cliprange_value

    def values(self, sequences: Sequences, cuts: Cuts) -> Ragged | None:
        """Give values at the response tokens."""
        return self.engine.values(sequences, cuts)

    def update(self, batch: ValueBatch, cuts: Cuts) -> Mapping[str, Metric] | None:
        """Take one optimizer step on the clipped squared error."""
        sums, update = self.engine.train(batch, cuts, self._loss)
        if not self.engine.is_output_rank:
            return None
        return {
            "critic/vf_loss": Sum(sums["vf_loss"]),
            "critic/vf_clipfrac": Mean(sums["clipped"], sums["tokens"]),
            "critic/vpred_mean": Mean(sums["predicted"], sums["tokens"]),
            **update_metrics("critic", update),
            **batch_metrics("critic", sums, cuts),
        }

    def save(self, folder: Path) -> tuple[str, ...]:
        """Write weights and optimizer state; give this rank's files."""
        return self.engine.save(folder)

    def begin_save(self, folder: Path) -> None:
        """Start what `save` does, in the background."""
        self.engine.begin_save(folder)

    def is_saved(self) -> bool:
        """Say whether this rank has nothing left to write."""
        return self.engine.is_saved()

    def finish_save(self) -> tuple[str, ...]:
        """Wait for the end of what `begin_save` began; give this rank's files."""
        return self.engine.finish_save()

    def load(self, folder: Path) -> None:
        """Read what `save` wrote."""
        self.engine.load(folder)

    def _loss(self, values: Tensor, batch: ValueBatch) -> tuple[Tensor, dict[str, Tensor]]:
        result = value_loss(
            values,
            batch.old_values.values,
            batch.returns.values,
            batch.weights.values,
            self.cliprange_value,
        )
        sums = {
            "vf_loss": result.loss,
            "clipped": result.clipped,
            "predicted": result.predicted,
            "tokens": result.num_tokens,
        }
        return result.loss, sums
