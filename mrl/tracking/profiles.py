"""Which steps and ranks are profiled, as the controller asks for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mrl.config import Config
from mrl.tracking.timers import Timers
from mrl.workers.group import RankPool, call_all


class Profiles:
    """Has the ranks of `trainer.profile_ranks` record the steps of `trainer.profile_steps`.

    `<run>/profile/step_<N>/` then holds `rank_<R>.trace.json.gz`, and on a GPU
    `rank_<R>.memory.pickle`. The time it takes is the phase `profile` of such a step.
    """

    def __init__(self, config: Config, pool: RankPool) -> None:
        trainer = config.trainer
        self._steps, self._pool = frozenset(trainer.profile_steps), pool
        ranks = trainer.profile_ranks
        self._ranks = range(pool.world_size) if ranks is None else tuple(ranks)
        # ranks may work in other folders
        self._folder = Path(trainer.default_local_dir).absolute() / "profile"

    def begin(self, step: int, timer: Timers) -> None:
        """Start to record, in a step that is to be profiled."""
        if step in self._steps:
            with timer("profile"):
                self._ask("begin_profile")

    def end(self, step: int, timer: Timers) -> None:
        """Write what was recorded of the step."""
        if step in self._steps:
            folder = self._folder / f"step_{step}"
            with timer("profile"):
                written = self._ask("end_profile", folder)
            unseen = sum(not Path(file).is_file() for files in written for file in files)
            elsewhere = f" ({unseen} files are on other nodes' disks alone)" if unseen else ""
            print(f"step {step}: profiles of ranks {[*self._ranks]} in {folder}{elsewhere}")

    def _ask(self, method: str, *args: Path) -> list[Any]:
        return call_all(self._pool, self._ranks, "host", method, *args)
