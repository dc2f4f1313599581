"""Every recipe fits the GPUs that it is for; a wrong variant of each is refused, and says why."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from mrl.config import Config, check_config
from mrl.planning.change import Change, changed
from mrl.planning.hardware import GB
from mrl.planning.suggest import suggest
from tests.planning import recipes
from tests.planning.recipes import GPUS, RECIPES, load, parts, planned

# Full training, the sizes on which a user would run each model; others train adapters or run long.
SIZES = {
    "qwen2.5_0.5b": {1, 2, 8},
    "qwen2.5_1.5b": {1, 2, 8},
    "qwen2.5_7b": {2, 8, 16, 32},
    "llama3.1_8b": {2, 8, 16, 32},
    "qwen3_30b_a3b": {8, 16, 32, 64},
    "qwen2.5_32b": {8, 16, 32, 64},
    "llama3.1_70b": {32, 64, 128},
}
SPECIAL = {
    ("qwen2.5_7b", 1, "lora"), ("llama3.1_8b", 1, "lora"), ("llama3.1_70b", 8, "lora"),
    ("qwen2.5_7b", 8, "32k"), ("qwen2.5_32b", 32, "32k"), ("qwen3_30b_a3b", 32, "32k"),
    ("llama3.1_8b", 32, "128k"), ("llama3.1_70b", 128, "128k"),
}  # fmt: skip
# A suggestion may be this much faster: it searches layouts that no one has run, by a model of time.
SLOWER = 0.25

# What is changed, the key that is blamed and what the rule says.
Variant = tuple[Callable[[Config], Change], str, str]
TP, ENGINE_TP = "actor.megatron.tensor_model_parallel_size", "rollout.tensor_model_parallel_size"
PP, MINI = "actor.megatron.pipeline_model_parallel_size", "actor.ppo_mini_batch_size"
LONGEST = "rollout.max_model_len"
WRONG: dict[str, Variant] = {
    "a TP of 3": (lambda _: {TP: 3}, TP, "must divide"),
    "an engine TP of 3": (lambda _: {ENGINE_TP: 3}, ENGINE_TP, "must divide"),
    "more stages than ranks": (
        lambda c: {PP: 2 * c.trainer.nnodes * c.trainer.n_gpus_per_node}, PP, "ranks must divide",
    ),
    "an odd mini-batch": (lambda c: {MINI: c.actor.ppo_mini_batch_size - 1}, MINI, "divide"),
    "an engine too short": (lambda _: {LONGEST: 100}, LONGEST, "less than"),
}  # fmt: skip


def name_of(path: Path) -> str:
    return f"{path.parent.name}/{path.stem}"


every_recipe = pytest.mark.parametrize("path", RECIPES, ids=name_of)


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(recipes.ROOT)


@pytest.mark.parametrize("kind", recipes.KINDS)
def test_each_model_has_a_recipe_for_the_sizes_it_runs_on(kind: str) -> None:
    found = {parts(path) for path in RECIPES if path.parent.name == kind}
    full = {(model, gpus, "") for model, sizes in SIZES.items() for gpus in sizes}
    assert found == (full | SPECIAL if kind == "grpo" else full)


@every_recipe
def test_a_recipe_is_what_its_name_says(path: Path) -> None:
    model, gpus, special = parts(path)
    config = load(path)
    assert config.trainer.nnodes * config.trainer.n_gpus_per_node == gpus
    assert config.model.path == f"configs/models/{recipes.MODELS[model]}"
    assert config.algorithm.adv_estimator == {"grpo": "grpo", "ppo": "gae"}[path.parent.name]
    assert (config.model.lora.rank > 0) == (special == "lora")
    longest = config.data.max_prompt_length + config.data.max_response_length
    assert longest == {"32k": 2**15, "128k": 2**17}.get(special, longest)


@every_recipe
@pytest.mark.parametrize("gpu", GPUS)
def test_a_recipe_fits_with_room_for_the_error_of_the_plan(path: Path, gpu: str) -> None:
    plan = planned(path, gpu)
    assert plan.fits, plan.binds
    assert not plan.memory.is_tight, plan.memory.peak.peak.total / GB


@every_recipe
def test_no_rank_of_a_recipe_idles_and_no_gpu_is_half_empty(path: Path) -> None:
    plan = planned(path, "h100")
    assert not [str(a) for a in plan.advice if a.rule == "idle_ranks"]
    assert plan.memory.peak.peak.total > 0.4 * plan.memory.capacity, "a smaller GPU would do"


@every_recipe
def test_wrong_variants_are_refused_by_key_and_rule(path: Path) -> None:
    for wrong, (make, key, words) in WRONG.items():
        violations = check_config(changed(load(path), make(load(path))))
        blamed = [v for v in violations if key in v.key and words in v.rule]
        assert blamed, (wrong, [str(v) for v in violations])
        assert all(v.nearest for v in blamed)


@every_recipe
def test_micro_batches_that_cannot_fit_do_not_and_activations_are_blamed(path: Path) -> None:
    sizes = {"data.train_batch_size": 8192, "actor.ppo_mini_batch_size": 8192}
    plan = planned(path, "h100", {**sizes, "actor.ppo_max_token_len_per_gpu": 4096 * 1024})
    assert not plan.fits
    assert plan.memory.problems[0].startswith("update ")
    assert "activations" in plan.memory.problems[0]


def test_the_table_of_recipes_is_what_the_plans_say() -> None:
    assert recipes.table_of_readme() == recipes.table(), (
        "write it anew: python -m tests.planning.recipes"
    )


@pytest.mark.slow
@every_recipe
def test_no_suggestion_is_much_faster_than_a_recipe(path: Path) -> None:
    plan = planned(path, "h100")
    best = suggest(plan.job, 1)
    faster = plan.time.total / best[0].time.total - 1 if best else 0.0
    assert faster < SLOWER, str(best[0].change)
