"""The order of a training step, and nothing else.

    prompts -> generate -> score -> log-probs -> values -> advantages
            -> update critic -> update actor -> reshard -> log -> validate -> save

What was left out of PPO as published: no early stop on KL, no reward scaling, no shared trunk of
actor and critic. Without a critic the same step is GRPO, RLOO, REINFORCE++, ReMax or OPO.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, replace
from threading import Event
from typing import Any

from mrl.algorithms.kl import kl_controller
from mrl.algorithms.mismatch import sound_alarm
from mrl.algorithms.reductions import Metric, over_updates
from mrl.batching.experience import Experience, Splits, policy_batches, value_batches
from mrl.checkpoint.changes import check_changes
from mrl.checkpoint.folder import CheckpointFolder, Found
from mrl.checkpoint.lock import folder_lock
from mrl.checkpoint.saver import Saver
from mrl.checkpoint.state import TrainerState, best_value, is_due
from mrl.config import (
    Config,
    ConfigError,
    build_plan,
    check_config,
    check_trainable,
    training_steps,
)
from mrl.config.components import reward_components, scores_any_source
from mrl.credit import Credit, Credited
from mrl.data import PromptStream, RLHFDataset, StreamState
from mrl.generation import Generator
from mrl.interrupts import stop_requests
from mrl.own_log_probs import OwnLogProbs, pass_before, pass_over
from mrl.report import report_finished
from mrl.restarts import resume_point, start_from, with_restarts
from mrl.rewards.registry import known_sources, load_custom
from mrl.rewards.runner import RewardRunner
from mrl.tracking.metrics import ScoredBatch
from mrl.tracking.profiles import Profiles
from mrl.tracking.rates import Rates, memory_metrics, sync_metrics
from mrl.tracking.recorder import Recorder
from mrl.tracking.rollouts import rollout_rows
from mrl.tracking.timers import Timers
from mrl.types import Ragged
from mrl.validation import Validator
from mrl.workers.group import RankPool, WorkerError
from mrl.workers.job import Roles, job_spec, roles_on, run_job, serve_as_rank
from mrl.workers.specs import JobSpec


class RayPPOTrainer:
    """PPO, GRPO and their kin over worker groups; the launcher is the config's choice."""

    def __init__(
        self,
        config: Config,
        tokenizer: Any,
        train_dataset: RLHFDataset | None = None,
        val_dataset: RLHFDataset | None = None,
    ) -> None:
        """Check the config and open the data; no process is started.

        Datasets default to `data.train_files` and `data.val_files`. Raises ValueError for a
        config that cannot be trained and for unusable data.
        """
        if violations := check_config(config):
            raise ConfigError(violations)
        check_trainable(config)
        self.config, self.plan, self.tokenizer = config, build_plan(config), tokenizer
        data = config.data
        self.dataset = train_dataset or RLHFDataset(data.train_files, tokenizer, data)
        if val_dataset is None and data.val_files:
            val_dataset = RLHFDataset(data.val_files, tokenizer, data)
        self.val_dataset = val_dataset
        components = reward_components(config.reward.components)
        custom = config.reward.custom_reward_function
        files = [(custom.path, custom.name), *((c.path, c.name) for c in components.values())]
        for path, name in files:
            if path is not None:
                load_custom(path, name)
        for dataset in filter(None, (self.dataset, val_dataset)):
            dataset.check_rewards(known_sources(), has_custom=scores_any_source(config))
        size = data.gen_batch_size or data.train_batch_size
        self.stream = PromptStream(self.dataset, size, data.shuffle, data.seed)
        self.total_steps = training_steps(config, len(self.dataset))
        self.checkpoints = CheckpointFolder(
            config.trainer.default_local_dir, config.trainer.max_actor_ckpt_to_keep
        )

    def fit(self, max_steps: int | None = None) -> None:
        """Train up to the configured number of steps, or `max_steps` if that is fewer.

        SIGUSR1 or SIGTERM ends it early: after the step in hand, with a checkpoint to resume from.
        Raises WorkerError with the first cause when a rank fails, at once or, with
        trainer.max_restarts, again and again.
        """
        if serve_as_rank(self.config):
            return
        last_step = self.total_steps if max_steps is None else min(self.total_steps, max_steps)
        # The schedule spans the configured run, so a run cut short equals the start of a long one.
        spec = job_spec(self.config, self.plan, self.total_steps)
        beginning = self.stream.state()
        with folder_lock(self.checkpoints.root), stop_requests() as stop:

            def run(tries: int) -> None:
                self.stream.restore(beginning)
                found = self._resume_point(tries)
                run_job(
                    self.config,
                    self.plan,
                    spec,
                    lambda pool: self._run(pool, spec, last_step, found, stop),
                )

            with_restarts(run, self.config.trainer.max_restarts, stop)
            report_finished(self.checkpoints.root)

    def _run(
        self, pool: RankPool, spec: JobSpec, last_step: int, found: Found | None, stop: Event
    ) -> None:
        roles = roles_on(pool, self.config, self.plan, spec)
        state = self._resume(roles, found)
        reward = self.config.reward
        with (
            RewardRunner(
                reward.custom_reward_function,
                reward.num_workers,
                reward.timeout_s,
                reward_components(reward.components),
            ) as scorer,
            Recorder(self.config, self.plan, last_step, state.global_step) as recorder,
        ):
            _Run(self, roles, scorer, recorder, state, last_step, stop).loop()

    def _resume_point(self, tries: int) -> Found | None:
        """Choose the checkpoint to continue from and set later ones aside; starts nothing.

        Raises ValueError for a checkpoint that is damaged or not of this kind of training.
        """
        latest = resume_point(self.checkpoints, self.config.trainer, tries)
        for skipped in latest.skipped:
            print(f"not resuming from {skipped.path}: {skipped.reason}")
        found = latest.found
        if found is not None:
            if not TrainerState.load(found.path).stream:
                raise ValueError(
                    f"{found.path} is of supervised training: train into another "
                    f"trainer.default_local_dir, with model.path={found.path}/actor/huggingface"
                )
            check_changes(found.path, self.config)
        start_from(self.checkpoints, found)
        return found

    def _resume(self, roles: Roles, found: Found | None) -> TrainerState:
        """Load a checkpoint into the roles and the stream; without one, start at step 0."""
        if found is None:
            kl = kl_controller(self.config.algorithm.kl_ctrl)
            stream = asdict(self.stream.state())
            return TrainerState(0, 0, self.config.trainer.seed, stream, kl.coef)
        print(f"resuming from {found.path}")
        state = TrainerState.load(found.path)
        self.stream.restore(StreamState(**state.stream))
        roles.actor.load(found.path / "actor")
        if roles.critic is not None and (found.path / "critic").is_dir():
            roles.critic.load(found.path / "critic")
        elif roles.critic is not None:
            print(f"{found.path} holds no critic: it starts anew")
        return state


class _Run:
    """One run: the roles at work, and what a step hands to the next."""

    def __init__(
        self,
        trainer: RayPPOTrainer,
        roles: Roles,
        scorer: RewardRunner,
        recorder: Recorder,
        state: TrainerState,
        last_step: int,
        stop: Event,
    ) -> None:
        self.config, self.plan, self.roles = trainer.config, trainer.plan, roles
        self.stop = stop
        self.stream, self.checkpoints = trainer.stream, trainer.checkpoints
        self.tokenizer = trainer.tokenizer
        saved = {"actor": roles.actor, "critic": roles.critic}
        self.saver = Saver(
            self.checkpoints, {name: role for name, role in saved.items() if role}, self.config
        )
        self.recorder = recorder
        self.generator = Generator(self.config, trainer.stream, roles.rollout, scorer)
        self.state, self.last_step = state, last_step
        self.credit = Credit(self.config, state.kl_coef)
        self.rates = Rates(self.config, self.plan, roles.ranks)
        self.timer = Timers(ranks=roles.busy)  # of the step in hand
        self.profiles = Profiles(self.config, roles.actor.pool)
        self.validator = Validator(
            self.config, self.plan, trainer.val_dataset, roles.rollout, scorer, recorder
        )

    def loop(self) -> None:
        """Run all steps that are left."""
        trainer, first = self.config.trainer, self.state.global_step
        _collect_rarely()
        self.recorder.start(f"{trainer.project_name} / {trainer.experiment_name}", self.roles.ranks)
        if first >= self.last_step:
            print(f"nothing to train: step {first} of {self.last_step} is done already")
        validates = trainer.val_only or (trainer.val_before_train and first == 0)
        try:
            self.roles.rollout.sync(first)
            metrics = self.validator(first) if validates else {}
        except WorkerError as error:
            raise error.within(f"before step {first + 1}, ") from None
        if validates:
            if trainer.val_only:
                self.recorder.show(first, metrics)
                return
            if metrics:
                self.recorder.step(first, metrics)
        for step in range(first + 1, self.last_step + 1):
            gc.collect()  # little stands between two steps
            try:
                self.step(step)
            except WorkerError as error:
                where = f"in step {step} ({self.timer.failed_phase}), "
                raise error.within(where) from None
            if self.stop.is_set() and step < self.last_step:
                self.saver.finish()
                if not self.checkpoints.has(step):  # it may have been due
                    self._write_checkpoint()
                    self.saver.finish()
                self.recorder.finish(f"stopped as asked after step {step}, {self.recorder.folder}")
                return
        self.saver.finish()
        self.recorder.finish(f"{self.last_step} steps, {self.recorder.folder}")

    def step(self, step: int) -> None:
        """Take one step: the whole of it, in order."""
        timer, roles = self.timer.next(), self.roles
        self.timer = timer
        with timer("save_checkpoint"):
            self.saver.settle()  # now that the rows of all its steps are written
        self.profiles.begin(step, timer)
        drawn = self.generator(step, timer)
        batch, scores = drawn.batch, drawn.scores
        rows = rollout_rows(step, drawn.prompts, batch.samples, scores)
        self.recorder.rollouts("rollouts", step, rows)
        own, rules = None, self.config.algorithm.rollout_correction
        with timer("old_log_prob"):
            if not rules.bypass_mode:
                own, batch = pass_before(roles.actor, batch, self._due(step, batch))
        old_log_probs = own.log_probs if own is not None else batch.rollout_log_probs
        with timer("ref"):
            ref_log_probs = roles.ref.log_probs(batch.sequences) if roles.ref else None
        with timer("values"):
            values = roles.critic.values(batch.sequences) if roles.critic else None
        with timer("adv"):
            found = self.credit(step, drawn, old_log_probs, ref_log_probs, values)
        with timer("old_log_prob"):
            if own is not None and own.due and not found.live.select(own.due).values.any():
                # no update will be made of these rows
                own = own.complete(pass_over(roles.actor, batch, own.due))
        scored = ScoredBatch.of(
            batch, self.config.data.max_prompt_length, scores, None,
            found.rewards, found.advantages, found.returns, values,
        )  # fmt: skip
        described: list[Future[dict[str, float]]] = []

        def describe(own: OwnLogProbs | None) -> None:
            known = replace(scored, old_log_probs=own.log_probs) if own is not None else scored
            described.extend(self.recorder.describe(step, rows, known, self.tokenizer.decode))
            if own is not None:
                described.append(self.recorder.beside(own.metrics))

        if own is None or not own.due:
            describe(own)
        updates: dict[str, float] = {}
        with timer("update_critic"):
            if values is not None:
                updates |= self._update_critic(batch, found.live, values, found.returns)
        with timer("update_actor"):
            if step > self.config.trainer.critic_warmup:
                updates |= self._update_actor(step, batch, found, own, ref_log_probs, describe)
        with timer("reshard"):
            traffic = roles.rollout.sync(step)
        self.state = replace(
            self.state, global_step=step, policy_version=step,
            stream=asdict(self.stream.state()), kl_coef=self.credit.kl.coef,
        )  # fmt: skip
        with timer("testing"):
            validation = self._validate(step)
        self.profiles.end(step, timer)
        with timer("save_checkpoint"):
            self._save(step)
        summary = {name: value for part in described for name, value in part.result().items()}
        self.recorder.step(step, {
            **summary,
            **drawn.metrics,
            **found.metrics,
            **updates,
            **sync_metrics(traffic),
            **memory_metrics(drawn.memory),
            "training/global_step": step,
            "training/epoch": self.stream.epoch,
            **timer.rank_metrics(),
            **self.rates(timer.metrics(), batch, "actor/grad_norm" in updates),
            **validation,
        })  # fmt: skip
        if rules.alarm_action == "stop":
            self.saver.finish()  # what was saved stays saved
        sound_alarm(step, summary, rules)

    def _due(self, step: int, batch: Experience) -> Sequence[int]:
        """List the rows whose log-probs come with their update."""
        updates = step > self.config.trainer.critic_warmup
        if not (updates and self.plan.first_log_probs_from_update):
            return ()
        return next(self._actor_splits(step)(len(batch.samples)))

    def _actor_splits(self, step: int) -> Splits:
        actor = self.config.actor
        return self._splits("actor", actor.ppo_epochs, actor.shuffle, step)

    def _update_actor(
        self,
        step: int,
        batch: Experience,
        found: Credited,
        own: OwnLogProbs | None,
        ref_log_probs: Ragged | None,
        describe: Callable[[OwnLogProbs], None],
    ) -> dict[str, float]:
        actor, splits = self.config.actor, self._actor_splits(step)
        old_log_probs = own.log_probs if own is not None else batch.rollout_log_probs
        batches = policy_batches(
            batch, splits, found.live, actor.loss_agg_mode, old_log_probs, found.weighed,
            ref_log_probs if actor.use_kl_loss else None, self.plan.loss_scale_factors["actor"],
            own.due if own is not None else (),
        )  # fmt: skip

        def told(columns: tuple[Ragged, ...]) -> None:
            assert own is not None
            describe(own.complete(columns))

        updates = self.roles.actor.updates(batches, told=told)
        return _over_updates("actor", updates, splits.count(len(batch.samples)))

    def _update_critic(
        self, batch: Experience, live: Ragged, values: Ragged, returns: Ragged
    ) -> dict[str, float]:
        critic = self.roles.critic
        assert critic is not None
        epochs = self.config.critic.ppo_epochs or self.config.actor.ppo_epochs
        splits = self._splits("critic", epochs, False, 0)
        batches = value_batches(
            batch, splits, live, self.config.critic.loss_agg_mode, values, returns,
            self.plan.loss_scale_factors["critic"],
        )  # fmt: skip
        updates = critic.updates(batches)
        return _over_updates("critic", updates, splits.count(len(batch.samples)))

    def _splits(self, role: str, epochs: int, shuffle: bool, step: int) -> Splits:
        plan = self.plan.roles[role]
        seed = self.config.data.seed + 1_000_003 * step
        return Splits(plan.samples_per_rank * plan.dp, epochs, shuffle, seed)

    def _validate(self, step: int) -> Mapping[str, float]:
        if not is_due(step, self.config.trainer.test_freq, self.last_step):
            return {}
        metrics = self.validator(step)
        if metrics:
            name = self.config.trainer.best_metric
            self.state = self.state.with_validation(best_value(metrics, name), name)
        return metrics

    def _save(self, step: int) -> None:
        trainer = self.config.trainer
        self.saver.poll()
        is_best = trainer.best_metric is not None and self.state.best_step == step
        if is_best or is_due(step, trainer.save_freq, self.last_step):
            self._write_checkpoint()

    def _write_checkpoint(self) -> None:
        self.recorder.settle()  # what a checkpoint calls done is on the disk
        self.saver.save(self.state)


def _collect_rarely() -> None:
    """Spare Python's collections of garbage what stands now, and most rounds within a step.

    A step makes some hundred thousand objects, hardly one of them in a cycle: looking for those
    while they stand takes longer than much of the controller's work.
    """
    gc.freeze()
    gc.set_threshold(1_000_000)


def _over_updates(role: str, updates: Sequence[Mapping[str, Metric]], due: int) -> dict[str, float]:
    """Join what the optimizer steps of one rollout report; count those without a live token."""
    return {**over_updates(updates), f"{role}/skipped_updates": float(due - len(updates))}
