"""Supervised training learns its rows, and continues where it stopped."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from mrl import load_config
from mrl.checkpoint.folder import CheckpointFolder
from mrl.checkpoint.state import TrainerState
from mrl.config import ConfigError
from mrl.data import SFTDataset
from mrl.sft import SFTTrainer, warm_start
from mrl.tracking.jsonl import read_metrics
from tests.runs import Inputs, Recording, overrides

STEPS = 8
CHANGES = (
    "data.train_batch_size=8",
    "data.shuffle=false",
    "actor.ppo_mini_batch_size=8",
    "actor.ppo_micro_batch_size_per_gpu=4",
    "actor.optim={lr: 3.0e-3, lr_warmup_steps: 2, lr_decay_style: cosine}",
    "algorithm={adv_estimator: grpo, use_kl_in_reward: false}",
    "rollout.val_kwargs={n: 1, do_sample: false}",
    "trainer={total_epochs: 4, critic_warmup: 0, save_freq: 4}",
)
Fit = Callable[..., Path]


@pytest.fixture
def fit(warm_pools: list[Recording], inputs: Inputs) -> Fit:
    """Run supervised training in this process, on warm ranks; gives the run folder."""

    def fit(run: Path, *changes: str) -> Path:
        files = f"data.train_files=[{inputs.sft}]"
        config = load_config(inputs.config, [files, *CHANGES, *overrides(run, *changes)])
        SFTTrainer(config, AutoTokenizer.from_pretrained(config.model.path)).fit()
        return run

    return fit


def losses(run: Path) -> list[float]:
    return [row["sft/loss"] for row in read_metrics(run / "metrics.jsonl")]


def mean_loss(model_folder: Path, inputs: Inputs, rows: range) -> float:
    """Give the mean loss of the responses' tokens as transformers computes it."""
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    data = SFTDataset([inputs.sft], tokenizer, load_config(inputs.config, CHANGES).data)
    nll: list[torch.Tensor] = []
    for prompt, response in (data.example(row) for row in rows):
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *response]])).logits[0].log_softmax(-1)
        at = torch.arange(len(prompt) - 1, len(prompt) + len(response) - 1)
        nll += list(-logits[at, torch.tensor(response)])
    return float(torch.stack(nll).mean())


def test_the_loss_is_the_models_own_and_falls(
    fit: Fit, inputs: Inputs, policy: Path, tmp_path: Path
) -> None:
    run = fit(tmp_path / "run")
    found = losses(run)
    assert len(found) == STEPS
    assert found[0] == pytest.approx(mean_loss(policy, inputs, range(8)), rel=1e-5)
    weights = warm_start(run)
    assert weights == run / f"global_step_{STEPS}" / "actor" / "huggingface"
    assert mean_loss(weights, inputs, range(16)) < 0.7 * mean_loss(policy, inputs, range(16))


@pytest.mark.slow  # its siblings are the resumed runs of test_trainer.py
def test_a_resumed_training_equals_an_uninterrupted_one(fit: Fit, tmp_path: Path) -> None:
    whole = fit(tmp_path / "whole", "data.shuffle=true")
    half = tmp_path / "half"
    shutil.copytree(whole, half)
    shutil.rmtree(half / f"global_step_{STEPS}")
    fit(half, "data.shuffle=true")
    assert losses(half) == losses(whole)
    file = f"global_step_{STEPS}/actor/huggingface/model.safetensors"
    found, expected = load_file(half / file), load_file(whole / file)
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


def test_an_untrained_folder_has_no_warm_start(tmp_path: Path) -> None:
    assert warm_start(tmp_path) is None


def test_ranks_for_an_engine_are_refused(fit: Fit, tmp_path: Path) -> None:
    apart = (
        "placement.mode=disaggregated",
        "placement.rollout_gpus=2",
        "trainer.n_gpus_per_node=4",
    )
    with pytest.raises(ConfigError, match="has no engine"):
        fit(tmp_path / "run", *apart)


def test_a_run_with_rewards_is_not_taken_up(fit: Fit, tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    TrainerState(3, 3, 42, {"epoch": 0}, 0.0).save(folder.begin(3))
    folder.commit(3)
    with pytest.raises(ValueError, match="of a run with rewards"):
        fit(tmp_path)
    assert folder.steps() == [3]
