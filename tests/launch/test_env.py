"""The environment that all launch scripts set."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CORES = len(os.sched_getaffinity(0))


def environment(given: dict[str, str], before: str = "", after: str = "") -> dict[str, str]:
    """Source env.sh beside what a user has set; gives what it leaves."""
    script = f"set -euo pipefail; {before} source launch/env.sh; {after} env -0"
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=ROOT,
        env={"PATH": os.environ["PATH"], "PYTHON": sys.executable, **given},
        capture_output=True,
        text=True,
        check=True,
    )
    assert not done.stderr or after, done.stderr
    found = dict(line.split("=", 1) for line in done.stdout.split("\0") if "=" in line)
    return found | {"said": done.stderr}


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_the_ranks_of_a_host_share_its_cores(ranks: int) -> None:
    found = environment({"NPROC_PER_NODE": str(ranks)})
    assert found["OMP_NUM_THREADS"] == str(max(1, CORES // ranks))


@pytest.mark.skipif(CORES < 2, reason="one core cannot be taken away")
def test_cores_that_a_process_may_not_use_do_not_count() -> None:
    first = min(os.sched_getaffinity(0))
    found = environment({"NPROC_PER_NODE": "1"}, before=f"taskset -cp {first} $$ >/dev/null;")
    assert found["OMP_NUM_THREADS"] == "1"


def test_what_the_user_has_set_is_kept() -> None:
    given = {
        "NPROC_PER_NODE": "3",
        "OMP_NUM_THREADS": "7",
        "CUDA_DEVICE_MAX_CONNECTIONS": "32",
        "VLLM_USE_FLASHINFER_SAMPLER": "1",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3",
        "NCCL_SOCKET_IFNAME": "ib0",
        "NCCL_IB_HCA": "=mlx5_0,mlx5_1",
        "NCCL_DEBUG": "INFO",
        "GLOO_SOCKET_IFNAME": "eth1",
        "CUDA_VISIBLE_DEVICES": "4,5,6",
    }
    found = environment(given)
    assert {name: found[name] for name in given} == given


def test_the_variables_of_nccl_are_left_alone() -> None:
    assert not [name for name in environment({"NPROC_PER_NODE": "1"}) if name.startswith("NCCL_")]


def test_ranks_are_the_visible_gpus_and_one_without_any() -> None:
    assert environment({"CUDA_VISIBLE_DEVICES": "NoDevFiles"})["NPROC_PER_NODE"] == "1"


@pytest.mark.parametrize(
    ("given", "said"),
    [({}, "CUDA_VISIBLE_DEVICES is not set"), ({"CUDA_VISIBLE_DEVICES": "4,5"}, "DEVICES=4,5")],
)
def test_a_host_says_what_its_ranks_get(given: dict[str, str], said: str) -> None:
    given = {"NPROC_PER_NODE": "2", "OMP_NUM_THREADS": "5", **given}
    line = environment(given, after="say_ranks;")["said"]
    assert line.startswith("[launch] ") and said in line
    assert "2 ranks, OMP_NUM_THREADS=5" in line
