"""Every log-prob of a run is at the temperature that responses are drawn at."""

from __future__ import annotations

from pathlib import Path

import pytest

from mrl import load_config
from mrl.config import build_plan
from mrl.workers.job import job_spec

ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "configs" / "ppo" / "qwen2.5_0.5b_1gpu.yaml"
KL = {
    "loss": ("actor.use_kl_loss=true", "algorithm.use_kl_in_reward=false"),
    "reward": ("actor.use_kl_loss=false", "algorithm.use_kl_in_reward=true"),
}


@pytest.mark.parametrize("temperature", [0.5, 0.7, 1.0, 1.3])
@pytest.mark.parametrize("kl", KL)
def test_actor_and_reference_score_at_the_rollouts_temperature(temperature: float, kl: str) -> None:
    changes = (f"rollout.temperature={temperature}", "rollout.val_kwargs.temperature=0.1", *KL[kl])
    config = load_config(RECIPE, [*changes, "rollout.name=hf"])
    spec = job_spec(config, build_plan(config), 10)
    assert spec.ref is not None and spec.rollout is not None
    assert spec.actor.temperature == spec.ref.temperature == temperature
    assert spec.rollout.config.temperature == temperature
