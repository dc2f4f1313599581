"""Whole steps of the algorithms beside PPO and GRPO: what they log, and that they learn."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from mrl import RayPPOTrainer, load_config
from mrl.workers.group import WorkerError
from tests.runs import Inputs, Recording, overrides, rollouts_of, steps_of

# Every third prompt is scored alike; the others by their length.
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    if extra_info["index"] % 3 == 0:
        return 0.0
    return len(solution_str) / 8 + ord(solution_str[:1] or "a") / 128
"""
NO_CRITIC = ("algorithm.use_kl_in_reward=false", "trainer.critic_warmup=0")
SHORT = ("trainer.val_before_train=false", "trainer.test_freq=-1", "trainer.save_freq=-1")
CASES = {
    "dapo": (
        "algorithm.adv_estimator=grpo",
        "algorithm.filter_groups={enable: true, metric: score}",
        "data.gen_batch_size=6",
        "actor.clip_ratio_high=0.28",
        "reward_model.overlong_buffer={enable: true, len: 4}",
        "algorithm.rollout_correction={rollout_is: token, rollout_rs: seq_mean_k3}",
        "algorithm.rollout_correction.rollout_rs_threshold=0.5",
        "algorithm.rollout_correction.alarm_action=stop",
    ),
    "dr_grpo": (
        "algorithm={adv_estimator: grpo, norm_adv_by_std_in_grpo: false}",
        "actor.loss_agg_mode=seq-mean-token-sum-norm",
        "actor.use_kl_loss=true",
    ),
    "gspo": (
        "algorithm.adv_estimator=opo",
        "actor.policy_loss.loss_mode=gspo",
        "actor.loss_agg_mode=seq-mean-token-mean",
    ),
    "remax": (
        "algorithm.adv_estimator=remax",
        "algorithm.rollout_correction={bypass_mode: true, loss_type: reinforce}",
        "algorithm.rollout_correction.rollout_is=sequence",
    ),
    "reinforce_plus_plus": (
        "algorithm.adv_estimator=reinforce_plus_plus",
        "algorithm.use_kl_in_reward=true",
        "actor.policy_loss.loss_mode=cispo",
    ),
}
LOGGED = {
    "dapo": {
        "train/num_gen_batches",
        "training/filter_groups/evicted_samples",
        "reward/overlong/mean",
        "rollout_corr/rollout_is_mean",
        "rollout_corr/rollout_rs_masked_fraction",
        "rollout_corr/token_mult_prob_error",
    },
    "dr_grpo": {"actor/kl_coef", "actor/kl_loss"},
    "gspo": {"rollout_corr/k3_kl"},
    "remax": {"critic/baseline/mean", "rollout_corr/rollout_is_mean"},
    "reinforce_plus_plus": {"actor/reward_kl_penalty", "actor/reward_kl_penalty_coeff"},
}


def fit(inputs: Inputs, folder: Path, *changes: str) -> Path:
    (folder / "reward.py").write_text(REWARD)
    run, reward = folder / "run", f"reward.custom_reward_function.path={folder / 'reward.py'}"
    config = load_config(inputs.config, overrides(run, reward, *NO_CRITIC, *SHORT, *changes))
    RayPPOTrainer(config, AutoTokenizer.from_pretrained(config.model.path)).fit(max_steps=2)
    return run


@pytest.mark.parametrize(
    "case",
    [
        "dapo",
        "remax",
        *(pytest.param(c, marks=pytest.mark.slow) for c in CASES if c not in ("dapo", "remax")),
    ],
)
def test_an_algorithm_trains_and_logs_its_numbers(
    case: str, warm_pools: list[Recording], inputs: Inputs, tmp_path: Path
) -> None:
    run = fit(inputs, tmp_path, *CASES[case])
    for step, row in steps_of(run).items():
        assert step in (1, 2) and "non_finite" not in row
        assert set(row) >= LOGGED[case] | {"actor/pg_clipfrac", "actor/pg_clipfrac_lower"}
        assert row["actor/grad_norm"] > 0
        assert len(rollouts_of(run, step)) == 32
        shown = [json.loads(text) for text in (run / f"tokens/{step}.jsonl").open()]
        assert len(shown) == 4 and all(
            len(s["pieces"]) == len(s["rollout_log_probs"]) == len(s["advantages"]) for s in shown
        )
        assert all((s["old_log_probs"] is None) == (case == "remax") for s in shown)
    assert "</html>" in (run / "report.html").read_text()
    if case == "dapo":
        taken = [r["uid"] for step in (1, 2) for r in rollouts_of(run, step)]
        assert all(int(uid.split("-")[1]) % 3 for uid in taken)
        assert row["rollout_corr/rollout_is_mean"] == pytest.approx(1, abs=1e-4)
        assert row["reward/overlong/mean"] < 0
    if case == "remax":  # the trainer computed no log-probs of its own
        assert "actor/entropy" not in row and "training/rollout_probs_diff_max" not in row
        assert 0.2 < row["rollout_corr/rollout_is_mean"] <= 2.0


@pytest.mark.slow
def test_too_large_a_mismatch_ends_the_run_before_the_update(
    warm_pools: list[Recording], inputs: Inputs, tmp_path: Path
) -> None:
    rules = "{alarm_threshold: 1.0000000001, alarm_action: stop}"
    changes = ("algorithm.adv_estimator=grpo", f"algorithm.rollout_correction={rules}")
    with pytest.raises((ValueError, WorkerError), match="alarm_threshold"):
        fit(inputs, tmp_path, *changes)
    assert warm_pools[0].batches == []
