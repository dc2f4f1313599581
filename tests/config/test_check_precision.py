"""Precisions that cannot run are refused before any process starts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mrl.config.caveats import find_warnings
from mrl.config.check_precision import check_precision
from mrl.config.schema import (
    ActorConfig,
    AlgorithmConfig,
    Config,
    MegatronConfig,
    RefConfig,
    TrainerConfig,
)


def config(device: str = "auto", ref: bool = False, **megatron: object) -> Config:
    layout = MegatronConfig(**megatron)  # type: ignore[arg-type]
    return Config(
        actor=ActorConfig(megatron=layout, use_kl_loss=ref),
        algorithm=AlgorithmConfig(adv_estimator="grpo"),
        trainer=TrainerConfig(device=device),
    )


@pytest.mark.parametrize(
    ("given", "key", "rule"),
    [
        ({"device": "cpu", "fp8": "hybrid"}, "fp8", "needs a GPU"),
        ({"transformer_impl": "local", "fp8": "hybrid"}, "fp8", "transformer_impl is local"),
        ({"dtype": "float32", "fp8": "e4m3"}, "fp8", "compute in bfloat16"),
        ({"fp8_recipe": "blockwise"}, "fp8_recipe", "has no effect without fp8"),
        (
            {"fp8": "hybrid", "fp8_recipe": "delayed", "ref": True},
            "fp8_recipe",
            "the frozen ref never takes",
        ),
        (
            {
                "fp8": "hybrid",
                "fp8_recipe": "delayed",
                "recompute_granularity": "selective",
                "recompute_modules": ("core_attn", "moe_act"),
            },
            "fp8_recipe",
            "cannot recompute moe_act",
        ),
        (
            {"device": "cpu", "transformer_impl": "transformer_engine"},
            "transformer_impl",
            "needs a GPU",
        ),
        (
            {"dtype": "float32", "transformer_impl": "transformer_engine"},
            "transformer_impl",
            "takes bfloat16",
        ),
    ],
)
def test_what_cannot_run_is_refused_with_the_reason(
    given: dict[str, object], key: str, rule: str
) -> None:
    (found,) = set(check_precision(config(**given)))  # type: ignore[arg-type]
    assert found.key == f"actor.megatron.{key}"
    assert rule in found.rule
    assert found.nearest


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"fp8": "hybrid"},
        {"fp8": "e4m3", "fp8_recipe": "blockwise", "dtype": "bfloat16"},
        {"fp8": "hybrid", "fp8_recipe": "delayed", "recompute_granularity": "full"},
        {"transformer_impl": "transformer_engine", "device": "cuda", "ref": True},
    ],
)
def test_what_can_run_is_not(given: dict[str, object]) -> None:
    assert not list(check_precision(config(**given)))  # type: ignore[arg-type]


def test_a_reference_may_have_a_recipe_of_its_own() -> None:
    delayed = config(ref=True, fp8="hybrid", fp8_recipe="delayed")
    own = replace(delayed, ref=RefConfig(megatron=MegatronConfig(fp8="hybrid")))
    assert not list(check_precision(own))


def test_delayed_scales_are_warned_about() -> None:
    assert any("scale 1" in text for text in find_warnings(
        config(fp8="hybrid", fp8_recipe="delayed")))  # fmt: skip
    assert not any("scale 1" in text for text in find_warnings(config(fp8="hybrid")))
