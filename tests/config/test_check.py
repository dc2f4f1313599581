from __future__ import annotations

import pytest

from mrl.config import (
    Config,
    ConfigError,
    check_config,
    check_files,
    check_trainable,
    training_steps,
)
from mrl.config.check_model import MODEL_TYPES

ONE_RANK = "actor: {ppo_micro_batch_size_per_gpu: 1}"
GRPO = "algorithm.adv_estimator=grpo"


def keys(violations):
    return [violation.key for violation in violations]


def test_defaults_run_on_one_rank(load):
    load(text=ONE_RANK)


def test_samples_that_do_not_divide_over_dp_name_keys_numbers_and_nearest(refuse):
    (found,) = refuse("data.train_batch_size=64", "actor.ppo_mini_batch_size=64", "rollout.n=1")
    text = str(found)
    assert "data.train_batch_size" in text and "actor.ppo_mini_batch_size" in text
    assert found.value == 64 and "dp 6" in found.rule
    assert found.nearest.startswith("60 and 66")
    assert "must then divide the 10 and 11 samples" in found.nearest


def test_dp_of_a_model_parallel_world_is_checked(refuse):
    layout = (
        "trainer.n_gpus_per_node=16",
        "actor.megatron.tensor_model_parallel_size=2",
        "actor.megatron.pipeline_model_parallel_size=4",
        "actor.ppo_micro_batch_size_per_gpu=1",
        "data.train_batch_size=3",
        "rollout.n=1",
    )
    (found,) = refuse(*layout, "actor.ppo_mini_batch_size=3")
    assert found.value == 3 and "dp 2" in found.rule and found.nearest == "2 and 4"
    divided = [v for v in refuse(*layout) if "do not divide over dp 2" in v.rule]
    assert keys(divided) == ["data.train_batch_size"]


@pytest.mark.parametrize(
    ("settings", "share", "nearest"),
    [
        (("1", "2", "8", "1"), "0.25 a rank", "4"),
        (("4", "1", "4", "2"), "= 1", "1"),
    ],
)
def test_a_share_below_one_sample_or_micro_batch_is_refused(refuse, settings, share, nearest):
    mini, n, dp, micro = settings
    (found,) = refuse(
        f"data.train_batch_size={mini}",
        f"actor.ppo_mini_batch_size={mini}",
        f"rollout.n={n}",
        f"trainer.n_gpus_per_node={dp}",
        f"actor.ppo_micro_batch_size_per_gpu={micro}",
        GRPO,
        text="{}",
    )
    assert share in str(found) and found.nearest == nearest


def test_mini_batch_must_divide_the_batch(refuse):
    found = refuse("data.train_batch_size=60", "actor.ppo_mini_batch_size=16")
    assert found[0].key == "actor.ppo_mini_batch_size"
    assert "actor.ppo_mini_batch_size 15 and 20" in found[0].nearest
    assert "data.train_batch_size 48 and 64" in found[0].nearest


def test_nearest_mini_batch_keeps_dividing_the_batch(refuse):
    (found,) = refuse(
        "data.train_batch_size=120",
        "actor.ppo_mini_batch_size=20",
        "actor.ppo_micro_batch_size_per_gpu=1",
        "rollout.n=1",
    )
    assert (found.key, found.nearest) == ("actor.ppo_mini_batch_size", "12 and 24")
    (found,) = refuse(
        "data.train_batch_size=128",
        "actor.ppo_mini_batch_size=64",
        "actor.ppo_micro_batch_size_per_gpu=1",
        "rollout.n=1",
    )
    assert found.nearest == "60 and 66 with data.train_batch_size 120 and 132"


def test_actor_and_critic_are_checked_each_with_its_dp(refuse):
    found = refuse(
        "critic.ppo_mini_batch_size=32",
        "data.train_batch_size=64",
        "rollout.n=3",
        "actor.ppo_mini_batch_size=64",
        "actor.ppo_micro_batch_size_per_gpu=1",
        "critic.megatron.tensor_parallel_size=2",
        "trainer.n_gpus_per_node=10",
    )
    assert any(
        v.key == "critic.ppo_mini_batch_size" and "dp 5 of the critic" in v.rule for v in found
    )
    assert any(
        "actor.ppo_mini_batch_size" in v.key and "dp 10 of the actor" in v.rule for v in found
    )


def test_micro_batch_size_or_a_token_budget_is_needed(refuse, load):
    (found,) = refuse(text="{}")
    assert found.key == "actor.ppo_micro_batch_size_per_gpu"
    load("actor.use_dynamic_bsz=true", text="{}")


def test_tp_must_divide_heads_and_ranks_for_training_and_rollout(refuse, model):
    path = f"model.path={model(num_key_value_heads=28, intermediate_size=28 * 64)}"
    eight = ("trainer.n_gpus_per_node=8", path)
    for key in (
        "actor.megatron.tensor_model_parallel_size",
        "rollout.tensor_model_parallel_size",
    ):
        (found,) = refuse(*eight, f"{key}=8", text=ONE_RANK)
        assert (found.key, found.value, found.nearest) == (key, 8, "1, 2, 4")
        assert "28 attention heads" in found.rule
    (found,) = refuse(
        path,
        "trainer.n_gpus_per_node=28",
        "rollout.tensor_model_parallel_size=8",
        GRPO,
        "data.train_batch_size=28",
        "actor.ppo_mini_batch_size=28",
        text=ONE_RANK,
    )[:1]
    assert found.nearest == "1, 2, 4, 7, 14, 28"


def test_tp_must_fit_key_value_heads(refuse, model):
    seven = (
        "trainer.n_gpus_per_node=7",
        "rollout.tensor_model_parallel_size=7",
        GRPO,
        "rollout.n=7",
    )
    (found,) = refuse(*seven, f"model.path={model(intermediate_size=7 * 64)}", text=ONE_RANK)
    assert "4 key/value heads" in found.rule and found.nearest == "1"


def test_more_tp_ranks_than_key_value_heads_are_legal(load, model):
    path = model(num_attention_heads=8, num_key_value_heads=2)
    load(
        f"model.path={path}",
        "trainer.n_gpus_per_node=4",
        "rollout.tensor_model_parallel_size=4",
        text=ONE_RANK,
    )


def test_training_tp_must_divide_the_rows_of_its_qkv(refuse, load, model):
    """Three heads a rank of 8, and 2 x 1 of 8 more, are 64 rows: three ranks cannot share them."""
    shape = {"num_attention_heads": 6, "num_key_value_heads": 1, "head_dim": 8}
    path = f"model.path={model(**shape, intermediate_size=3 * 64)}"
    three = ("trainer.n_gpus_per_node=3", "rollout.tensor_model_parallel_size=3", "rollout.n=6")
    load(*three, path, GRPO, text=ONE_RANK)
    key = "actor.megatron.tensor_model_parallel_size"
    (found,) = refuse(*three, path, GRPO, f"{key}=3", text=ONE_RANK)
    assert (found.key, found.nearest) == (key, "1") and "64 rows of its QKV" in found.rule


def test_tp_must_divide_the_world(refuse):
    (found,) = refuse("rollout.tensor_model_parallel_size=2", text=ONE_RANK)
    assert found.nearest == "1"
    found = refuse("actor.megatron.tensor_model_parallel_size=4", "actor.use_kl_loss=false")
    assert keys(found) == ["actor.megatron.tensor_model_parallel_size"]
    assert found[0].nearest == "1, 2, 3, 6"


@pytest.mark.parametrize(("layers", "pp", "vpp"), [(30, 4, None), (80, 16, 2)])
def test_layers_are_never_lost_to_the_pipeline(refuse, model, layers, pp, vpp):
    path = model(num_hidden_layers=layers)
    overrides = [
        f"model.path={path}",
        "trainer.n_gpus_per_node=16",
        f"actor.megatron.pipeline_model_parallel_size={pp}",
        GRPO,
    ]
    if vpp:
        overrides += [
            f"actor.megatron.virtual_pipeline_model_parallel_size={vpp}",
            "actor.ppo_micro_batch_size_per_gpu=16",
        ]
    (found,) = refuse(*overrides, text=ONE_RANK)
    assert f"the {layers} layers" in found.rule
    assert found.key == "actor.megatron.pipeline_model_parallel_size"
    assert found.nearest == ("1, 2" if layers == 30 else "1, 2, 4, 8")


def test_interleaving_needs_whole_rounds_of_micro_batches_in_every_pass(refuse, load):
    interleaved = (
        "trainer.n_gpus_per_node=6",
        "actor.megatron.pipeline_model_parallel_size=6",
        "actor.megatron.virtual_pipeline_model_parallel_size=2",
        "data.train_batch_size=12",
        "actor.ppo_mini_batch_size=12",
        "actor.use_kl_loss=true",
        "critic.ppo_micro_batch_size_per_gpu=2",
    )
    found = refuse(
        *interleaved,
        "actor.ppo_micro_batch_size_per_gpu=4",
        "rollout.log_prob_micro_batch_size_per_gpu=4",
        text="{}",
    )
    assert keys(found) == [
        "actor.ppo_micro_batch_size_per_gpu",
        "rollout.log_prob_micro_batch_size_per_gpu",
        "rollout.log_prob_micro_batch_size_per_gpu",
    ]
    assert "gives 3 micro-batches" in found[0].rule and found[0].nearest == "2"
    assert "of the ref" in found[2].rule
    load(*interleaved, "actor.ppo_micro_batch_size_per_gpu=2", text="{}")
    load(*interleaved, "actor.use_dynamic_bsz=true", text="{}")


def test_interleaving_needs_a_pipeline(refuse):
    found = refuse("actor.megatron.virtual_pipeline_model_parallel_size=2", text=ONE_RANK)
    assert any("needs pipeline_model_parallel_size above 1" in v.rule for v in found)


def test_lengths_must_fit_the_model_and_the_engine(refuse, load, model):
    half = f"model.path={model(max_position_embeddings=768)}"
    (found,) = refuse(half, text=ONE_RANK)
    assert found.value == 1024 and "768" in found.rule
    (found,) = refuse("rollout.max_model_len=768", text=ONE_RANK)
    assert "512 + 512 = 1024" in found.rule
    load(half, "data.max_prompt_length=256", text=ONE_RANK)


def test_unsupported_and_broken_models_are_refused(refuse, model, tmp_path):
    (found,) = refuse(f"model.path={model(model_type='gpt2')}", text=ONE_RANK)
    assert "'gpt2'" in found.rule and found.nearest == " or ".join(MODEL_TYPES)
    (tmp_path / "model" / "config.json").write_text("{")
    assert "cannot be read" in refuse(f"model.path={tmp_path / 'model'}", text=ONE_RANK)[0].rule
    (tmp_path / "model" / "config.json").write_text('{"model_type": "llama"}')
    assert "lacks 'num" in refuse(f"model.path={tmp_path / 'model'}", text=ONE_RANK)[0].rule


def test_a_model_that_is_not_there_does_not_stop_planning(load):
    load("model.path=nowhere", text=ONE_RANK)


def test_temperature_zero_is_refused_for_training_and_allowed_for_validation(refuse, load):
    (found,) = refuse("rollout.temperature=0", text=ONE_RANK)
    assert found.key == "rollout.temperature" and found.nearest == "1.0"
    load("rollout.val_kwargs.temperature=0", text=ONE_RANK)
    assert keys(refuse("rollout.temperature=.nan", text=ONE_RANK)) == ["rollout.temperature"]


def test_both_kl_switches_are_refused(refuse):
    (found,) = refuse("algorithm.use_kl_in_reward=true")
    assert "count twice" in found.rule


@pytest.mark.parametrize(
    ("override", "nearest"),
    [
        ("algorithm.adv_estimator=gpro", "grpo"),
        ("algorithm.adv_estimator=reinforce_pp", "reinforce_plus_plus"),
        ("actor.loss_agg_mode=token_mean", "token-mean"),
        ("trainer.logger=[console,tensorbord]", "tensorboard"),
        ("rollout.gpu_memory_utilization=1.5", "1"),
        ("rollout.n=0", "1"),
        ("actor.clip_ratio=-0.2", "0.2"),
        ("actor.optim.betas=[0.9,1.0]", "(0.9, 0.999)"),
        ("rollout.top_k=0", "-1"),
        ("trainer.critic_warmup=-1", "0"),
        ("rollout.val_kwargs.n=4", "1"),
        ("rollout.max_num_batched_tokens=100", "256"),
        ("actor.optim.min_lr=1", "1e-06"),
        ("placement.mode=split", ""),
    ],
)
def test_a_value_outside_its_range_is_refused_with_the_nearest_legal_one(refuse, override, nearest):
    (found,) = refuse(override, text=ONE_RANK)
    assert found.key == override.split("=")[0] and found.nearest == nearest


@pytest.mark.parametrize(
    ("settings", "key", "nearest"),
    [
        ("{profile_steps: [1], profile_ranks: [0, 6]}", "trainer.profile_ranks", "5"),
        ("{profile_steps: [1], profile_ranks: [-1]}", "trainer.profile_ranks", "0"),
        ("{profile_steps: [1], profile_ranks: [1, 0, 1]}", "trainer.profile_ranks", "[0, 1]"),
        ("{profile_steps: [0]}", "trainer.profile_steps", "1"),
        ("{profile_steps: [3, 21], total_training_steps: 20}", "trainer.profile_steps", "20"),
    ],
)
def test_steps_and_ranks_to_profile_must_be_there(refuse, settings, key, nearest):
    (found,) = refuse(f"trainer={settings}")
    assert (found.key, found.nearest) == (key, nearest)


def test_a_step_to_profile_past_the_end_of_the_data_is_refused_before_the_start(load):
    config = load("trainer={profile_steps: [4, 5], total_epochs: 2}")
    with pytest.raises(ConfigError, match=r"trainer.profile_steps.*the run has 4 steps"):
        training_steps(config, 150)
    assert training_steps(load("trainer.profile_steps=[4]", "trainer.total_epochs=2"), 150) == 4


def test_settings_without_effect_or_sense_are_refused(refuse):
    assert keys(refuse(GRPO, "trainer.critic_warmup=2", text=ONE_RANK)) == ["trainer.critic_warmup"]
    assert keys(refuse("algorithm.adv_estimator=rloo", text=ONE_RANK)) == ["rollout.n"]
    assert keys(refuse("trainer.resume_mode=resume_path", text=ONE_RANK)) == [
        "trainer.resume_from_path"
    ]


def test_a_config_made_in_python_is_checked_too():
    assert keys(check_config(Config())) == ["actor.ppo_micro_batch_size_per_gpu"]


@pytest.mark.parametrize(
    ("overrides", "key", "rule"),
    [
        ("context_parallel_size=4", "context_parallel_size", "must divide the 6 attention heads"),
        ("cp_comm_type=p2p", "cp_comm_type", "has no effect"),
        ("hierarchical_context_parallel_sizes=[2,1]", "hierarchical_context", "is for cp_comm"),
        ("context_parallel_size=2 cp_comm_type=a2a+p2p", "hierarchical_context", "needs two sizes"),
        ("context_parallel_size=2 cp_comm_type=p2p dtype=float32", "cp_comm_type", "bfloat16"),
    ],
)
def test_context_parallelism_says_what_it_needs(refuse, model, overrides, key, rule):
    shape = f"model.path={model(num_attention_heads=6, num_key_value_heads=2)}"
    megatron = [f"actor.megatron.{override}" for override in overrides.split()]
    ranks = ("trainer.n_gpus_per_node=4", "data.train_batch_size=4", "actor.ppo_mini_batch_size=4")
    (found,) = refuse(shape, *ranks, GRPO, "rollout.n=2", *megatron, text=ONE_RANK)
    assert key in found.key and rule in found.rule


def test_a_ring_needs_no_heads_for_its_ranks(load, model):
    shape = f"model.path={model(num_attention_heads=6, num_key_value_heads=2)}"
    ranks = ("trainer.n_gpus_per_node=4", GRPO, "rollout.n=2")
    ring = ("actor.megatron.context_parallel_size=4", "actor.megatron.cp_comm_type=p2p")
    assert load(shape, *ranks, *ring, text=ONE_RANK).actor.megatron.cp_comm_type == "p2p"


def test_missing_files_are_told_all_at_once(load, model, tmp_path):
    rows = tmp_path / "rows.parquet"
    rows.touch()
    good = (f"model.path={model()}", f"data.train_files={rows}")
    check_files(load(*good, text=ONE_RANK))
    with pytest.raises(ConfigError) as caught:
        check_files(
            load(
                "model.path=nowhere",
                "data.train_files=[a.parquet,b.parquet]",
                "data.val_files=c.parquet",
                "custom_reward_function.path=reward.py",
                text=ONE_RANK,
            )
        )
    assert keys(caught.value.violations) == [
        "model.path",
        "data.train_files",
        "data.train_files",
        "data.val_files",
        "reward.custom_reward_function.path",
    ]
    with pytest.raises(ConfigError, match="a model folder is needed"):
        check_files(load(text=ONE_RANK))


def test_a_model_folder_without_weights_is_refused(load, model, tmp_path):
    (tmp_path / "rows.parquet").touch()
    config = load(
        f"model.path={model(weights=False)}",
        f"data.train_files={tmp_path / 'rows.parquet'}",
        text=ONE_RANK,
    )
    with pytest.raises(ConfigError, match="no weights"):
        check_files(config)


SPLIT = ("placement.mode=disaggregated", "trainer.n_gpus_per_node=4")


@pytest.mark.parametrize(
    ("overrides", "key", "nearest"),
    [
        (SPLIT, "placement.rollout_gpus", "2"),
        ((*SPLIT, "placement.rollout_gpus=4"), "placement.rollout_gpus", "3"),
        ((*SPLIT, "placement.rollout_gpus=0"), "placement.rollout_gpus", "1"),
        ((*SPLIT, "placement.trainer_gpus=5"), "placement.trainer_gpus", "3"),
        (
            (*SPLIT, "placement.trainer_gpus=1", "placement.rollout_gpus=2"),
            "placement.trainer_gpus + placement.rollout_gpus",
            "at least 4",
        ),
        (("placement.rollout_gpus=1",), "placement.rollout_gpus", "null"),
    ],
)
def test_trainer_and_engine_must_fill_the_ranks(refuse, overrides, key, nearest):
    (found,) = refuse(*overrides, text=ONE_RANK)
    assert (found.key, found.nearest) == (key, nearest)


def test_layouts_are_checked_against_the_ranks_of_their_side(refuse, load):
    sides = (*SPLIT, "trainer.n_gpus_per_node=6", "placement.rollout_gpus=2")
    found = refuse(*sides, "rollout.tensor_model_parallel_size=3", text=ONE_RANK)
    assert keys(found) == ["rollout.tensor_model_parallel_size"]
    found = refuse(*sides, "actor.megatron.tensor_model_parallel_size=3", text=ONE_RANK)
    assert keys(found)[0] == "actor.megatron.tensor_model_parallel_size"
    load(*sides, "actor.megatron.tensor_model_parallel_size=4", text=ONE_RANK)


@pytest.mark.parametrize(
    ("value", "meaning"),
    [("true", "every_step"), ("false", "off"), ("off", "off"), ("first_step", "first_step")],
)
def test_verification_is_switched_by_name_or_by_truth(load, value, meaning):
    config = load(f"resharding.verify={value}", text=ONE_RANK)
    assert config.resharding.verify == meaning


def test_expert_parallelism_must_divide_the_experts(refuse, load, model):
    sizes = {"model_type": "qwen3_moe", "num_experts": 6, "moe_intermediate_size": 8}
    ranks = ("trainer.n_gpus_per_node=4", GRPO, "rollout.n=4", f"model.path={model(**sizes)}")
    (found,) = refuse(*ranks, "actor.megatron.expert_model_parallel_size=4", text=ONE_RANK)
    assert "6 experts" in found.rule and found.nearest == "1, 2, 3, 6"
    load(*ranks, "actor.megatron.expert_model_parallel_size=2", text=ONE_RANK)


def test_models_that_only_have_a_table_are_planned_but_not_trained(load, model):
    config = load(f"model.path={model(model_type='gemma2')}", text=ONE_RANK)
    with pytest.raises(ConfigError, match=r"gemma2.*not trained yet"):
        check_trainable(config)


def test_uneven_stages_must_place_every_layer(refuse, load, model):
    path = f"model.path={model(num_hidden_layers=7)}"
    ranks = ("trainer.n_gpus_per_node=2", GRPO, "rollout.n=2", path)
    pp = "actor.megatron.pipeline_model_parallel_size=2"
    (found,) = refuse(*ranks, pp, text=ONE_RANK)
    assert "num_layers_in_first_pipeline_stage" in found.rule
    load(*ranks, pp, "actor.megatron.num_layers_in_first_pipeline_stage=3", text=ONE_RANK)
    load(*ranks, pp, "actor.megatron.account_for_loss_in_pipeline_split=true", text=ONE_RANK)
    (found,) = refuse(
        *ranks, pp, "actor.megatron.num_layers_in_first_pipeline_stage=7", text=ONE_RANK
    )
    assert "7 layers" in found.rule
