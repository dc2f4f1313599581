from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest

from mrl.config import ConfigError, build_plan, load_config, save_resolved

ONE_RANK = "actor: {ppo_micro_batch_size_per_gpu: 1}"


def told(violations):
    return {violation.key: f"{violation.rule} {violation.nearest}" for violation in violations}


def test_a_file_is_merged_over_its_chain_of_bases(tmp_path):
    (tmp_path / "common").mkdir()
    (tmp_path / "common" / "base.yaml").write_text(
        "actor: {ppo_micro_batch_size_per_gpu: 1, clip_ratio: 0.1}\nrollout: {n: 2, stop: [a, b]}"
    )
    (tmp_path / "middle.yaml").write_text("base: common/base.yaml\nrollout: {n: 3}")
    (tmp_path / "run.yaml").write_text("base: middle.yaml\nrollout: {stop: [c]}")
    config = load_config(tmp_path / "run.yaml", ["actor.ppo_epochs=4"])
    assert (config.rollout.n, config.rollout.stop) == (3, ["c"])
    assert (config.actor.clip_ratio, config.actor.ppo_epochs) == (0.1, 4)


def test_overrides_win_in_order_and_take_the_spellings_of_verl_users(load):
    config = load(
        "rollout.n=2",
        "+actor_rollout_ref.rollout.n=3",
        "++rollout.n=4",
        "actor.optim.lr=1e-5",
        "trainer.experiment_name='two words'",
        "data.train_files=['a.parquet', 'b.parquet']",
        "rollout.max_model_len=null",
        'rollout.stop=["="]',
        text=ONE_RANK,
    )
    assert config.rollout.n == 4 and config.rollout.stop == ["="]
    assert config.actor.optim.lr == 1e-5
    assert config.trainer.experiment_name == "two words"
    assert config.data.train_files == ["a.parquet", "b.parquet"]


def test_unknown_keys_are_all_told_with_the_nearest_known_one(refuse):
    found = told(
        refuse(
            "actor.optim.lrr=1e-6",
            "+rollout.temprature=0.7",
            "actor_rollout_ref.actor.clip_ration=0.1",
            "train_batch_size=8",
            "data.seed.deep=1",
            text="modle: {path: x}\nactor: {ppo_micro_batch_size_per_gpu: 1, ppo_epoch: 2}",
        )
    )
    assert {key: rule.split("did you mean ")[1].strip() for key, rule in found.items()} == {
        "modle.path": "model.path?",
        "actor.ppo_epoch": "actor.ppo_epochs?",
        "actor.optim.lrr": "actor.optim.lr?",
        "rollout.temprature": "rollout.temperature?",
        "actor_rollout_ref.actor.clip_ration": "actor.clip_ratio?",
        "train_batch_size": "data.train_batch_size?",
        "data.seed.deep": "data.seed?",
    }


def test_sizes_over_all_gpus_are_not_taken_for_sizes_a_gpu(refuse):
    (found,) = refuse("actor_rollout_ref.rollout.log_prob_micro_batch_size=1", text=ONE_RANK)
    assert "did you mean rollout.log_prob_micro_batch_size_per_gpu?" in found.rule


def test_unknown_keys_wrong_types_and_broken_rules_come_in_one_message(refuse):
    found = told(
        refuse(
            "rolout.n=2",
            "data.seed=x",
            "rollout.n=1.5",
            "actor.shuffle=maybe",
            "actor.optim=5",
            "rollout.stop=[[a]]",
            "actor.optim.betas=[0.9]",
            "trainer.project_name=[a]",
            "trainer.experiment_name=true",
            "data.apply_chat_template_kwargs=3",
            "rollout.temperature=0",
            text=ONE_RANK,
        )
    )
    assert found["data.seed"] == "expected an integer "
    assert found["actor.shuffle"] == "expected true or false "
    assert found["actor.optim"] == "expected a section of keys "
    assert found["rollout.stop"] == "expected a list of text "
    assert found["actor.optim.betas"] == "expected a list of a number and a number "
    assert {"rolout.n", "rollout.n", "trainer.project_name", "trainer.experiment_name"} < set(found)
    assert {"data.apply_chat_template_kwargs", "rollout.temperature"} < set(found)


def test_null_is_refused_where_nothing_is_derived(refuse):
    found = told(refuse("data.seed=null", "actor.megatron=null", text=ONE_RANK))
    assert found == {
        "data.seed": "expected an integer ",
    }


def test_an_empty_section_sets_nothing(load):
    assert load(text=ONE_RANK + "\ncritic:\nrollout: {}\n") == load(text=ONE_RANK)


def test_references_between_keys_are_resolved(load, monkeypatch):
    monkeypatch.setenv("ROLLOUT_N", "3")
    config = load(
        "trainer.project_name=${trainer.experiment_name}-p",
        "rollout.n=${oc.env:ROLLOUT_N}",
        "critic.ppo_epochs=${actor_rollout_ref.actor.ppo_epochs}",
        "ref.megatron=${actor.megatron}",
        "actor.ppo_epochs=2",
        text=ONE_RANK,
    )
    assert config.trainer.default_local_dir == "runs/default-p/default"
    assert config.rollout.n == 3 and config.critic.ppo_epochs == 2
    assert config.ref.megatron == config.actor.megatron


def test_references_to_nothing_are_refused_by_key(refuse):
    found = told(
        refuse("rollout.n=${rollout.m}", "data.seed=${oc.env:NO_SUCH_NAME}", text=ONE_RANK)
    )
    assert "rollout.m" in found["rollout.n"] and "NO_SUCH_NAME" in found["data.seed"]


def test_references_to_another_kind_of_section_are_refused(refuse):
    found = told(refuse("actor.optim=${actor.clip_ratio}", text=ONE_RANK))
    assert found == {"actor.optim": "expected a section of keys "}
    found = told(refuse("critic.megatron=${actor.optim}", text=ONE_RANK))
    assert found["critic.megatron"].startswith("refers to a section of other keys: lr, weight")


def test_a_value_left_open_is_asked_for(refuse, load):
    template = ONE_RANK + "\nrollout:\n  n: ???\n"
    (found,) = refuse(text=template)
    assert (found.key, found.rule) == ("rollout.n", "a value is needed")
    assert load("rollout.n=3", text=template).rollout.n == 3
    assert load(text=ONE_RANK).model.path == "???"  # asked for by check_files: plans need no model


def test_a_layout_given_in_part_follows_the_actor_in_the_rest(load):
    config = load(
        "actor.megatron.dtype=float32",
        "actor.megatron.tensor_model_parallel_size=2",
        "critic.megatron.tensor_parallel_size=3",
    )
    assert config.ref.megatron is None
    assert config.critic.megatron == dataclasses.replace(
        config.actor.megatron, tensor_model_parallel_size=3
    )
    assert load("critic.megatron.dtype=float32", "critic.megatron=null").critic.megatron is None


def test_free_mappings_take_any_key(load):
    config = load("data.apply_chat_template_kwargs.enable_thinking=false", text=ONE_RANK)
    assert config.data.apply_chat_template_kwargs == {"enable_thinking": False}


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("rollout: {n: 1", "not YAML"),
        ("rollout: {n: 1}\nrollout: {n: 2}", "duplicate"),
        ("- 1", "must be a mapping"),
        ("base: nowhere.yaml", "no such file, named as the base of"),
        ("base: [a, b]", "must be one file name"),
        ("base: run.yaml", "circle: run.yaml -> run.yaml"),
    ],
)
def test_unreadable_files_are_refused_by_name(refuse, text, word):
    (found,) = refuse(text=text)
    assert word in str(found) and (word in found.rule)


def test_a_missing_config_file_is_a_config_error(tmp_path):
    with pytest.raises(ConfigError, match="no such file"):
        load_config(tmp_path / "nowhere.yaml")


def test_malformed_overrides_are_refused(refuse):
    found = refuse("rollout.n", "=3", "rollout.stop=[a", "base=x.yaml", text=ONE_RANK)
    assert [v.key for v in found] == ["rollout.n", "=3", "rollout.stop", "base"]


def test_the_resolved_file_loads_to_an_equal_config(load, tmp_path):
    config = load(
        "critic.megatron.tensor_parallel_size=2",
        "trainer.experiment_name='1e-6'",
        "trainer.project_name='null'",
        "rollout.stop=['\\${not.a.key}', 'yes', '', 'a: b', '\\n']",
        "data.apply_chat_template_kwargs.tools=[{name: x}]",
        "trainer.logger=none",
    )
    assert config.rollout.stop[0] == "${not.a.key}"
    save_resolved(config, tmp_path / "config.yaml")
    again = load_config(tmp_path / "config.yaml")
    assert again == config and build_plan(again) == build_plan(config)
    assert [p.name for p in tmp_path.glob("config*")] == ["config.yaml"]


def test_a_config_is_frozen(load):
    with pytest.raises(dataclasses.FrozenInstanceError):
        load().rollout.n = 3


def test_importing_config_leaves_torch_out():
    code = "import sys, mrl.config; print({'torch', 'transformers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
