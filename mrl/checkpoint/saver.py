"""Saving a run: its roles' files and the trainer's state, at most one checkpoint under way."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from mrl.checkpoint.changes import save_config
from mrl.checkpoint.folder import CheckpointFolder
from mrl.checkpoint.state import TrainerState
from mrl.config import Config
from mrl.workers.group import WorkerError


class Saves(Protocol):
    """A role that writes itself into a folder, at once or in the background."""

    def save(self, folder: Path) -> None: ...
    def begin_save(self, folder: Path) -> None: ...
    def is_saved(self) -> bool: ...
    def finish_save(self, folder: Path) -> None: ...


class Saver:
    """The checkpoints that a run writes; the tracker moves when all of one is on the disk."""

    def __init__(
        self, folder: CheckpointFolder, roles: Mapping[str, Saves], config: Config
    ) -> None:
        self.folder, self.roles, self.config = folder, roles, config
        self.in_background = config.actor.checkpoint.async_save
        self._under_way: TrainerState | None = None

    def save(self, state: TrainerState) -> None:
        """Write the checkpoint of a state, or start to; the one before is finished first.

        It counts once it is finished, which is for after its step's metrics are written: a run
        that goes on from it has all rows before.

        Raises WorkerError naming the save's step and the rank, OSError where the controller's own
        files cannot be written; older checkpoints stay as they are.
        """
        self.finish()
        step = state.global_step
        draft = self.folder.begin(step)
        with self._explained(step):
            for name, role in self.roles.items():
                if self.in_background:
                    role.begin_save(draft / name)
                else:
                    role.save(draft / name)
            state.save(draft)
            save_config(self.config, draft)
        self._under_way = state

    def settle(self) -> None:
        """Complete the checkpoint that was not written in the background; raises as `save`."""
        if not self.in_background:
            self.finish()

    def poll(self) -> None:
        """Complete the checkpoint under way if all ranks have written theirs; raises as `save`."""
        if self._under_way is None or not self.in_background:
            return
        if all(role.is_saved() for role in self.roles.values()):
            self.finish()

    def finish(self) -> None:
        """Wait for the checkpoint under way, if there is one, and complete it."""
        state = self._under_way
        if state is None:
            return
        with self._explained(state.global_step):
            if self.in_background:
                for name, role in self.roles.items():
                    role.finish_save(self.folder.draft(state.global_step) / name)
            self._under_way = None
            keeps_best = self.config.trainer.best_metric is not None
            self.folder.commit(state.global_step, best=state.best_step if keeps_best else None)

    @contextmanager
    def _explained(self, step: int) -> Iterator[None]:
        try:
            yield
        except (WorkerError, OSError) as error:
            self._under_way = None
            free = shutil.disk_usage(self.folder.root).free / 2**30
            self.folder.abandon(step)
            newest = self.folder.latest().found
            text = (
                f"the checkpoint of step {step} could not be saved ({free:.1f} GiB were free), the "
                f"newest complete one is {newest.path if newest else 'none'}: "
            )
            if isinstance(error, WorkerError):
                raise error.within(text) from None
            raise OSError(error.errno, f"{text}{error}") from error
