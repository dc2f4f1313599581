"""What estimator, loss, filter and correction ask of each other."""

from __future__ import annotations

import pytest

TWO = "data.train_batch_size=4 actor.ppo_mini_batch_size=4"
RC = "algorithm.rollout_correction"
CASES = [
    # overrides, key, word of the rule, nearest legal
    ("algorithm.adv_estimator=opo", "rollout.n", "the others of its prompt", "2"),
    ("algorithm.adv_estimator=reinforce_plus_plus_baseline", "rollout.n", "others", "2"),
    ("algorithm.adv_estimator=remax trainer.critic_warmup=1", "trainer.critic_warmup", "no c", "0"),
    ("actor.policy_loss.loss_mode=gspo", "actor.loss_agg_mode", "over resp", "seq-mean-token-mean"),
    ("actor.loss_scale_factor=7", "actor.loss_scale_factor", "seq-mean-token-sum-norm", "null"),
    ("algorithm.filter_groups.enable=true", "rollout.n", "one never does", "2"),
    ("data.gen_batch_size=9", "data.gen_batch_size", "are trained on", "null"),
    ("reward.overlong_buffer.enable=true", "reward.overlong_buffer.len", "at least 1", "1"),
    (
        "data.max_response_length=10 reward.overlong_buffer={enable: true, len: 11}",
        "reward.overlong_buffer.len", "max_response_length=10", "10",
    ),
    (f"{RC}.rollout_is_threshold=0.5_2", f"{RC}.rollout_is_threshold", "0.52", "2.0"),
    (f"{RC}.rollout_is_threshold=5.0_2.0", f"{RC}.rollout_is_threshold", "above", "2.0"),
    (f"{RC}.rollout_rs=seq_mean_k4", f"{RC}.rollout_rs", "is none of token_k1", ""),
    (f"{RC}.rollout_rs=token_k2", f"{RC}.rollout_rs", "need one bound", ""),
    (f"{RC}.rollout_rs_threshold=2", f"{RC}.rollout_rs_threshold", "only with", "null"),
    (f"{RC}.loss_type=reinforce", f"{RC}.loss_type", "bypass_mode=true", "ppo_clip"),
    (
        f"{RC}={{bypass_mode: true, rollout_is: token}}",
        f"{RC}.rollout_is", "count twice", "null",
    ),
    (
        f"{RC}={{bypass_mode: true, loss_type: reinforce}} actor.policy_loss.loss_mode=cispo",
        "actor.policy_loss.loss_mode", "is a loss itself", "vanilla",
    ),
    (f"{RC}.rollout_is_batch_normalize=true", f"{RC}.rollout_is_batch_normalize",
     "needs rollout_is", "false"),
    (f"{RC}.alarm_threshold=1.0", f"{RC}.alarm_threshold", "above 1", "1.05"),
    (
        f"{RC}.bypass_mode=true algorithm.use_kl_in_reward=true",
        "algorithm.use_kl_in_reward", "leaves out", "false",
    ),
    ("rollout.top_p=0.9", "rollout.top_p", "truncated distribution", "1"),
    ("rollout.top_k=20", "rollout.top_k", "truncated distribution", "-1"),
    # the ratio of bypass mode would be to the truncated distribution
    (f"rollout.top_k=20 {RC}.bypass_mode=true", "rollout.top_k", "truncated", "-1"),
    # transformers' log-probs are of the full distribution: no weight can tell
    (f"rollout.top_p=0.9 rollout.name=hf {RC}.rollout_is=token", "rollout.top_p", "vLLM", "1"),
]  # fmt: skip


def split(overrides: str) -> list[str]:
    """Cut at the spaces that are followed by a key."""
    found: list[str] = []
    for word in overrides.split(" "):
        if "=" in word or not found:
            found.append(word)
        else:
            found[-1] += f" {word}"
    return found


@pytest.mark.parametrize(("overrides", "key", "word", "nearest"), CASES)
def test_what_does_not_go_together_is_refused(refuse, overrides, key, word, nearest) -> None:
    (found,) = refuse("actor.use_kl_loss=false", *split(overrides), text=SMALL)
    assert found.key.startswith(key) and word in found.rule
    assert found.nearest == nearest


SMALL = "trainer: {n_gpus_per_node: 1}\nactor: {ppo_micro_batch_size_per_gpu: 1}\n"


@pytest.mark.parametrize(
    "overrides",
    [
        f"rollout.top_p=0.9 {RC}.rollout_is=token",
        f"{RC}.rollout_is=sequence {RC}.rollout_is_threshold=0.5_5.0",
        f"{RC}={{bypass_mode: true, loss_type: reinforce, rollout_is: token}}",
        f"{RC}={{bypass_mode: true, rollout_rs: seq_mean_k1, rollout_rs_threshold: 0.9_1.1}}",
        "data.gen_batch_size=7 rollout.n=2 algorithm.filter_groups.enable=true",
        "actor.loss_agg_mode=seq-mean-token-sum-norm actor.loss_scale_factor=100",
        "algorithm.adv_estimator=remax",
        "+reward.reward_kwargs.overlong_buffer_cfg={enable: true, len: 9, log: false}",
    ],
)
def test_what_goes_together_is_accepted(load, overrides) -> None:
    load(*split(overrides), text=SMALL)
