"""Every launcher runs the same job to the same numbers."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mrl.tracking.jsonl import read_metrics
from tests.runs import MRL, Inputs, overrides, rollouts_of, run_command, steps_of

pytestmark = pytest.mark.multiprocess

TORCHRUN = (
    sys.executable, "-m", "torch.distributed.run",
    "--standalone", "--nproc-per-node", "2", "--max-restarts", "0", "-m", "mrl.cli",
)  # fmt: skip
LAUNCHERS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "spawned": (MRL, ()),
    "torchrun": (TORCHRUN, ()),
    "ray": (MRL, ("trainer.launcher=ray",)),
}


def train(launcher: str, inputs: Inputs, run: Path, *changes: str) -> Path:
    command, more = LAUNCHERS[launcher]
    arguments = [*command, "train", str(inputs.config), *overrides(run, *more, *changes)]
    run_command(arguments, run.parent)
    return run


def assert_same_results(run: Path, other: Path) -> None:
    steps = steps_of(run)
    assert steps == steps_of(other)
    last = max(steps)
    for step in range(1, last + 1):
        assert rollouts_of(run, step) == rollouts_of(other, step)
    for name in ("actor/huggingface/model", "critic/huggingface/model"):
        file = f"global_step_{last}/{name}.safetensors"
        found, expected = load_file(run / file), load_file(other / file)
        assert [n for n in expected if not torch.equal(found[n], expected[n])] == []


# torchrun's fast sibling is in test_faults.py: its first step is compared there
@pytest.mark.parametrize("launcher", [pytest.param("torchrun", marks=pytest.mark.slow), "ray"])
def test_launchers_agree_to_the_last_bit(
    launcher: str, spawned_run: Path, inputs: Inputs, tmp_path: Path
) -> None:
    profiled = ("trainer.profile_steps=[2]", "trainer.profile_ranks=null")
    run = train(launcher, inputs, tmp_path / "run", *profiled)
    assert_same_results(run, spawned_run)
    traces = sorted(path.name for path in (run / "profile" / "step_2").iterdir())
    assert traces == ["rank_0.trace.json.gz", "rank_1.trace.json.gz"]
    for row in read_metrics(run / "metrics.jsonl")[2:]:
        assert row["perf/rank_spread/update_actor"] >= 1
        assert row["perf/slowest_rank/gen"] in (0, 1)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_launchers_agree_to_the_last_bit_with_vllm(inputs: Inputs, tmp_path: Path) -> None:
    spawned, *others = (
        train(name, inputs, tmp_path / name / "run", "rollout.name=vllm") for name in LAUNCHERS
    )
    for other in others:
        assert_same_results(other, spawned)
