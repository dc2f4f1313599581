from __future__ import annotations

from operator import attrgetter

import pytest

from mrl.config.aliases import ALIASES, LEGACY, outcome, rename
from mrl.config.typed import schema_keys

ONE_RANK = "actor: {ppo_micro_batch_size_per_gpu: 1}"
TWO_RANKS = ONE_RANK + "\ntrainer: {n_gpus_per_node: 2}"


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("actor_rollout_ref.model.path=m", "model.path", "m"),
        (
            "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=2",
            "ref.log_prob_micro_batch_size_per_gpu",
            2,
        ),
        ("actor.ulysses_sequence_parallel_size=2", "actor.megatron.context_parallel_size", 2),
        (
            "actor_rollout.megatron.tensor_parallel_size=2",
            "actor.megatron.tensor_model_parallel_size",
            2,
        ),
        ("critic.megatron.tensor_parallel_size=2", "critic.megatron.tensor_model_parallel_size", 2),
        ("actor_rollout.vllm.max_num_seqs=64", "rollout.max_num_seqs", 64),
        ("actor_rollout.vllm.gpu_memory_utilization=0.7", "rollout.gpu_memory_utilization", 0.7),
        ("actor_rollout.vllm.tensor_parallel_size=2", "rollout.tensor_model_parallel_size", 2),
        ("critic.model.path=c", "critic.path", "c"),
        ("custom_reward_function.path=r.py", "reward.custom_reward_function.path", "r.py"),
        ("custom_reward_function.name=f", "reward.custom_reward_function.name", "f"),
        ("algorithm.kl_penalty=k3", "algorithm.kl_penalty", "k3"),
        ("data.train_files=x.parquet", "data.train_files", ["x.parquet"]),
        ("model.target_modules=linear_qkv", "model.lora.target_modules", ("linear_qkv",)),
        (
            "model.target_modules=all-linear",
            "model.lora.target_modules",
            ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"),
        ),
        (
            "rollout.enable_rollout_routing_replay=True",
            "actor.router_replay.mode",
            "R3",
        ),
        ("data.filter_overlong_prompts=True", "data.truncation", "filter"),
        ("data.filter_overlong_prompts=False", "data.truncation", "error"),
        ("trainer.logger=none", "trainer.logger", []),
        ("trainer.logger=console", "trainer.logger", ["console"]),
        ("trainer.test_freq=0", "trainer.test_freq", 0),
        ("trainer.enable_resharding=true", "placement.mode", "colocated"),
        ("trainer.colocate_actor_critic=true", "placement.mode", "colocated"),
        ("actor_rollout_ref.model.use_remove_padding=True", "model.path", "???"),
        ("actor_rollout_ref.actor.strategy=megatron", "model.path", "???"),
        (
            "actor_rollout_ref.actor.megatron.param_offload=True",
            "actor.megatron.param_offload",
            True,
        ),
        (
            "actor_rollout_ref.actor.megatron.override_transformer_config.recompute_granularity="
            "selective",
            "actor.megatron.recompute_granularity",
            "selective",
        ),
        (
            "actor_rollout_ref.model.enable_gradient_checkpointing=True",
            "actor.megatron.recompute_granularity",
            "full",
        ),
    ],
)
def test_old_and_short_spellings_mean_the_same_in_overrides_and_files(load, override, key, value):
    assert attrgetter(key)(load(override, text=TWO_RANKS)) == value
    written, _, setting = override.partition("=")
    assert attrgetter(key)(load(text=f"{TWO_RANKS}\n{written}: {setting}")) == value


@pytest.mark.parametrize(
    ("override", "word", "nearest"),
    [
        ("trainer.enable_resharding=false", "cannot be switched off", "true"),
        ("trainer.colocate_actor_critic=false", "not supported yet", "true"),
        ("data.filter_overlong_prompts=maybe", "filtered", "true or false"),
        ("actor_rollout_ref.actor.strategy=fsdp", "Megatron-Core", "megatron"),
        ("actor_rollout_ref.model.enable_gradient_checkpointing=maybe", "again", "true or false"),
    ],
)
def test_legacy_values_without_meaning_are_refused_with_a_reason(refuse, override, word, nearest):
    (found,) = refuse(override, text=ONE_RANK)
    assert word in found.rule and found.nearest == nearest


@pytest.mark.parametrize(
    ("written", "kept"),
    [
        ("model.enable_gradient_checkpointing=True", "recompute_granularity=selective"),
        ("model.enable_gradient_checkpointing=True", "recompute_num_layers=2"),
        ("model.enable_gradient_checkpointing=False", "recompute_granularity=full"),
    ],
)
def test_a_legacy_key_and_the_key_it_stands_for_cannot_differ(refuse, written, kept):
    violations = refuse(written, f"actor.megatron.{kept}", text=ONE_RANK)
    assert any("keep one of the two" in v.rule for v in violations)


def test_a_legacy_key_goes_with_keys_that_say_the_same(load):
    switch = "model.enable_gradient_checkpointing=True"
    same = "actor.megatron.override_transformer_config.recompute_granularity=full"
    assert load(switch, same, text=ONE_RANK) == load(switch, text=ONE_RANK)


def test_steps_and_ranks_to_profile_are_understood_as_verl_spells_them(load):
    def profiled(*overrides):
        trainer = load(*overrides, text=ONE_RANK).trainer
        return trainer.profile_steps, trainer.profile_ranks

    assert profiled("global_profiler.steps=[1,2]", "trainer.n_gpus_per_node=1") == ([1, 2], [0])
    assert profiled("trainer.profile_steps=null") == ([], [0])
    ranks = "actor_rollout_ref.actor.profiler.ranks=[0]"
    everyone = "actor_rollout_ref.actor.profiler.all_ranks"
    assert profiled("global_profiler.steps=[3]", ranks, f"{everyone}=False") == ([3], [0])
    assert profiled("global_profiler.steps=[3]", ranks, f"{everyone}=True") == ([3], None)
    assert profiled("global_profiler.tool=nsys", "critic.profiler.enable=True") == ([], [0])


def test_filtering_leaves_nothing_to_truncate(load):
    overrides = ("data.filter_overlong_prompts=True", "data.truncation=error")
    assert load(*overrides, text=ONE_RANK).data.truncation == "filter"
    assert load(*reversed(overrides), text=ONE_RANK).data.truncation == "filter"


def test_a_later_override_in_another_spelling_wins(load):
    config = load("actor.clip_ratio=0.3", "actor_rollout_ref.actor.clip_ratio=0.4", text=ONE_RANK)
    assert config.actor.clip_ratio == 0.4


def test_one_file_cannot_set_a_key_twice_to_different_values(refuse, load):
    twice = ONE_RANK + "\nrollout: {n: 2}\nactor_rollout_ref: {rollout: {n: %d}}"
    (found,) = refuse(text=twice % 3)
    assert found.key == "actor_rollout_ref.rollout.n" and "the same key as rollout.n" in found.rule
    assert load(text=twice % 2).rollout.n == 2


def test_every_alias_leads_to_a_key_of_the_schema():
    keys = schema_keys()
    for old, new in ALIASES.items():
        assert old not in keys
        if isinstance(new, str) and new:
            assert rename(old) in keys or outcome(rename(old)) is not None
    for legacy in LEGACY.values():
        for settings in legacy.settings.values():
            assert settings.keys() <= keys.keys()
