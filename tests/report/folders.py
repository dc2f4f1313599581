"""Run folders as training leaves them, healthy or with a fault planted."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from mrl.config import Config, build_plan, load_config, save_resolved

Row = dict[str, Any]
Change = Callable[[Row, int, int], None]  # changes the row of a step, of so many

GRPO = (
    "algorithm.adv_estimator=grpo",
    "rollout.n=8",
    "rollout.name=vllm",
    "rollout.tensor_model_parallel_size=1",
    "data.train_batch_size=16",
    "data.max_prompt_length=64",
    "data.max_response_length=256",
    "actor.ppo_mini_batch_size=16",
    "actor.ppo_micro_batch_size_per_gpu=8",
    "trainer.n_gpus_per_node=2",
    "trainer.total_training_steps=60",
)
PHASES = {
    "gen": 2.0,
    "reward": 0.3,
    "old_log_prob": 1.0,
    "ref": 1e-6,
    "values": 1e-6,
    "adv": 0.01,
    "update_critic": 1e-6,
    "update_actor": 4.0,
    "reshard": 0.2,
    "testing": 1e-5,
    "save_checkpoint": 1e-5,
    "rest": 0.1,
}


def healthy(step: int, steps: int) -> Row:
    """Make the row of one step of a run that learns."""
    done, noise = step / steps, math.sin(12.9898 * step)
    seconds = {f"timing_s/{name}": s * (1 + 0.1 * noise) for name, s in PHASES.items()}
    row: Row = {
        "step": step,
        "critic/score/mean": 0.3 + 0.4 * done + 0.05 * noise,
        "critic/rewards/mean": 0.3 + 0.4 * done + 0.05 * noise,
        "critic/advantages/mean": 0.001 * noise,
        "response_length/mean": 120 + 10 * noise,
        "response_length/max": 256.0,
        "response_length/min": 8.0,
        "response_length/clip_ratio": 0.02,
        "prompt_length/mean": 40.0,
        "prompt_length/clip_ratio": 0.0,
        "training/rollout_probs_diff_mean": 2e-3 * (1 + 0.1 * noise),
        "training/rollout_probs_diff_max": 0.1,
        "rollout_corr/token_mult_prob_error": 1.004,
        "rollout_corr/seq_mult_prob_error_max": 1.02,
        "rollout_corr/kl": 1e-4 * (1 + noise),
        "reward/timeouts": 0.0,
        "reward/errors": 0.0,
        "reward/unscored": 0.0,
        "group/size/mean": 8.0,
        "group/size/max": 8.0,
        "group/zero_variance_ratio": 0.1 + 0.2 * done,
        "actor/entropy": 0.8 - 0.3 * done + 0.02 * noise,
        "actor/pg_loss": 0.01 * noise,
        "actor/pg_clipfrac": 0.01,
        "actor/ppo_kl": 1e-3 * (1 + noise),
        "actor/grad_norm": 1.2 + 0.3 * noise,
        "actor/lr": 1e-6,
        "actor/skipped_updates": 0.0,
        "perf/micro_batches/actor": 8.0,
        "perf/padding/actor": 0.01,
        "perf/imbalance/actor": 1.03,
        "perf/rank_seconds/gen": 2.0,
        "perf/rank_spread/gen": 1.05,
        "perf/slowest_rank/gen": float(step % 2),
        "perf/memory_after_sleep_gb": 41.5,
        "perf/mfu/actor": 0.41,
        "perf/throughput": 2900.0 + 100 * noise,
        "perf/total_num_tokens": 20480.0,
        "training/global_step": step,
        **seconds,
        "timing_s/step": sum(seconds.values()),
    }
    if step % 10 == 0:
        row["val-core/gsm8k/acc/mean@1"] = 0.4 + 0.3 * done
    return row


def entropy_collapses(row: Row, step: int, steps: int) -> None:
    row["actor/entropy"] = 0.8 * math.exp(-6 * step / steps)


def mismatch_grows(row: Row, step: int, steps: int) -> None:
    row["training/rollout_probs_diff_mean"] = 2e-3 + 0.05 * step / steps


def engine_is_off(row: Row, step: int, steps: int) -> None:
    row["rollout_corr/token_mult_prob_error"] = 1.3


def groups_are_alike(row: Row, step: int, steps: int) -> None:
    row["group/zero_variance_ratio"] = 0.8


def most_are_cut(row: Row, step: int, steps: int) -> None:
    row["response_length/clip_ratio"] = 0.6


def generation_takes_most(row: Row, step: int, steps: int) -> None:
    row["timing_s/gen"] = 0.7 / 0.3 * (row["timing_s/step"] - row["timing_s/gen"])
    row["timing_s/step"] = sum(
        v for k, v in row.items() if k.startswith("timing_s/") and k != "timing_s/step"
    )


def half_is_padding(row: Row, step: int, steps: int) -> None:
    row["perf/padding/actor"] = 0.5


def work_is_uneven(row: Row, step: int, steps: int) -> None:
    row["perf/imbalance/actor"] = 1.8


def rank_1_is_slow(row: Row, step: int, steps: int) -> None:
    row["perf/rank_spread/gen"], row["perf/slowest_rank/gen"] = 1.4, 1.0


def updates_are_skipped(row: Row, step: int, steps: int) -> None:
    row["actor/skipped_updates"] = float(step == steps)


def some_are_unscored(row: Row, step: int, steps: int) -> None:
    if step == steps - 1:
        row["reward/unscored"], row["reward/timeouts"] = 3.0, 3.0


def gradients_are_not_finite(row: Row, step: int, steps: int) -> None:
    if step == steps:
        row["actor/grad_norm"], row["non_finite"] = None, ["actor/grad_norm"]


FAULTS: Mapping[str, Change] = {
    "entropy_collapse": entropy_collapses,
    "growing_mismatch": mismatch_grows,
    "mismatch": engine_is_off,
    "zero_variance_groups": groups_are_alike,
    "truncated": most_are_cut,
    "generation_share": generation_takes_most,
    "padding": half_is_padding,
    "imbalance": work_is_uneven,
    "slow_rank": rank_1_is_slow,
    "skipped_updates": updates_are_skipped,
    "unscored": some_are_unscored,
    "not_finite": gradients_are_not_finite,
}


def rows_of(steps: int, changes: Iterable[Change] = ()) -> list[Row]:
    """Make the rows of a run, a validation before its first step included."""
    rows: list[Row] = [{"step": 0, "val-core/gsm8k/acc/mean@1": 0.4}]
    changes = tuple(changes)
    for step in range(1, steps + 1):
        row = healthy(step, steps)
        for change in changes:
            change(row, step, steps)
        rows.append(row)
    return rows


@cache
def config_of(*overrides: str) -> Config:
    """Load the config of these runs."""
    return load_config(None, [*GRPO, *overrides])


def write_run(
    folder: Path,
    rows: Sequence[Mapping[str, Any]],
    *overrides: str,
    device: str = "cpu",
    samples: Sequence[Mapping[str, Any]] = (),
) -> Path:
    """Write a run folder; `samples` are those of its last step."""
    folder.mkdir(parents=True)
    config = config_of(*overrides)
    save_resolved(config, folder / "config.yaml")
    (folder / "plan.json").write_text(json.dumps(build_plan(config).to_json()))
    ranks = [{"rank": r, "host": "node-a", "device_name": device} for r in range(2)]
    (folder / "ranks.json").write_text(json.dumps(ranks))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if samples:
        (folder / "rollouts").mkdir()
        step = rows[-1]["step"]
        lines = [json.dumps({**sample_row(str(i)), **s}) for i, s in enumerate(samples)]
        (folder / "rollouts" / f"{step}.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def sample_row(uid: str) -> Row:
    """Make a row of rollouts/<step>.jsonl."""
    return {
        "input": f"question {uid}",
        "output": f"answer {uid}",
        "gts": "42",
        "score": 0.5,
        "step": 60,
        "uid": uid,
        "data_source": "gsm8k",
        "status": "ok",
        "detail": "",
        "finish_reason": "stop",
        "response_length": 12,
        "policy_version": 59,
        "extra": {},
    }
