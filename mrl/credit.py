"""What each token of a step is credited with: rewards, KL penalty, advantages, correction."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mrl.algorithms.advantages import AdvantageInputs, compute_advantages
from mrl.algorithms.correction import Corrected, correct
from mrl.algorithms.kl import kl_column, kl_controller, mean_kl
from mrl.algorithms.masks import loss_mask
from mrl.algorithms.mismatch import mismatch, sound_alarm
from mrl.algorithms.token_rewards import outcome_rewards, scaled, token_rewards
from mrl.batching.experience import Experience
from mrl.config import Config
from mrl.config.bounds import parse_correction
from mrl.generation import Generated
from mrl.types import Ragged


@dataclass(frozen=True, slots=True)
class Credited:
    """Columns of the response tokens of a step."""

    rewards: Ragged  # float32
    advantages: Ragged  # float32
    returns: Ragged  # float32
    live: Ragged  # bool: what is trained on
    weighed: Ragged  # float32: the advantages, times the weights of a correction
    metrics: dict[str, float]


class Credit:
    """Credits tokens by the config's estimator; steers the KL coefficient."""

    def __init__(self, config: Config, kl_coef: float) -> None:
        """Resume at a KL coefficient."""
        self.config, self.rules = config, config.algorithm.rollout_correction
        self.correction = parse_correction(self.rules)
        self.kl = kl_controller(config.algorithm.kl_ctrl).with_coef(kl_coef)

    def __call__(
        self,
        step: int,
        drawn: Generated,
        old_log_probs: Ragged,
        ref_log_probs: Ragged | None,
        values: Ragged | None,
    ) -> Credited:
        """Turn scores into token rewards, and those into advantages and returns.

        Raises ValueError when the trainer's log-probs are too far from the engine's and
        rollout_correction.alarm_action says to stop.
        """
        algorithm, batch = self.config.algorithm, drawn.batch
        outcome = outcome_rewards(
            drawn.scores, batch.mask.lengths, drawn.greedy, self.config.data.max_response_length,
            self.config.reward.overlong_buffer,
        )  # fmt: skip
        kl, coef = None, self.kl.coef
        metrics = {**outcome.metrics, "actor/reward_kl_penalty_coeff": coef}
        if algorithm.use_kl_in_reward:
            assert ref_log_probs is not None
            kl = kl_column(old_log_probs, ref_log_probs, batch.mask, algorithm.kl_penalty)
            metrics["actor/reward_kl_penalty"] = mean_kl(kl, batch.mask)
            self.kl = self.kl.update(metrics["actor/reward_kl_penalty"], len(batch.samples))
        rewards = token_rewards(outcome.rewards, outcome.scored, batch.mask, kl, coef)
        inputs = AdvantageInputs(
            batch.uids, outcome.rewards, outcome.scored, batch.mask, rewards, values,
            outcome.baselines,
        )  # fmt: skip
        found = compute_advantages(algorithm.adv_estimator, inputs, algorithm)
        kept = outcome.scored
        if algorithm.overlong_filtering:
            ended = torch.tensor([s.finish_reason != "length" for s in batch.samples])
            metrics["reward/overlong/filtered_ratio"] = float((~ended).double().mean())
            kept = kept & ended
        live = loss_mask(batch.mask, kept)
        corrected = self._correct(step, batch, old_log_probs, live)
        return Credited(
            rewards, found.advantages, found.returns, corrected.live,
            scaled(found.advantages, corrected.weights), {**metrics, **corrected.metrics},
        )  # fmt: skip

    def _correct(
        self, step: int, batch: Experience, old_log_probs: Ragged, live: Ragged
    ) -> Corrected:
        """Make good what lies between engine and trainer; first, ask whether it is too much."""
        rules, engine = self.rules, batch.rollout_log_probs
        if rules.bypass_mode:  # each micro-batch is corrected by its own log-probs
            return Corrected(live, None, {})
        if rules.alarm_action == "stop":
            sound_alarm(step, mismatch(engine, old_log_probs, batch.mask), rules)
        if not self.correction.acts:
            return Corrected(live, None, {})
        return correct(old_log_probs, engine, live, self.correction)
