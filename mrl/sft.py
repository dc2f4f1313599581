"""Supervised training on `prompt`/`response` rows with the actor's workers: a warm start."""

from __future__ import annotations

from pathlib import Path
from threading import Event
from typing import Any

import numpy as np

from mrl.algorithms.reductions import reduced
from mrl.batching.experience import supervised_batch
from mrl.checkpoint.changes import check_changes
from mrl.checkpoint.folder import CheckpointFolder, Found
from mrl.checkpoint.lock import folder_lock
from mrl.checkpoint.saver import Saver
from mrl.checkpoint.state import TrainerState, is_due
from mrl.config import (
    Config,
    ConfigError,
    Violation,
    build_plan,
    check_config,
    check_trainable,
    training_steps,
)
from mrl.data import SFTDataset
from mrl.interrupts import stop_requests
from mrl.report import report_finished
from mrl.restarts import resume_point, start_from, with_restarts
from mrl.tracking.profiles import Profiles
from mrl.tracking.rates import Rates
from mrl.tracking.recorder import Recorder
from mrl.tracking.timers import Timers
from mrl.workers.group import RankPool
from mrl.workers.job import roles_on, run_job, serve_as_rank, supervised_job_spec
from mrl.workers.specs import JobSpec


class SFTTrainer:
    """Next-token training on responses; `data.train_batch_size` rows an optimizer step."""

    def __init__(self, config: Config, tokenizer: Any) -> None:
        """Check the config and open the data; no process is started.

        Raises ValueError for a config that cannot be trained and for unusable data.
        """
        violations = [*check_config(config)]
        if config.placement.mode != "colocated":
            rule = "would leave the engine's ranks idle: supervised training has no engine"
            violations.append(Violation("placement.mode", config.placement.mode, rule, "colocated"))
        if violations:
            raise ConfigError(violations)
        check_trainable(config)
        self.config, self.plan = config, build_plan(config)
        self.dataset = SFTDataset(config.data.train_files, tokenizer, config.data)
        self.total_steps = training_steps(config, len(self.dataset))
        self.checkpoints = CheckpointFolder(
            config.trainer.default_local_dir, config.trainer.max_actor_ckpt_to_keep
        )

    def fit(self) -> None:
        """Train up to the configured number of steps, resuming as trainer.resume_mode says."""
        if serve_as_rank(self.config):
            return
        with folder_lock(self.checkpoints.root), stop_requests() as stop:
            with_restarts(
                lambda tries: self._fit(tries, stop), self.config.trainer.max_restarts, stop
            )
            report_finished(self.checkpoints.root)

    def _fit(self, tries: int, stop: Event) -> None:
        latest = resume_point(self.checkpoints, self.config.trainer, tries)
        for skipped in latest.skipped:
            print(f"not resuming from {skipped.path}: {skipped.reason}")
        found = latest.found
        if found is not None:
            if TrainerState.load(found.path).stream:
                raise ValueError(
                    f"{found.path} is of a run with rewards: train into another "
                    f"trainer.default_local_dir, with model.path={found.path}/actor/huggingface"
                )
            check_changes(found.path, self.config)
        start_from(self.checkpoints, found)
        if found is not None and found.step >= self.total_steps:
            print(f"nothing to train: {found.path} is step {found.step} of {self.total_steps}")
            return
        spec = supervised_job_spec(self.config, self.plan, self.total_steps)
        run_job(self.config, self.plan, spec, lambda pool: self._run(pool, spec, found, stop))

    def _run(self, pool: RankPool, spec: JobSpec, found: Found | None, stop: Event) -> None:
        roles = roles_on(pool, self.config, self.plan, spec)
        actor, trainer = roles.actor, self.config.trainer
        first = found.step if found else 0
        if found is not None:
            print(f"resuming from {found.path}")
            actor.load(found.path / "actor")
        saver = Saver(self.checkpoints, {"actor": actor}, self.config)
        with Recorder(self.config, self.plan, self.total_steps, first) as recorder:
            recorder.start(f"{trainer.project_name} / {trainer.experiment_name}", roles.ranks)
            rates = Rates(self.config, self.plan, roles.ranks)
            profiles, timer = Profiles(self.config, pool), Timers(ranks=roles.busy)
            for step in range(first + 1, self.total_steps + 1):
                timer = timer.next()
                with timer("save_checkpoint"):
                    saver.settle()  # now that the rows of all its steps are written
                profiles.begin(step, timer)
                batch = supervised_batch([self.dataset.example(i) for i in self._rows(step)])
                with timer("update_actor"):
                    metrics = reduced(actor.update(batch, "supervise"))
                profiles.end(step, timer)
                with timer("save_checkpoint"):
                    asked = stop.is_set()
                    saver.poll()
                    if asked or is_due(step, trainer.save_freq, self.total_steps):
                        saver.save(TrainerState(step, 0, trainer.seed, {}, 0.0))
                timings = timer.metrics()
                responses = int(batch.sequences.response_lengths.sum())
                speed = rates.over(timings, batch.sequences.tokens.lengths, responses, 1)
                recorder.step(step, {**metrics, **timer.rank_metrics(), **speed})
                if asked and step < self.total_steps:
                    saver.finish()
                    recorder.finish(f"stopped as asked after step {step}, {recorder.folder}")
                    return
            saver.finish()
            recorder.finish(f"{self.total_steps} steps, {recorder.folder}")

    def _rows(self, step: int) -> list[int]:
        """Give the rows of a step: a permutation an epoch, the short last batch left out."""
        size, total = self.config.data.train_batch_size, len(self.dataset)
        epoch, batch = divmod(step - 1, total // size)
        order = np.arange(total)
        if self.config.data.shuffle:
            order = np.random.default_rng([self.config.data.seed, epoch]).permutation(total)
        return [int(row) for row in order[batch * size : (batch + 1) * size]]


def warm_start(folder: Path) -> Path | None:
    """Find the newest weights that supervised training left below `folder`."""
    found = CheckpointFolder(folder).latest().found
    return found.path / "actor" / "huggingface" if found else None
