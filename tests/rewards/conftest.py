"""Reward functions in a file, as a user writes them, and a pool around it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mrl.config.schema import CustomRewardConfig
from mrl.rewards.registry import ScoreItem
from mrl.rewards.runner import RewardRunner

_CUSTOM = """
import os, re, subprocess, sys, time

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    print("noise on stdout", flush=True)
    return getattr(Faults, solution_str, lambda: float(solution_str == ground_truth))()

class Faults:
    def sleep(): time.sleep(1e9)
    def spin():
        while True: pass
    def regex(): return re.match("(a+)+$", "a" * 64 + "b")
    def bigint(): return len(str(5 ** 5 ** 5 ** 5))
    def orphans():
        for new_session in (False, True):
            child = subprocess.Popen(["sleep", "4242"], start_new_session=new_session)
            with open(os.environ["PIDS"], "a") as file: file.write(f"{child.pid}\\\\n")
        time.sleep(1e9)
    def left_child():
        child = subprocess.Popen(["sleep", "4242"])
        with open(os.environ["PIDS"], "a") as file: file.write(f"{child.pid}\\\\n")
        return 1.0
    def boom(): raise KeyError("boom")
    def leave(): sys.exit(0)
    def die(): os._exit(3)
    def none(): return None
    def nan(): return float("nan")
    def text(): return "1.0"
    def scored(): return {"score": 0.5, "format": True, "parsed": 7, "note": "text"}
    def no_score(): return {"acc": 1.0}
    def torch(): return float("torch" in sys.modules)
    def pid(): return os.getpid()
""".replace("\\\\n", "\\n")


@pytest.fixture
def custom_file(tmp_path: Path) -> Path:
    file = tmp_path / "reward.py"
    file.write_text(_CUSTOM)
    return file


@pytest.fixture
def pool(custom_file: Path) -> Iterator[RewardRunner]:
    with RewardRunner(CustomRewardConfig(str(custom_file)), num_workers=2, timeout_s=1.0) as runner:
        yield runner


@pytest.fixture
def item() -> Callable[[str], ScoreItem]:
    """Build an item whose answer is right when it is "yes"."""
    return lambda solution: ScoreItem("mine", solution, "yes", {})
