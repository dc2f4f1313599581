"""The actor on one rank: log-probs, policy updates, checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path

import psutil
import torch
from torch import Tensor

from mrl.algorithms.correction import factors
from mrl.algorithms.losses import entropy_loss, kl_loss, policy_loss
from mrl.algorithms.reductions import Max, Mean, Metric, Same, Sum
from mrl.types import Cuts, PolicyBatch, Ragged, Sequences
from mrl.workers.megatron.engine import MegatronEngine
from mrl.workers.megatron.moe import METRICS as EXPERT_METRICS
from mrl.workers.megatron.optimizer import Update
from mrl.workers.specs import PolicyLossSpec


class Actor:
    """The trained policy."""

    def __init__(self, engine: MegatronEngine, loss: PolicyLossSpec) -> None:
        self.engine, self.spec = engine, loss

    def log_probs(
        self, sequences: Sequences, cuts: Cuts, routing: Ragged | None = None
    ) -> tuple[Ragged, ...] | None:
        """Give log-probs and entropies of the response tokens, then the routing if recorded."""
        return self.engine.log_probs(sequences, cuts, routing)

    def update(self, batch: PolicyBatch, cuts: Cuts) -> Mapping[str, Metric] | None:
        """Take one optimizer step; report this data-parallel part's metrics."""
        return self._update(batch, cuts, [])

    def update_fresh(
        self, batch: PolicyBatch, cuts: Cuts
    ) -> tuple[Mapping[str, Metric], tuple[Ragged, ...]] | None:
        """Do as `update`, with this policy's own log-probs as the old ones, and give those too.

        The second part is what `log_probs` would have given before the step.
        """
        kept: list[tuple[Tensor, Tensor]] = []
        metrics = self._update(batch, cuts, kept)
        if metrics is None:
            return None
        lengths = [batch.sequences.response_lengths[list(indices)] for indices in cuts]
        order = [i for indices in cuts for i in indices]
        parts = (map(Ragged, (c.cpu() for c in cs), lengths) for cs in zip(*kept, strict=True))
        return metrics, tuple(Ragged.in_order(list(column), order) for column in parts)

    def _update(
        self, batch: PolicyBatch, cuts: Cuts, kept: list[tuple[Tensor, Tensor]]
    ) -> Mapping[str, Metric] | None:
        sums, update = self.engine.train(batch, cuts, partial(self._loss, kept))
        if not self.engine.is_output_rank:
            return None
        tokens = sums["tokens"]
        metrics: dict[str, Metric] = {
            "actor/pg_loss": Sum(sums["pg_loss"]),
            "actor/entropy_loss": Sum(sums["entropy"]),
            "actor/pg_clipfrac": Mean(sums["clipped"], tokens),
            "actor/pg_clipfrac_lower": Mean(sums["clipped_lower"], tokens),
            "actor/ppo_kl": Mean(sums["kl"], tokens),
            **update_metrics("actor", update),
            **batch_metrics("actor", sums, cuts),
        }
        if batch.ref_log_probs is not None:
            metrics["actor/kl_loss"] = Sum(sums["kl_loss"])
            metrics["actor/kl_coef"] = Same(self.spec.kl_loss_coef)
        if "shares" in sums:
            metrics["rollout_corr/rollout_is_mean"] = Mean(sums["shares"], tokens)
            metrics["rollout_corr/rollout_rs_masked_fraction"] = Mean(sums["rejected"], tokens)
        return metrics

    def supervise(self, batch: PolicyBatch, cuts: Cuts) -> Mapping[str, Metric] | None:
        """Take one supervised step: weighted negative log-likelihood of the responses."""
        sums, update = self.engine.train(batch, cuts, _supervised_loss)
        if not self.engine.is_output_rank:
            return None
        return {
            "sft/loss": Sum(sums["loss"]),
            **update_metrics("sft", update),
            **batch_metrics("actor", sums, cuts),
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

    def _loss(
        self,
        kept: list[tuple[Tensor, Tensor]],
        output: tuple[Tensor, Tensor],
        batch: PolicyBatch,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        log_probs, entropies = output
        spec = self.spec
        weights = batch.weights.values
        if batch.old_log_probs is not None:
            old = batch.old_log_probs.values
        else:
            old = log_probs.detach()
            kept.append((old, entropies.detach()))
        advantages, lengths = batch.advantages.values, batch.weights.lengths
        corrected = {}
        if spec.correction is not None and spec.correction.acts:
            log_ratios = log_probs.detach() - old
            shares = factors(log_ratios, weights != 0, lengths, spec.correction)
            advantages = advantages * shares
            corrected = {"shares": shares.sum(), "rejected": ((shares == 0) & (weights != 0)).sum()}
        policy = policy_loss(
            log_probs,
            old,
            advantages,
            weights,
            spec.clip_low,
            spec.clip_high,
            spec.clip_c,
            spec.loss_mode,
            lengths,
        )
        entropy = entropy_loss(entropies, weights)
        loss = policy.loss - spec.entropy_coeff * entropy
        sums = {
            "pg_loss": policy.loss,
            "entropy": entropy,
            "clipped": policy.clipped,
            "clipped_lower": policy.clipped_lower,
            "kl": policy.kl,
            "tokens": policy.num_tokens,
            **corrected,
        }
        if batch.ref_log_probs is not None:
            reference = batch.ref_log_probs.values
            sums["kl_loss"] = kl_loss(log_probs, reference, weights, spec.kl_loss_type)
            loss = loss + spec.kl_loss_coef * sums["kl_loss"]
        return loss, sums


def update_metrics(role: str, update: Update) -> dict[str, Metric]:
    """Name what an optimizer step reports; every rank holds the same numbers."""
    return {
        f"{role}/grad_norm": Same(update.grad_norm),
        f"{role}/lr": Same(update.lr),
        **memory_metrics(),
    }


def memory_metrics() -> dict[str, Metric]:
    """Give the most device memory used so far and the host's in use; empty without a GPU."""
    if not torch.cuda.is_available():
        return {}
    return {
        "perf/max_memory_allocated_gb": Max(torch.cuda.max_memory_allocated() / 1e9),
        "perf/max_memory_reserved_gb": Max(torch.cuda.max_memory_reserved() / 1e9),
        "perf/cpu_memory_used_gb": Max(psutil.virtual_memory().used / 1e9),
    }


def batch_metrics(role: str, sums: Mapping[str, float], cuts: Cuts) -> dict[str, Metric]:
    """Say how a mini-batch was cut and padded, and how its tokens were spread over experts."""
    return {
        f"perf/micro_batches/{role}": Max(len(cuts)),
        f"perf/padding/{role}": Mean(sums["padding"], sums["row_tokens"]),
        # of the whole step already, the same on every rank
        **{f"{role}/{name}": Same(sums[name]) for name in EXPERT_METRICS if name in sums},
    }


def _supervised_loss(
    output: tuple[Tensor, Tensor], batch: PolicyBatch
) -> tuple[Tensor, dict[str, Tensor]]:
    log_probs, _ = output
    loss = -(log_probs * batch.weights.values).sum()
    return loss, {"loss": loss}
