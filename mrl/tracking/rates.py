"""Rates of a step: tokens a second, model FLOPs utilisation, traffic and memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor

from mrl.batching.experience import Experience
from mrl.config import Config, RunPlan
from mrl.resharding.families import ModelShape
from mrl.resharding.sync import SyncStats
from mrl.tracking.flops import mfu, peak_flops, training_flops
from mrl.tracking.timers import throughput_metrics
from mrl.workers.specs import RankInfo

_GB = 1e9


class Rates:
    """Turns the timings of a step into rates.

    Throughput is over every GPU of the job, utilisation over those that train.
    """

    def __init__(self, config: Config, plan: RunPlan, ranks: Sequence[RankInfo]) -> None:
        self.shape = ModelShape.from_folder(Path(config.model.path))
        self.epochs, self.ranks = config.actor.ppo_epochs, len(ranks)
        self.weights_frozen = config.model.lora.rank > 0
        self.trainer_ranks = plan.trainer_world
        self.peak = peak_flops(ranks[0].device_name)

    def __call__(
        self, timings: Mapping[str, float], batch: Experience, updated: bool
    ) -> dict[str, float]:
        """Give timings, perf/throughput and, where the chip's peak is known, perf/mfu/actor.

        Without an update of the actor there is no utilisation.
        """
        passes = self.epochs if updated else 0
        return self.over(timings, batch.sequences.tokens.lengths, batch.mask.total, passes)

    def over(
        self, timings: Mapping[str, float], rows: Tensor, responses: int, passes: int
    ) -> dict[str, float]:
        """Give the same of rows of so many tokens [N], `responses` of them in responses.

        `passes` says how often the update saw them.
        """
        lengths = rows.tolist()
        rates = throughput_metrics(timings, sum(lengths), responses, self.ranks)
        flops = training_flops(self.shape, lengths, responses, self.weights_frozen) * passes
        share = mfu(flops, timings["timing_s/update_actor"], self.trainer_ranks, self.peak)
        if share is not None and passes:
            rates["perf/mfu/actor"] = share
        return {**timings, **rates}


def sync_metrics(traffic: Sequence[SyncStats]) -> dict[str, float]:
    """Sum the weight transfer over the ranks; its time is that of the slowest."""
    return {
        "reshard/bytes_moved": sum(rank.bytes_moved for rank in traffic),
        "reshard/bytes_floor": sum(rank.bytes_floor for rank in traffic),
        "reshard/seconds": max(rank.seconds for rank in traffic),
    }


def memory_metrics(used_bytes: Sequence[int]) -> dict[str, float]:
    """Give the device memory in use after the engine fell asleep, of the fullest rank."""
    most = max(used_bytes)
    return {"perf/memory_after_sleep_gb": most / _GB} if most else {}
