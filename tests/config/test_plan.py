from __future__ import annotations

import dataclasses
import json
import pickle

import pytest

from mrl.config import ConfigError, training_steps, warmup_steps
from mrl.config.schema import OptimConfig

SMALL = """
data: {train_batch_size: 4}
actor: {ppo_mini_batch_size: 4, ppo_micro_batch_size_per_gpu: 1}
"""


def test_six_ranks_have_the_numbers_of_the_worked_example(plan):
    found = plan()
    assert (found.world_size, found.prompts, found.samples) == (6, 60, 720)
    assert found.prompts_per_replica == (20, 20, 20)
    assert found.sequences_per_replica == (240, 240, 240)
    assert found.tokens_per_step == 720 * 1024
    for name in ("actor", "critic"):
        role = found.roles[name]
        assert (role.dp, role.samples_per_rank) == (6, 120)
        assert (role.micro_batches, role.logprob_passes, role.optimizer_steps) == (15, 15, 1)
    ref = found.roles["ref"]
    assert (ref.samples_per_rank, ref.micro_batches, ref.optimizer_steps) == (120, 0, 0)
    assert ref.logprob_passes == 15


def test_sequence_shards_of_two_halve_dp_and_double_the_work_of_a_rank(plan):
    found = plan("actor_rollout_ref.actor.ulysses_sequence_parallel_size=2")
    actor = found.roles["actor"]
    assert (actor.dp, actor.layout.cp) == (3, 2)
    assert (actor.samples_per_rank, actor.micro_batches, actor.optimizer_steps) == (240, 30, 1)
    assert found.samples == 720


def test_prompts_need_not_divide_over_replicas(plan):
    found = plan("data.train_batch_size=64", "actor.ppo_mini_batch_size=64")
    assert found.prompts_per_replica == (22, 21, 21)
    assert found.sequences_per_replica == (264, 252, 252)
    assert found.roles["actor"].samples_per_rank == 128


def test_mini_batch_counts_prompts_and_layout_does_not_change_the_steps(plan):
    sizes = ("data.train_batch_size=1024", "actor.ppo_mini_batch_size=256", "rollout.n=5")
    ranks = ("trainer.n_gpus_per_node=8", "actor.ppo_micro_batch_size_per_gpu=1")
    for layout in ((), ("actor.megatron.tensor_model_parallel_size=2",)):
        actor = plan(*sizes, *ranks, *layout).roles["actor"]
        assert actor.optimizer_steps == 4
        assert actor.samples_per_rank * actor.dp == 1280
    assert plan(*sizes, *ranks, "actor.ppo_epochs=2").roles["actor"].optimizer_steps == 8


def test_dp_is_the_world_over_tp_pp_and_cp(plan):
    found = plan(
        "trainer.nnodes=2",
        "trainer.n_gpus_per_node=8",
        "actor.megatron.tensor_model_parallel_size=2",
        "actor.megatron.pipeline_model_parallel_size=4",
        "data.train_batch_size=3",
        "actor.ppo_mini_batch_size=3",
        "actor.ppo_micro_batch_size_per_gpu=2",
        "rollout.n=4",
    )
    assert found.roles["actor"].dp == 2
    assert found.roles["actor"].samples_per_rank == 6


def test_roles_are_on_when_something_uses_them(plan):
    def enabled(*overrides):
        return [name for name, role in plan(*overrides, text=SMALL).roles.items() if role.enabled]

    grpo = "algorithm.adv_estimator=grpo"
    assert enabled() == ["actor", "critic"]
    assert enabled(grpo) == ["actor"]
    assert enabled(grpo, "actor.use_kl_loss=true") == ["actor", "ref"]
    assert enabled(grpo, "algorithm.use_kl_in_reward=true") == ["actor", "ref"]


def test_what_is_not_set_follows_the_actor(plan):
    critic = plan(text=SMALL).roles["critic"]
    assert (critic.micro_batch_size, critic.optimizer_steps) == (1, 1)
    found = plan(
        "critic.ppo_mini_batch_size=2",
        "critic.ppo_epochs=3",
        "critic.ppo_micro_batch_size_per_gpu=2",
        "rollout.log_prob_micro_batch_size_per_gpu=4",
        "model.path=policy",
        text=SMALL,
    )
    critic = found.roles["critic"]
    assert (critic.micro_batch_size, critic.log_prob_micro_batch_size) == (2, 2)
    assert (critic.optimizer_steps, critic.micro_batches, critic.logprob_passes) == (6, 1, 2)
    assert found.roles["ref"].log_prob_micro_batch_size == 4
    assert critic.model_path == found.tokenizer_path == "policy"


def test_token_budgets_leave_the_counts_open(plan):
    actor = plan("actor.use_dynamic_bsz=true", "actor.ppo_max_token_len_per_gpu=4096").roles[
        "actor"
    ]
    assert actor.micro_batches is None and actor.logprob_passes is None
    assert (actor.micro_batch_size, actor.max_token_len) == (None, 4096)
    assert (actor.log_prob_micro_batch_size, actor.log_prob_max_token_len) == (None, 4096)
    mixed = plan("actor.use_dynamic_bsz=true", "rollout.log_prob_use_dynamic_bsz=false")
    assert mixed.roles["actor"].logprob_passes == 15
    assert mixed.roles["actor"].log_prob_max_token_len is None


def test_sequence_parallel_is_in_force_only_with_tensor_parallel(plan):
    tp2 = "actor.megatron.tensor_model_parallel_size=2"
    assert not plan().roles["actor"].layout.sequence_parallel
    assert plan(tp2).roles["actor"].layout.sequence_parallel
    off = plan(tp2, "actor.megatron.sequence_parallel=false")
    assert not off.roles["actor"].layout.sequence_parallel


def test_derived_settings_are_resolved(plan):
    found = plan("actor.clip_ratio=0.3", "actor.clip_ratio_high=0.4")
    assert (found.clip_ratio_low, found.clip_ratio_high) == (0.3, 0.4)
    assert found.max_model_len == 1024
    assert plan("rollout.max_model_len=2000").max_model_len == 2000
    val = "rollout.val_kwargs.temperature=0.6"
    assert plan(val).val_temperature == 0.0
    assert plan(val, "rollout.val_kwargs.do_sample=true").val_temperature == 0.6


def test_json_has_the_keys_that_scripts_read(plan):
    found = json.loads(json.dumps(plan().to_json()))
    assert found["samples"] == 720 and found["replicas"] == 3
    assert found["prompts_per_replica"] == [20, 20, 20]
    assert found["sequences_per_replica"] == [240, 240, 240]
    for role in ("actor", "critic", "ref"):
        keys = {"enabled", "dp", "samples_per_rank", "micro_batches", "logprob_passes"}
        assert keys | {"optimizer_steps"} <= found["roles"][role].keys()


def test_a_plan_is_frozen_and_travels(plan):
    found = plan()
    assert pickle.loads(pickle.dumps(found)) == found
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.samples = 1


def test_legal_but_surprising_settings_are_warned_of(plan):
    def warned(word, *overrides):
        return any(word in warning for warning in plan(*overrides, text=SMALL).warnings)

    assert plan(text=SMALL).warnings == ()
    weighed = "algorithm.rollout_correction.rollout_is=token"
    assert warned("truncated distribution", "rollout.top_p=0.9", weighed)
    assert warned("truncated distribution", "rollout.top_k=20", weighed)
    assert warned("group of one", "algorithm.adv_estimator=grpo")
    assert warned("runs alone", "actor.use_dynamic_bsz=true", "actor.ppo_max_token_len_per_gpu=9")
    assert warned("is not used", "actor.use_dynamic_bsz=true")
    assert warned(
        "get no prompt",
        "trainer.n_gpus_per_node=8",
        "data.train_batch_size=4",
        "rollout.n=2",
    )


def test_steps_are_counted_over_whole_batches(load):
    config = load("trainer.total_epochs=3", text=SMALL)
    assert training_steps(config, 11) == 2 * 3
    assert training_steps(load("trainer.total_training_steps=5", text=SMALL), 11) == 5


def test_fewer_rows_than_a_batch_is_an_error_not_a_run_of_no_steps(load):
    config = load("data.train_batch_size=16", "actor.ppo_mini_batch_size=16", text=SMALL)
    with pytest.raises(ConfigError, match="10 rows after filtering < train_batch_size 16"):
        training_steps(config, 10)


def test_warmup_is_a_number_or_a_share_of_the_run():
    assert warmup_steps(OptimConfig(lr_warmup_steps=7, lr_warmup_steps_ratio=0.5), 100) == 7
    assert warmup_steps(OptimConfig(lr_warmup_steps_ratio=0.1), 100) == 10
    assert warmup_steps(OptimConfig(), 100) == 0


def test_trainer_and_engine_count_their_own_ranks(plan):
    split = ("placement.mode=disaggregated", "placement.rollout_gpus=2", "data.train_batch_size=64")
    found = plan(*split, "actor.ppo_mini_batch_size=64")
    assert (found.world_size, found.trainer_world, found.rollout_world) == (6, 4, 2)
    assert (found.replicas, found.roles["actor"].dp) == (1, 4)
    mixed = plan(*split, "actor.ppo_mini_batch_size=64", "placement.trainer_gpus=6",
                 "actor.ppo_micro_batch_size_per_gpu=8")  # fmt: skip
    assert (mixed.trainer_world, mixed.rollout_world, mixed.roles["actor"].dp) == (6, 2, 6)
