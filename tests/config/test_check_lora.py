"""Adapters are refused where they cannot be trained, sent or read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from mrl.config import ConfigError
from mrl.config.check import check_files
from mrl.config.check_lora import ENGINE_RANKS, engine_rank
from tests.config.conftest import Load, Refuse
from tests.config.test_check import GRPO, ONE_RANK

ON = "model.lora.rank=8"
SENT = "model.lora.merge=false"
ATTENTION = "model.lora.target_modules=[linear_qkv,linear_proj]"
EXPERTS = {"model_type": "qwen3_moe", "num_experts": 4, "moe_intermediate_size": 12}


@pytest.mark.parametrize(
    ("changes", "overrides", "key", "nearest"),
    [
        ({}, (SENT,), "model.lora.merge", "true"),
        ({}, ("model.lora.adapter_path=x",), "model.lora.adapter_path", "none"),
        (
            {},
            (ON, "model.lora.target_modules=[]"),
            "model.lora.target_modules",
            "linear_qkv, linear_proj",
        ),
        (
            {},
            (ON, "model.lora.target_modules=[linear_fc1,linear_fc1]"),
            "model.lora.target_modules",
            "linear_fc1",
        ),
        (EXPERTS, (ON,), "model.lora.target_modules", "linear_qkv, linear_proj"),
        (
            EXPERTS,
            (ON, "model.lora.target_modules=[linear_fc2]"),
            "model.lora.target_modules",
            "linear_qkv, linear_proj",
        ),
        (EXPERTS, (ON, ATTENTION, SENT), "model.lora.merge", "true"),
        ({}, (ON, SENT, "rollout.name=hf"), "model.lora.merge", "true"),
        ({}, ("model.lora.rank=513", SENT), "model.lora.rank", "512"),
        (
            {},
            (ON, "actor.megatron.fp8=hybrid"),
            "actor.megatron.fp8",
            "null, or model.lora.rank=0",
        ),
    ],
)
def test_what_cannot_be_is_refused(
    changes: dict[str, object],
    overrides: tuple[str, ...],
    key: str,
    nearest: str,
    refuse: Refuse,
    model: Callable[..., str],
) -> None:
    found = refuse(f"model.path={model(**changes)}", GRPO, *overrides, text=ONE_RANK)
    assert (key, nearest) in [(v.key, v.nearest) for v in found]


@pytest.mark.parametrize("overrides", [(ON,), (ON, SENT), (ON, "rollout.name=hf")])
def test_what_can_be_is_accepted(
    overrides: tuple[str, ...], load: Load, model: Callable[..., str]
) -> None:
    assert load(f"model.path={model()}", GRPO, *overrides, text=ONE_RANK).model.lora.rank == 8


def test_attention_of_a_model_with_experts_can_be_adapted(
    load: Load, model: Callable[..., str]
) -> None:
    path = f"model.path={model(**EXPERTS)}"
    assert load(path, GRPO, ON, ATTENTION, text=ONE_RANK).model.lora.merge


def test_an_adapter_of_other_settings_is_refused(
    refuse: Refuse, model: Callable[..., str], tmp_path: Path
) -> None:
    config = {"peft_type": "LORA", "r": 16, "lora_alpha": 16, "use_dora": True}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    start = f"model.lora.adapter_path={tmp_path}"
    found = refuse(f"model.path={model()}", GRPO, ON, start, text=ONE_RANK)
    assert {v.key for v in found} == {"model.lora.adapter_path"}
    rules = " ".join(v.rule for v in found)
    assert "r is 16, model.lora.rank is 8" in rules
    assert "use_dora is True" in rules
    assert "lora_alpha" not in rules


def test_a_missing_adapter_is_named(load: Load, model: Callable[..., str], tmp_path: Path) -> None:
    start = f"model.lora.adapter_path={tmp_path / 'absent'}"
    config = load(f"model.path={model()}", GRPO, ON, start, text=ONE_RANK)
    with pytest.raises(ConfigError, match=r"adapter_model\.safetensors"):
        check_files(config)


def test_the_engine_reserves_the_smallest_rank_that_holds_the_adapter() -> None:
    assert [engine_rank(rank) for rank in (1, 8, 9, 129, 512)] == [8, 8, 16, 256, 512]
    with pytest.raises(ValueError, match="513"):
        engine_rank(513)
    assert list(ENGINE_RANKS) == sorted(ENGINE_RANKS)


@pytest.mark.parametrize("key", ["model.lora.alpha=32", ATTENTION])
def test_settings_of_an_adapter_that_is_off_are_pointed_out(
    key: str, load: Load, model: Callable[..., str]
) -> None:
    from mrl.config.caveats import find_warnings

    config = load(f"model.path={model()}", GRPO, key, text=ONE_RANK)
    assert any("model.lora.rank=0" in warning for warning in find_warnings(config))
