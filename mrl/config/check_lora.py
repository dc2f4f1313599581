"""Rules of low-rank adapters (`model.lora`)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mrl.config.check_model import read_shape
from mrl.config.errors import ConfigError, Violation
from mrl.config.roles import enabled_roles
from mrl.config.schema import Config, LoraConfig

PEFT_CONFIG_FILE = "adapter_config.json"
PEFT_WEIGHTS_FILE = "adapter_model.safetensors"
# What vLLM 0.26 reserves for an adapter (vllm/config/lora.py); the smallest that holds it is taken.
ENGINE_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
_OF_EXPERTS = ("linear_fc1", "linear_fc2")
# Features of PEFT that change what A and B mean: the values without them, also where absent.
_PLAIN_PEFT: Mapping[str, object] = {
    "peft_type": "LORA",
    "bias": "none",
    "use_rslora": False,
    "use_dora": False,
    "fan_in_fan_out": False,
    "modules_to_save": None,
    "rank_pattern": {},
    "alpha_pattern": {},
    "layers_to_transform": None,
}


def check_lora(config: Config) -> Iterator[Violation]:
    """Check that the adapter fits the model, the engine and the rest of the config."""
    lora = config.model.lora
    if lora.rank == 0:
        for key, value, default in (
            ("merge", lora.merge, True),
            ("adapter_path", lora.adapter_path, None),
        ):
            if value != default:
                rule = "has no effect without an adapter: set model.lora.rank above 0"
                yield Violation(f"model.lora.{key}", value, rule, str(default).lower())
        return
    yield from _check_targets(config)
    yield from _check_engine(config)
    yield from _check_adapter(lora)
    for role in enabled_roles(config):
        key = f"{role.keys['megatron']}.fp8"
        if role.name == "actor" and role.megatron.fp8 is not None:
            rule = "adapters are trained beside bfloat16 layers only: model.lora.rank is above 0"
            yield Violation(key, role.megatron.fp8, rule, "null, or model.lora.rank=0")


def check_adapter_files(config: Config) -> Iterator[Violation]:
    """Check that the adapter to start from is there."""
    path = config.model.lora.adapter_path
    if path is None or config.model.lora.rank == 0:
        return
    for name in (PEFT_CONFIG_FILE, PEFT_WEIGHTS_FILE):
        if not (Path(path) / name).is_file():
            yield Violation("model.lora.adapter_path", path, f"the folder has no {name}")


def peft_mismatches(
    found: Mapping[str, Any], lora: LoraConfig
) -> Iterator[tuple[str, object, str]]:
    """Yield (key, value, rule) of what an adapter_config.json says against the settings."""
    for key, name, wanted in (
        ("r", "rank", lora.rank),
        ("lora_alpha", "alpha", lora.alpha),
    ):
        if found.get(key) != wanted:
            yield key, found.get(key), f"model.lora.{name} is {wanted}"
    for key, plain in _PLAIN_PEFT.items():
        if found.get(key, plain) not in (plain, None):
            yield key, found[key], f"only {plain!r} can be trained"


def engine_rank(rank: int) -> int:
    """Give the rank that vLLM reserves for an adapter; raises ValueError above its largest."""
    for size in ENGINE_RANKS:
        if rank <= size:
            return size
    raise ValueError(f"rank {rank} is above the engine's largest, {ENGINE_RANKS[-1]}")


def _check_targets(config: Config) -> Iterator[Violation]:
    key, targets = "model.lora.target_modules", config.model.lora.target_modules
    if not targets:
        yield Violation(key, targets, "names no layer to adapt", "linear_qkv, linear_proj")
    if len(set(targets)) < len(targets):
        once = ", ".join(dict.fromkeys(targets))
        yield Violation(key, targets, "names a layer twice", once)
    if _has_experts(config) and any(target in _OF_EXPERTS for target in targets):
        rest = ", ".join(target for target in targets if target not in _OF_EXPERTS)
        rule = f"experts are not adapted, and the layers of {config.model.path} have experts"
        yield Violation(key, targets, rule, rest or "linear_qkv, linear_proj")


def _check_engine(config: Config) -> Iterator[Violation]:
    lora, key = config.model.lora, "model.lora.merge"
    if lora.merge:
        return
    if config.rollout.name != "vllm":
        rule = f"rollout.name={config.rollout.name} takes no adapter, only vllm does"
        yield Violation(key, False, rule, "true")
    if _has_experts(config):
        rule = "vLLM lays the experts of an adapted model out anew, out of reach of a sync"
        yield Violation(key, False, rule, "true")
    if lora.rank > ENGINE_RANKS[-1]:
        rule = "vLLM holds no larger adapter (model.lora.merge=false)"
        yield Violation("model.lora.rank", lora.rank, rule, str(ENGINE_RANKS[-1]))


def _check_adapter(lora: LoraConfig) -> Iterator[Violation]:
    """Compare with the adapter to start from, where it is there."""
    if lora.adapter_path is None:
        return
    key, path = "model.lora.adapter_path", Path(lora.adapter_path) / PEFT_CONFIG_FILE
    if not path.is_file():
        return
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        yield Violation(key, lora.adapter_path, f"{path} cannot be read: {error}")
        return
    for name, value, rule in peft_mismatches(found, lora):
        yield Violation(key, lora.adapter_path, f"{path}: {name} is {value!r}, {rule}")


def _has_experts(config: Config) -> bool:
    try:
        shape = read_shape("model.path", config.model.path)
    except ConfigError:  # reported by check_model
        return False
    return shape is not None and shape.experts > 0
