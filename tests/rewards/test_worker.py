"""Orphaned scoring processes, and what counts as a verdict."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from mrl.rewards.verdict import verdict

_PARENT = """
import sys, threading
from mrl.config.schema import CustomRewardConfig
from mrl.rewards.registry import ScoreItem
from mrl.rewards.runner import RewardRunner
runner = RewardRunner(CustomRewardConfig(sys.argv[1]), 1, timeout_s=600.0)
threading.Timer(0.5, lambda: print(runner._workers[0].process.pid, flush=True)).start()
runner.score([ScoreItem("mine", "sleep", "yes", {})])
"""


def test_a_stuck_score_ends_with_its_killed_parent(custom_file: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _PARENT, str(custom_file)], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        os.kill(parent.pid, signal.SIGKILL)
    end = time.monotonic() + 10
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < end
        time.sleep(0.1)


@pytest.mark.parametrize("one", [1, 1.0, True, np.float32(1), np.int64(1), np.array(1.0)])
def test_every_kind_of_number_is_a_score(one: object) -> None:
    assert verdict(one) == (1.0, "ok", "", {})


@pytest.mark.parametrize("bad", [None, "1", float("nan"), float("inf"), [1.0], {"score": None}, {}])
def test_what_is_no_finite_number_is_unscored(bad: object) -> None:
    value, status, detail, _ = verdict(bad)
    assert (value, status) == (None, "error")
    assert "returned" in detail
