from __future__ import annotations

import json
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from mrl.checkpoint.changes import CONFIG_FILE, changes_since, check_changes, save_config
from mrl.config import Config


def config(*changes: str) -> Config:
    """Give a config with some keys set, whether or not they fit together."""
    found = Config()
    for change in ("model.path=/models/a", "data.train_files=[a.jsonl]", *changes):
        key, value = change.split("=", 1)
        found = put(found, key.split("."), yaml.safe_load(value))
    return found


def put(node: Any, path: list[str], value: Any) -> Any:
    name, *rest = path
    return replace(node, **{name: put(getattr(node, name), rest, value) if rest else value})


@pytest.mark.parametrize(
    "change",
    [
        "actor.megatron.tensor_model_parallel_size=2",
        "actor.megatron.virtual_pipeline_model_parallel_size=2",
        "actor.megatron.num_layers_in_first_pipeline_stage=2",
        "actor.megatron.optimizer_offload=true",
        "actor.megatron.recompute_granularity=full",
        "actor.megatron.overlap_param_gather=true",
        "trainer.n_gpus_per_node=8",
        "trainer.save_freq=7",
        "trainer.default_local_dir=/elsewhere",
        "actor.ppo_micro_batch_size_per_gpu=4",
        "actor.checkpoint.async_save=true",
        "placement.mode=disaggregated",
        "rollout.gpu_memory_utilization=0.3",
    ],
)
def test_what_changes_no_number_is_not_mentioned(tmp_path: Path, change: str) -> None:
    save_config(config(), tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_changes(tmp_path, config(change))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("actor.optim.lr=2.0e-6", r"actor\.optim\.lr was 1e-06, is 2e-06"),
        ("data.train_files=[b.jsonl]", r"train_files was \['a\.jsonl'\], is \['b\.jsonl'\]"),
        ("actor.megatron.moe_aux_loss_coeff=0.5", r"moe_aux_loss_coeff was .*, is 0\.5"),
        ("actor.megatron.dtype=float32", r"dtype was 'auto', is 'float32'"),
        ("trainer.best_metric=val-core/a", r"best_metric was None, is 'val-core/a'"),
        ("rollout.n=3", r"rollout\.n was 1, is 3"),
        ("trainer.total_epochs=9", r"trainer\.total_epochs was 1, is 9"),
    ],
)
def test_what_training_can_go_on_with_is_warned_about(
    tmp_path: Path, change: str, said: str
) -> None:
    save_config(config(), tmp_path)
    with pytest.warns(UserWarning, match=said):
        check_changes(tmp_path, config(change))


@pytest.mark.parametrize(
    "change",
    ["model.path=/models/b", "algorithm.adv_estimator=grpo", "model.lora.rank=16"],
)
def test_what_it_cannot_is_refused_with_the_key_that_overrides(tmp_path: Path, change: str) -> None:
    save_config(config(), tmp_path)
    key = change.split("=")[0]
    with (
        pytest.warns(UserWarning, match=key),
        pytest.raises(ValueError, match=rf"{key} was .*trainer\.allow_changed=\[{key}\]"),
    ):
        check_changes(tmp_path, config(change))
    with pytest.warns(UserWarning, match=key):
        check_changes(tmp_path, config(change, f"trainer.allow_changed=[{key}]"))


def test_the_override_names_all_that_is_needed(tmp_path: Path) -> None:
    save_config(config(), tmp_path)
    now = config("model.path=/b", "algorithm.adv_estimator=grpo")
    now = replace(now, trainer=replace(now.trainer, allow_changed=["model.path"]))
    with (
        pytest.warns(UserWarning),
        pytest.raises(ValueError, match=r"=\[model\.path,algorithm\.adv_estimator\]"),
    ):
        check_changes(tmp_path, now)


def test_checkpoints_without_a_config_or_of_other_keys_are_compared_as_far_as_they_go(
    tmp_path: Path,
) -> None:
    assert changes_since(tmp_path, config()) == ()
    save_config(config(), tmp_path)
    held = json.loads((tmp_path / CONFIG_FILE).read_text())
    del held["actor"]["optim"]["lr"]
    held["trainer"]["gone"] = 1
    (tmp_path / CONFIG_FILE).write_text(json.dumps(held))
    assert changes_since(tmp_path, config("actor.optim.lr=1")) == ()
