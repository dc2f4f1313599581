"""Whole runs: their inputs, the `mrl` command, and what a run leaves behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import psutil

from mrl.tracking.jsonl import read_metrics

if TYPE_CHECKING:
    from mrl.types import PolicyBatch, ValueBatch
    from mrl.workers.group import Answers, RankPool

ROOT = Path(__file__).resolve().parent.parent
MRL = (str(Path(sys.executable).with_name("mrl")),)
START_LIMIT_S = 240.0  # ranks importing their libraries on a busy machine
RUN_LIMIT_S = 400.0  # a run on warm ranks
END_LIMIT_S = 30.0  # from a fault to the end of the job
PROMPTS_A_STEP = 8
TRAIN_ROWS = 20  # two steps an epoch; four rows are left out

CONFIG = """
data:
  train_batch_size: 8
  max_prompt_length: 8
  max_response_length: 8
actor:
  ppo_mini_batch_size: 4
  ppo_micro_batch_size_per_gpu: 8
  shuffle: true
  optim: {lr: 1.0e-3, lr_warmup_steps: 3, lr_decay_style: cosine}
  megatron: {tensor_model_parallel_size: 2}
critic: {optim: {lr: 1.0e-3}}
rollout:
  name: hf
  n: 4
  val_kwargs: {do_sample: true, temperature: 1.0, n: 2}
reward: {timeout_s: 2.0}
resharding: {verify: true}
algorithm:
  adv_estimator: gae
  use_kl_in_reward: true
  kl_ctrl: {type: adaptive, horizon: 100}
trainer: {n_gpus_per_node: 2, total_epochs: 2, test_freq: 2, save_freq: 1, critic_warmup: 1}
"""

# Scores every answer, but some: those raise, are None, or take too long.
REWARD = '''
"""A user's reward function."""

import time


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    fate = extra_info["index"] % 8
    if sum(map(ord, solution_str)) % 2 and extra_info["split"] == "train":
        if fate == 1:
            raise RuntimeError("this answer cannot be read")
        if fate == 2:
            return None
        if extra_info["index"] == 3:
            time.sleep(600)
    digits = sum(character.isdigit() for character in solution_str)
    return {"score": digits / 8, "length": len(solution_str)}
'''


@dataclass(frozen=True)
class Inputs:
    """What a run starts from."""

    folder: Path
    config: Path
    reward: Path
    sft: Path


def write_inputs(folder: Path, model: Path) -> Inputs:
    """Write rows, a reward function and a config of two ranks: PPO with every part in use."""
    for name, size, start in (("train", TRAIN_ROWS, 0), ("heldout", 5, 50)):
        rows = [
            {
                "data_source": "sums",
                "prompt": f"{n}+{n + 3}=",
                "reward_model": {"style": "rule", "ground_truth": str(2 * n + 3)},
                "extra_info": {"index": n, "split": name},
            }
            for n in range(start, start + size)
        ]
        _write_jsonl(folder / f"{name}.jsonl", rows)
    rows = [{"prompt": f"{n}+1=", "response": str(n + 1)} for n in range(20)]
    _write_jsonl(folder / "sft.jsonl", rows)
    (folder / "reward.py").write_text(REWARD)
    config = folder / "ppo.yaml"
    paths = {
        "model": {"path": str(model)},
        "data": {
            "train_files": [str(folder / "train.jsonl")],
            "val_files": [str(folder / "heldout.jsonl")],
        },
        "reward": {"custom_reward_function": {"path": str(folder / "reward.py")}},
    }
    (folder / "paths.yaml").write_text(json.dumps(paths))
    config.write_text("base: paths.yaml\n" + CONFIG)
    return Inputs(folder, config, folder / "reward.py", folder / "sft.jsonl")


def _write_jsonl(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


class Recording:
    """A pool that remembers the batches of rank 0's optimizer steps."""

    def __init__(self, held: AbstractContextManager[RankPool]) -> None:
        self._held = ExitStack()
        self.pool = self._held.enter_context(held)
        self.world_size = self.pool.world_size
        self.batches: list[PolicyBatch | ValueBatch] = []

    def submit(
        self, ranks: Sequence[int], role: str, method: str, args: tuple[Any, ...]
    ) -> Answers:
        if method in ("update", "update_fresh", "supervise") and 0 in ranks:
            self.batches.append(args[0])
        return self.pool.submit(ranks, role, method, args)

    def wait(self, futures: Any) -> list[Any]:
        return self.pool.wait(futures)

    def close(self) -> None:
        self._held.close()


class Command:
    """A command in a session of its own; whatever it started is gone when the block is left."""

    def __init__(
        self, arguments: Sequence[str], folder: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        """Start it with its output in `folder`."""
        folder.mkdir(parents=True, exist_ok=True)
        self.out_file, self.err_file = folder / "stdout.txt", folder / "stderr.txt"
        self._seen: dict[int, psutil.Process] = {}
        # OMP_NUM_THREADS as torchrun sets it: sums then have one order under every launcher.
        given = {**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})}
        with self.out_file.open("wb") as out, self.err_file.open("wb") as err:
            self.process = subprocess.Popen(
                list(arguments),
                cwd=ROOT,
                env=given,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )

    @property
    def stderr(self) -> str:
        """What it has written to its standard error."""
        return self.err_file.read_text(errors="replace")

    def tree(self) -> list[psutil.Process]:
        """List its live descendants, and remember them."""
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in psutil.Process(self.process.pid).children(recursive=True):
                self._seen.setdefault(process.pid, process)
        return [process for process in self._seen.values() if _lives(process)]

    def rank(self, rank: int) -> psutil.Process:
        """Find the process of a rank."""
        for process in self.tree():
            with contextlib.suppress(psutil.Error):
                if process.environ().get("RANK") == str(rank):
                    return process
        raise LookupError(f"no process has RANK={rank}:\n{self.stderr}")

    def wait_for_step(self, run: Path, step: int) -> None:
        """Wait until a run has logged a step."""
        deadline = time.monotonic() + START_LIMIT_S
        metrics = run / "metrics.jsonl"
        while not (metrics.exists() and any(r["step"] >= step for r in read_metrics(metrics))):
            assert self.process.poll() is None, f"ended early:\n{self.stderr}"
            assert time.monotonic() < deadline, f"step {step} took too long:\n{self.stderr}"
            time.sleep(0.1)

    def interrupt(self) -> None:
        """Press Ctrl-C: the terminal signals its foreground process group."""
        os.killpg(self.process.pid, signal.SIGINT)

    def wait(self, limit_s: float = START_LIMIT_S) -> int:
        """Wait for its end and give its exit status."""
        deadline = time.monotonic() + limit_s
        while self.process.poll() is None:
            self.tree()
            assert time.monotonic() < deadline, f"still running after {limit_s} s:\n{self.stderr}"
            time.sleep(0.1)
        return self.process.returncode

    def survivors(self) -> list[str]:
        """Name descendants that are still there a moment after its end."""
        deadline = time.monotonic() + 5.0
        while (left := [p for p in self._seen.values() if _lives(p)]) and (
            time.monotonic() < deadline
        ):
            time.sleep(0.1)
        return [str(process) for process in left]

    def __enter__(self) -> Command:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for process in self.tree():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.kill()
        self.process.wait()


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def run_command(
    arguments: Sequence[str], folder: Path, environment: Mapping[str, str] | None = None
) -> None:
    """Run a command that must succeed and leave no process."""
    with Command(arguments, folder, environment) as command:
        status = command.wait()
        assert status == 0, f"exit status {status}:\n{command.stderr}"
        assert not command.survivors()


def overrides(run: Path, *more: str) -> list[str]:
    """Give the arguments of a run into a folder."""
    return [f"trainer.default_local_dir={run}", *more]


_VARYING = ("timing_s/", "timing_per_token_ms/", "perf/", "reshard/seconds")


def steps_of(run: Path) -> dict[int, dict[str, Any]]:
    """Read the metrics of each step, without what depends on the clock."""
    return {
        row["step"]: {key: v for key, v in row.items() if not key.startswith(_VARYING)}
        for row in read_metrics(run / "metrics.jsonl")
    }


def rollouts_of(run: Path, step: int, kind: str = "rollouts") -> list[dict[str, Any]]:
    """Read the samples of a step."""
    text = (run / kind / f"{step}.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]
