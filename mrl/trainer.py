"""The order of a training step, and nothing else.

    prompts -> generate -> score -> log-probs -> values -> advantages
            -> update critic -> update actor -> reshard -> log -> validate -> save

What was left out of PPO as published: no early stop on KL, no reward scaling, no shared trunk of
actor and critic. GRPO and RLOO are the same step without a critic.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from threading import Event
from typing import Any

from mrl.algorithms.advantages import AdvantageInputs, AdvantageOutputs, compute_advantages
from mrl.algorithms.kl import kl_column, kl_controller, mean_kl
from mrl.algorithms.masks import loss_mask
from mrl.algorithms.reductions import Mean, Metric, reduced
from mrl.algorithms.token_rewards import score_tensors, token_rewards
from mrl.batching.experience import Experience, Splits, collect, policy_batches, value_batches
from mrl.checkpoint.folder import CheckpointFolder, Found
from mrl.checkpoint.state import TrainerState, is_due
from mrl.config import (
    Config,
    ConfigError,
    build_plan,
    check_config,
    check_trainable,
    training_steps,
)
from mrl.data import PromptStream, RLHFDataset, StreamState
from mrl.interrupts import stop_requests
from mrl.rewards.registry import known_sources, load_custom
from mrl.rewards.runner import RewardRunner
from mrl.tracking.metrics import ScoredBatch, summarise_batch
from mrl.tracking.rates import Rates, memory_metrics, sync_metrics
from mrl.tracking.recorder import Recorder
from mrl.tracking.rollouts import rollout_rows
from mrl.tracking.timers import Timers
from mrl.types import Prompt, Ragged, Sample, SamplingParams, Score
from mrl.validation import Validator, score_item
from mrl.workers.group import RankPool, WorkerError
from mrl.workers.job import Roles, job_spec, roles_on, run_job, serve_as_rank
from mrl.workers.specs import JobSpec


class RayPPOTrainer:
    """PPO, GRPO and RLOO over worker groups; the launcher is the config's choice."""

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
        self.config, self.plan = config, build_plan(config)
        data = config.data
        self.dataset = train_dataset or RLHFDataset(data.train_files, tokenizer, data)
        if val_dataset is None and data.val_files:
            val_dataset = RLHFDataset(data.val_files, tokenizer, data)
        self.val_dataset = val_dataset
        custom = config.reward.custom_reward_function
        if custom.path is not None:
            load_custom(custom.path, custom.name)
        for dataset in filter(None, (self.dataset, val_dataset)):
            dataset.check_rewards(known_sources(), has_custom=custom.path is not None)
        self.stream = PromptStream(self.dataset, data.train_batch_size, data.shuffle, data.seed)
        self.total_steps = training_steps(config, len(self.dataset))
        self.checkpoints = CheckpointFolder(
            config.trainer.default_local_dir, config.trainer.max_actor_ckpt_to_keep
        )

    def fit(self, max_steps: int | None = None) -> None:
        """Train up to the configured number of steps, or `max_steps` if that is fewer.

        SIGUSR1 or SIGTERM ends it early: after the step in hand, with a checkpoint to resume from.
        Raises WorkerError with the first cause when a rank fails.
        """
        if serve_as_rank(self.config):
            return
        last_step = self.total_steps if max_steps is None else min(self.total_steps, max_steps)
        found = self._resume_point()
        # The schedule spans the configured run, so a run cut short equals the start of a long one.
        spec = job_spec(self.config, self.plan, self.total_steps)
        with stop_requests() as stop:
            run_job(
                self.config,
                self.plan,
                spec,
                lambda pool: self._run(pool, spec, last_step, found, stop),
            )

    def _run(
        self, pool: RankPool, spec: JobSpec, last_step: int, found: Found | None, stop: Event
    ) -> None:
        roles = roles_on(pool, self.config, self.plan, spec)
        state = self._resume(roles, found)
        reward = self.config.reward
        with (
            RewardRunner(
                reward.custom_reward_function, reward.num_workers, reward.timeout_s
            ) as scorer,
            Recorder(self.config, self.plan, last_step, state.global_step) as recorder,
        ):
            _Run(self, roles, scorer, recorder, state, last_step, stop).loop()

    def _resume_point(self) -> Found | None:
        """Choose the checkpoint to continue from and set later ones aside; starts nothing.

        Raises ValueError for a checkpoint that is damaged or not of this kind of training.
        """
        trainer = self.config.trainer
        latest = self.checkpoints.resume_point(trainer.resume_mode, trainer.resume_from_path)
        for skipped in latest.skipped:
            print(f"not resuming from {skipped.path}: {skipped.reason}")
        found = latest.found
        if found is not None and not TrainerState.load(found.path).stream:
            raise ValueError(
                f"{found.path} is of supervised training: train into another "
                f"trainer.default_local_dir, with model.path={found.path}/actor/huggingface"
            )
        self.checkpoints.set_aside(found.step if found else -1)
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
        if roles.critic is not None:
            roles.critic.load(found.path / "critic")
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
        self.scorer, self.recorder = scorer, recorder
        self.state, self.last_step = state, last_step
        self.kl = kl_controller(self.config.algorithm.kl_ctrl).with_coef(state.kl_coef)
        self.rates = Rates(self.config, self.plan, roles.ranks)
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
        self.roles.rollout.sync(first)
        if trainer.val_only or (trainer.val_before_train and first == 0):
            metrics = self.validator(first)
            if trainer.val_only:
                self.recorder.show(first, metrics)
                return
            if metrics:
                self.recorder.step(first, metrics)
        for step in range(first + 1, self.last_step + 1):
            try:
                self.step(step)
            except WorkerError as error:
                raise WorkerError(f"in step {step}, {error}") from None
            if self.stop.is_set() and step < self.last_step:
                if not self.checkpoints.has(step):  # it may have been due
                    self._write_checkpoint(step)
                self.recorder.finish(f"stopped as asked after step {step}, {self.recorder.folder}")
                return
        self.recorder.finish(f"{self.last_step} steps, {self.recorder.folder}")

    def step(self, step: int) -> None:
        """Take one step: the whole of it, in order."""
        timer, roles = Timers(), self.roles
        prompts = self.stream.next_batch()
        with timer("gen"):
            groups = roles.rollout.generate(prompts, self._sampling(step))
            memory = roles.rollout.sleep()
        batch = collect(groups)
        with timer("reward"):
            scores = self._score(prompts, batch.samples)
        self.recorder.rollouts(
            "rollouts", step, rollout_rows(step, {p.uid: p for p in prompts}, batch.samples, scores)
        )
        with timer("old_log_prob"):
            old_log_probs, entropies, *recorded = roles.actor.log_probs(
                batch.sequences, batch.routing
            )
            batch = replace(batch, routing=recorded[0] if recorded else batch.routing)
        with timer("ref"):
            ref_log_probs = roles.ref.log_probs(batch.sequences) if roles.ref else None
        with timer("values"):
            values = roles.critic.values(batch.sequences) if roles.critic else None
        kl_coef = self.kl.coef
        with timer("adv"):
            rewards, found = self._advantages(batch, scores, old_log_probs, ref_log_probs, values)
            live = loss_mask(batch.mask, score_tensors(scores)[1])
        scored = ScoredBatch.of(
            batch, self.config.data.max_prompt_length, scores, old_log_probs, rewards,
            found.advantages, found.returns, values,
        )  # fmt: skip
        summary = self.recorder.beside(summarise_batch, scored)
        entropy = self.recorder.beside(entropies.mean)
        updates: dict[str, float] = {}
        with timer("update_critic"):
            if values is not None:
                updates |= self._update_critic(batch, live, values, found.returns)
        with timer("update_actor"):
            if step > self.config.trainer.critic_warmup:
                updates |= self._update_actor(
                    step, batch, live, old_log_probs, found.advantages, ref_log_probs
                )
        with timer("reshard"):
            traffic = roles.rollout.sync(step)
        self.state = replace(
            self.state, global_step=step, policy_version=step,
            stream=asdict(self.stream.state()), kl_coef=self.kl.coef,
        )  # fmt: skip
        with timer("testing"):
            validation = self._validate(step)
        with timer("save_checkpoint"):
            self._save(step)
        self.recorder.step(step, {
            **summary.result(),
            "actor/entropy": entropy.result(),
            "actor/reward_kl_penalty_coeff": kl_coef,
            **updates,
            **sync_metrics(traffic),
            **memory_metrics(memory),
            "training/global_step": step,
            "training/epoch": self.stream.epoch,
            **self.rates(timer.metrics(), batch, "actor/grad_norm" in updates),
            **validation,
        })  # fmt: skip

    def _sampling(self, step: int) -> SamplingParams:
        rollout, data = self.config.rollout, self.config.data
        return SamplingParams(
            rollout.n,
            rollout.temperature,
            rollout.top_p,
            rollout.top_k,
            data.max_response_length,
            # a seed of its own for each step, so that a resumed run draws what it would have
            rollout.seed + step,
            tuple(rollout.stop),
        )

    def _score(self, prompts: Sequence[Prompt], samples: Sequence[Sample]) -> tuple[Score, ...]:
        by_uid = {prompt.uid: prompt for prompt in prompts}
        return self.scorer.score([score_item(by_uid[sample.uid], sample) for sample in samples])

    def _advantages(
        self,
        batch: Experience,
        scores: Sequence[Score],
        old_log_probs: Ragged,
        ref_log_probs: Ragged | None,
        values: Ragged | None,
    ) -> tuple[Ragged, AdvantageOutputs]:
        """Turn scores into token rewards, and those into advantages and returns."""
        algorithm = self.config.algorithm
        values_of, scored = score_tensors(scores)
        kl = None
        if algorithm.use_kl_in_reward:
            assert ref_log_probs is not None
            kl = kl_column(old_log_probs, ref_log_probs, batch.mask, algorithm.kl_penalty)
        rewards = token_rewards(values_of, scored, batch.mask, kl, self.kl.coef)
        if kl is not None:
            self.kl = self.kl.update(mean_kl(kl, batch.mask), len(batch.samples))
        inputs = AdvantageInputs(batch.uids, values_of, scored, batch.mask, rewards, values)
        return rewards, compute_advantages(algorithm.adv_estimator, inputs, algorithm)

    def _update_actor(
        self,
        step: int,
        batch: Experience,
        live: Ragged,
        old_log_probs: Ragged,
        advantages: Ragged,
        ref_log_probs: Ragged | None,
    ) -> dict[str, float]:
        actor = self.config.actor
        batches = policy_batches(
            batch, self._splits("actor", actor.ppo_epochs, actor.shuffle, step), live,
            actor.loss_agg_mode, old_log_probs, advantages,
            ref_log_probs if actor.use_kl_loss else None,
        )  # fmt: skip
        return _mean_over_updates([self.roles.actor.update(part) for part in batches])

    def _update_critic(
        self, batch: Experience, live: Ragged, values: Ragged, returns: Ragged
    ) -> dict[str, float]:
        critic = self.roles.critic
        assert critic is not None
        epochs = self.config.critic.ppo_epochs or self.config.actor.ppo_epochs
        batches = value_batches(
            batch, self._splits("critic", epochs, False, 0), live,
            self.config.critic.loss_agg_mode, values, returns,
        )  # fmt: skip
        return _mean_over_updates([critic.update(part) for part in batches])

    def _splits(self, role: str, epochs: int, shuffle: bool, step: int) -> Splits:
        plan = self.plan.roles[role]
        seed = self.config.data.seed + 1_000_003 * step
        return Splits(plan.samples_per_rank * plan.dp, epochs, shuffle, seed)

    def _validate(self, step: int) -> Mapping[str, float]:
        if not is_due(step, self.config.trainer.test_freq, self.last_step):
            return {}
        metrics = self.validator(step)
        if metrics:
            self.state = self.state.with_validation(next(iter(metrics.values())))
        return metrics

    def _save(self, step: int) -> None:
        if is_due(step, self.config.trainer.save_freq, self.last_step):
            self._write_checkpoint(step)

    def _write_checkpoint(self, step: int) -> None:
        self.recorder.settle()  # what a checkpoint calls done is on the disk
        folder = self.checkpoints.begin(step)
        for name, group in (("actor", self.roles.actor), ("critic", self.roles.critic)):
            if group is not None:
                group.save(folder / name)
        self.state.save(folder)
        self.checkpoints.commit(step)


def _collect_rarely() -> None:
    """Spare Python's collections of garbage what stands now, and most of their rounds.

    A step makes some hundred thousand objects, hardly one of them in a cycle: at the usual pace
    looking for those takes longer than the rest of the controller's work.
    """
    gc.freeze()
    gc.set_threshold(100_000)


def _mean_over_updates(updates: Sequence[Mapping[str, Metric]]) -> dict[str, float]:
    """Average what the optimizer steps of one rollout report."""
    names = dict.fromkeys(name for update in updates for name in update)
    rows = [reduced(update) for update in updates]
    means = {name: Mean.of(row[name] for row in rows if name in row) for name in names}
    return reduced(means)
