"""Every recipe fits the GPUs that it is for; a wrong variant of each is refused, and says why."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from mrl.config import Config, ConfigError, load_config
from mrl.planning.change import Change, changed
from mrl.planning.hardware import GB, Machine
from mrl.planning.plan import JobPlan, plan_job
from tests.planning.figures import ROOT

RECIPES = sorted(
    p for kind in ("grpo", "ppo") for p in (ROOT / "configs" / kind).glob("*gpu*.yaml")
)
GPUS = ("h100", "a100-80")
# This one names a folder with weights; the shape is in the repository.
ELSEWHERE = {"qwen2.5_0.5b_1gpu": "model.path=configs/models/Qwen2.5-0.5B"}


@cache
def load(path: Path, *overrides: str) -> Config:
    name = path.stem
    return load_config(path, [*([ELSEWHERE[name]] if name in ELSEWHERE else []), *overrides])


def planned(path: Path, gpu: str, change: Change | None = None) -> JobPlan:
    config = changed(load(path), change or {})
    return plan_job(config, Machine.named(gpu), exact_reshard=False)


def name_of(path: Path) -> str:
    return f"{path.parent.name}/{path.stem}"


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def test_recipes_cover_the_models_and_sizes() -> None:
    names = " ".join(map(name_of, RECIPES))
    for model in ("0.5b", "1.5b", "7b", "32b", "8b", "70b", "30b_a3b"):
        assert f"{model}_" in names, model
    for word in ("1gpu", "2gpu", "8gpu", "16gpu", "32gpu", "64gpu", "128gpu", "_32k", "_128k"):
        assert word in names, word


@pytest.mark.parametrize("path", RECIPES, ids=name_of)
@pytest.mark.parametrize("gpu", GPUS)
def test_a_recipe_fits_with_room_for_the_error_of_the_plan(path: Path, gpu: str) -> None:
    plan = planned(path, gpu)
    assert plan.fits, plan.binds
    assert not plan.memory.is_tight, plan.memory.peak.peak.total / GB


@pytest.mark.parametrize("path", RECIPES, ids=name_of)
def test_the_name_says_how_many_gpus(path: Path) -> None:
    gpus = next(word for word in path.stem.split("_") if word.endswith("gpu"))
    assert load(path).trainer.nnodes * load(path).trainer.n_gpus_per_node == int(gpus[:-3])


@pytest.mark.parametrize("path", RECIPES, ids=name_of)
def test_a_layout_that_does_not_divide_the_ranks_is_refused_by_its_key(path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        load(path, "actor.megatron.tensor_model_parallel_size=3")
    assert "actor.megatron.tensor_model_parallel_size" in {v.key for v in refused.value.violations}
    assert "3" in str(refused.value)


@pytest.mark.parametrize("path", RECIPES, ids=name_of)
def test_micro_batches_that_cannot_fit_do_not_and_activations_are_blamed(path: Path) -> None:
    sizes = {"data.train_batch_size": 8192, "actor.ppo_mini_batch_size": 8192}
    plan = planned(path, "h100", {**sizes, "actor.ppo_max_token_len_per_gpu": 4096 * 1024})
    assert not plan.fits
    assert plan.memory.problems[0].startswith("update ")
    assert "activations" in plan.memory.problems[0]
