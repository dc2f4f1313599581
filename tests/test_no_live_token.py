"""A step that nothing can be learnt from changes nothing, is counted, and the run goes on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from mrl import RayPPOTrainer, load_config
from tests.runs import Inputs, Recording, overrides, steps_of

# Of two steps the first has no score at all.
REWARD = """
seen = 0


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    global seen
    seen += 1
    return None if seen <= 32 and extra_info["split"] == "train" else len(solution_str) / 8
"""


def weights(folder: Path) -> dict[str, torch.Tensor]:
    found = load_file(folder / "model.safetensors")
    head = folder / "value_head.safetensors"
    return found | (load_file(head) if head.exists() else {})


def test_a_step_without_any_score_changes_no_weight_and_is_counted(
    warm_pools: list[Recording], inputs: Inputs, policy: Path, tmp_path: Path
) -> None:
    (tmp_path / "reward.py").write_text(REWARD)
    run, start = tmp_path / "run", weights(policy)
    changes = (
        f"reward.custom_reward_function.path={tmp_path / 'reward.py'}",
        "reward.num_workers=1",
        "trainer.critic_warmup=0",
        "trainer.val_before_train=false",
        "trainer.test_freq=-1",
    )
    config = load_config(inputs.config, overrides(run, *changes))
    tokenizer = AutoTokenizer.from_pretrained(config.model.path)
    RayPPOTrainer(config=config, tokenizer=tokenizer).fit(max_steps=2)
    assert len(warm_pools[0].batches) == 2 * 2  # of both roles, the second step's alone
    first, second = (steps_of(run)[step] for step in (1, 2))
    for role in ("actor", "critic"):
        kept, moved = (weights(run / f"global_step_{k}" / role / "huggingface") for k in (1, 2))
        assert all(torch.equal(kept[name], start[name]) for name in kept), role
        assert not all(torch.equal(moved[name], start[name]) for name in moved), role
        assert (first[f"{role}/skipped_updates"], second[f"{role}/skipped_updates"]) == (2.0, 0.0)
        assert f"{role}/grad_norm" not in first and f"{role}/grad_norm" in second
    assert first["reward/unscored"] == 32.0
    assert "non_finite" not in first and "non_finite" not in second
    # the learning rate's schedule waited too: these are the first two updates of all
    assert second["actor/lr"] == pytest.approx(1e-3 * (1 + 2) / 2 / 3)
