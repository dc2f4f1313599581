"""`trainer.full_determinism`: the same curve bit for bit, and libraries told so in time."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from mrl import RayPPOTrainer, load_config
from mrl.config import build_plan
from mrl.workers.determinism import deterministic_algorithms, deterministic_environment
from mrl.workers.host import WorkerHost
from mrl.workers.job import training_job_spec
from mrl.workers.spmd import rank_environment
from tests.ranks import Ranks
from tests.runs import Inputs, Recording, overrides, rollouts_of, steps_of
from tests.test_launchers import train
from tests.workers.jobs import job, layout, role

ON = "trainer.full_determinism=true"
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return sum(character.isdigit() for character in solution_str) / 8
"""

SMALL = (
    "data={train_batch_size: 4, max_response_length: 4, val_files: []}",
    "rollout={n: 2, val_kwargs: {do_sample: false, n: 1}}",
    "algorithm={adv_estimator: grpo, use_kl_in_reward: false}",
    "trainer={critic_warmup: 0, save_freq: -1, test_freq: -1, val_before_train: false}",
)


def test_ranks_are_told_before_cuda_starts() -> None:
    found = rank_environment(0, 0, 1, 1, "cuda", {}, deterministic=True)
    assert found["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert found["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] == "0"
    assert found["NCCL_ALGO"] == "Ring"
    assert "NCCL_ALGO" not in rank_environment(0, 0, 1, 1, "cuda", {})


def test_what_the_user_has_set_is_kept() -> None:
    given = {"CUBLAS_WORKSPACE_CONFIG": ":16:8", "NCCL_ALGO": "Ring,CollnetChain"}
    assert deterministic_environment(given).items() >= given.items()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("CUBLAS_WORKSPACE_CONFIG", ":0:0"),
        ("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "1"),
        ("NCCL_ALGO", "Ring,Tree"),
        ("NCCL_ALGO", ""),
    ],
)
def test_a_contradiction_in_the_environment_is_refused(name: str, value: str) -> None:
    with pytest.raises(ValueError, match=f"{name}={value!r}, expected"):
        rank_environment(0, 0, 1, 1, "cuda", {name: value}, deterministic=True)
    rank_environment(0, 0, 1, 1, "cuda", {name: value})  # nobody asked for determinism


def test_torch_is_strict_inside_and_as_before_outside() -> None:
    memory = torch.utils.deterministic
    with deterministic_algorithms(False):
        assert not torch.are_deterministic_algorithms_enabled()
    with deterministic_algorithms(True):
        assert torch.are_deterministic_algorithms_enabled()
        assert not memory.fill_uninitialized_memory
    assert not torch.are_deterministic_algorithms_enabled()
    assert memory.fill_uninitialized_memory


def seen(host: WorkerHost) -> tuple[bool, bool, bool]:
    """Give Megatron's mode, and torch's in a call of a trained role and in one of the rank."""
    engine = host._roles["actor"].engine

    def ask() -> bool:
        return torch.are_deterministic_algorithms_enabled()

    host._roles["actor"].ask = ask
    host._roles["host"] = SimpleNamespace(ask=ask)
    return (
        engine.config.deterministic_mode,
        host.call("actor", "ask", ()),
        host.call("host", "ask", ()),
    )


@pytest.mark.parametrize("on", [True, False])
def test_the_flag_reaches_torch_and_megatron_in_the_ranks(
    on: bool, ranks: Ranks, qwen2: Path
) -> None:
    spec = replace(job(role(qwen2, layout(tp=2))), deterministic=on)
    with ranks.job(2, spec) as pool:
        assert pool.each(seen) == [(on, on, False)] * 2


def test_the_flag_of_the_config_reaches_the_job(inputs: Inputs) -> None:
    for changes, wanted in (([ON], True), ([], False)):
        config = load_config(inputs.config, changes)
        assert training_job_spec(config, build_plan(config), 1).deterministic is wanted


def test_two_runs_are_the_same_bit_for_bit(
    inputs: Inputs, warm_pools: list[Recording], tmp_path: Path
) -> None:
    reward = tmp_path / "reward.py"
    reward.write_text(REWARD)
    curves: list[Any] = []
    for name in ("one", "two"):
        run = tmp_path / name
        changes = (ON, f"reward.custom_reward_function.path={reward}", *SMALL)
        config = load_config(inputs.config, overrides(run, *changes))
        tokenizer = AutoTokenizer.from_pretrained(config.model.path)
        RayPPOTrainer(config=config, tokenizer=tokenizer).fit(max_steps=2)
        curves.append((steps_of(run), [rollouts_of(run, step) for step in (1, 2)]))
    assert curves[0] == curves[1]
    steps = curves[0][0]
    assert len(steps) == 2
    assert steps[1]["actor/grad_norm"] != steps[2]["actor/grad_norm"] > 0


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.timeout(1200)
def test_both_launchers_give_the_same_curve(inputs: Inputs, tmp_path: Path) -> None:
    reward = tmp_path / "reward.py"
    reward.write_text(REWARD)
    changes = (ON, f"reward.custom_reward_function.path={reward}", *SMALL)
    curves = []
    for name, launcher in (("a", "spawned"), ("b", "spawned"), ("c", "torchrun")):
        run = train(launcher, inputs, tmp_path / name / "run", *changes)
        curves.append((steps_of(run), rollouts_of(run, 1), rollouts_of(run, 2)))
    assert curves[0] == curves[1] == curves[2]
