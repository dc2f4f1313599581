from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from mrl.config import Config, ConfigError, RunPlan, Violation, build_plan, load_config

# Six ranks, 60 prompts of 12 samples, engine on two ranks: the worked example of the README.
SIX_RANKS = """
data: {train_batch_size: 60}
actor_rollout_ref:
  actor: {ppo_mini_batch_size: 60, ppo_micro_batch_size_per_gpu: 8, use_kl_loss: true}
  rollout: {n: 12, tensor_model_parallel_size: 2, log_prob_micro_batch_size_per_gpu: 8}
trainer: {n_gpus_per_node: 6}
"""

Load = Callable[..., Config]
Refuse = Callable[..., tuple[Violation, ...]]
Plan = Callable[..., RunPlan]


@pytest.fixture
def load(tmp_path: Path) -> Load:
    """Load YAML text with overrides."""

    def load(*overrides: str, text: str = SIX_RANKS) -> Config:
        file = tmp_path / "run.yaml"
        file.write_text(text)
        return load_config(file, overrides)

    return load


@pytest.fixture
def plan(load: Load) -> Plan:
    """Plan YAML text with overrides."""
    return lambda *overrides, text=SIX_RANKS: build_plan(load(*overrides, text=text))


@pytest.fixture
def refuse(load: Load) -> Refuse:
    """Give the violations for which YAML text with overrides is refused."""

    def refuse(*overrides: str, text: str = SIX_RANKS) -> tuple[Violation, ...]:
        with pytest.raises(ConfigError) as caught:
            load(*overrides, text=text)
        return caught.value.violations

    return refuse


@pytest.fixture
def model(tmp_path: Path) -> Callable[..., str]:
    """Write a model folder with Qwen2.5-7B's shape, changed as asked; give its path."""

    def model(weights: bool = True, **changes: object) -> str:
        folder = tmp_path / "model"
        folder.mkdir(exist_ok=True)
        shape = {
            "model_type": "qwen2",
            "hidden_size": 3584,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "num_hidden_layers": 28,
            "intermediate_size": 18944,
            "max_position_embeddings": 32768,
        }
        (folder / "config.json").write_text(json.dumps(shape | changes))
        if weights:
            (folder / "model.safetensors").touch()
        return str(folder)

    return model
