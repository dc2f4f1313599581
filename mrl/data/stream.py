"""The order of prompts: seeded, epoch by epoch, resumable at any step."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from mrl.data.dataset import RLHFDataset
from mrl.types import Prompt

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StreamState:
    """Where a stream stands; `dataclasses.asdict` of it is JSON."""

    epoch: int
    position: int  # rows of the epoch's order that were taken
    seed: int
    fingerprint: str  # of the dataset


class PromptStream:
    """Batches of prompts in an order that (seed, epoch) alone decide.

    As in verl, what is left of an epoch after its last full batch is dropped; which rows those are
    changes with the epoch when shuffling.
    """

    def __init__(
        self,
        dataset: RLHFDataset,
        batch_size: int,
        shuffle: bool,
        seed: int,
        total_epochs: int | None = None,
    ) -> None:
        """Start at the first row of epoch 0.

        Args:
            dataset: the rows.
            batch_size: prompts a batch (`data.train_batch_size`).
            shuffle: draw a permutation for each epoch; else the order of the files.
            seed: of the permutations.
            total_epochs: end after so many; None never ends.

        Raises:
            ValueError: if the dataset has fewer rows than a batch.
        """
        if batch_size < 1:
            raise ValueError(f"data.train_batch_size is {batch_size}, expected at least 1")
        if len(dataset) < batch_size:
            raise ValueError(
                f"{len(dataset)} rows after filtering < train_batch_size {batch_size}; "
                f"set data.train_batch_size to at most {len(dataset)}"
            )
        self._dataset = dataset
        self._batch_size = batch_size
        self._shuffle = shuffle
        self._seed = seed
        self._total_epochs = total_epochs
        self._epoch = 0
        self._position = 0
        self._order = self._epoch_order()
        if rest := len(dataset) % batch_size:
            logger.warning(
                "each epoch leaves out %d of %d rows: no full batch of train_batch_size %d",
                rest,
                len(dataset),
                batch_size,
            )

    @property
    def steps_per_epoch(self) -> int:
        """Full batches of an epoch."""
        return len(self._dataset) // self._batch_size

    @property
    def epoch(self) -> int:
        """Epoch of the last batch."""
        return self._epoch

    def _epoch_order(self) -> np.ndarray:
        """Give the rows of the epoch in order, [rows] int64."""
        if not self._shuffle:
            return np.arange(len(self._dataset))
        return np.random.default_rng([self._seed, self._epoch]).permutation(len(self._dataset))

    def next_batch(self) -> tuple[Prompt, ...]:
        """Take the next `batch_size` prompts; their uids are `<epoch>-<row>`.

        Raises:
            StopIteration: after the last batch of the last epoch.
        """
        epoch, position = self._epoch, self._position
        if position + self._batch_size > len(self._order):
            epoch, position = epoch + 1, 0
        if self._total_epochs is not None and epoch >= self._total_epochs:
            raise StopIteration(f"all {self._total_epochs} epochs are taken")
        self._move_to(epoch, position)
        rows = [int(row) for row in self._order[position : position + self._batch_size]]
        # Read in file order: each block of the files is then decoded once a batch.
        prompts = {row: self._dataset.prompt(row, uid=f"{epoch}-{row}") for row in sorted(rows)}
        self._position += self._batch_size
        return tuple(prompts[row] for row in rows)

    def __iter__(self) -> PromptStream:
        return self

    def __next__(self) -> tuple[Prompt, ...]:
        return self.next_batch()

    def _move_to(self, epoch: int, position: int) -> None:
        changed = epoch != self._epoch
        self._epoch, self._position = epoch, position
        if changed:
            self._order = self._epoch_order()

    def state(self) -> StreamState:
        """Say where the stream stands, for a checkpoint."""
        return StreamState(self._epoch, self._position, self._seed, self._dataset.fingerprint())

    def restore(self, state: StreamState) -> None:
        """Continue where a state was taken.

        With another dataset the old place means nothing: a warning says so, and the stream starts
        at the first row. With another seed the saved one stays in force, so that no row of the
        epoch is met twice.
        """
        if state.fingerprint != self._dataset.fingerprint():
            warnings.warn(
                f"the dataset differs from the checkpoint's, which stood at epoch {state.epoch}, "
                f"row {state.position}: starting at epoch 0, row 0",
                stacklevel=2,
            )
            self._epoch, self._position = 0, 0
        else:
            if state.seed != self._seed:
                warnings.warn(
                    f"data.seed is {self._seed}, the checkpoint's order has seed {state.seed}: "
                    "continuing with the checkpoint's",
                    stacklevel=2,
                )
            self._seed = state.seed
            self._epoch, self._position = state.epoch, state.position
        self._order = self._epoch_order()


def validation_batches(
    dataset: RLHFDataset, batch_size: int | None = None
) -> Iterator[tuple[Prompt, ...]]:
    """Go through all rows once in the order of the files; the last batch may be smaller.

    Args:
        dataset: the rows; their uids are `val-<row>`.
        batch_size: prompts a batch (`data.val_batch_size`); None takes all rows at once.
    """
    size = batch_size or len(dataset)
    for first in range(0, len(dataset), size):
        last = min(first + size, len(dataset))
        yield tuple(dataset.prompt(row, uid=f"val-{row}") for row in range(first, last))
