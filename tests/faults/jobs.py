"""Jobs that meet faults: how soon each ends them, what they say, what they leave behind."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tests.runs import ROOT, Command

PLANTER = str(ROOT / "tests" / "faults")
RANKS = 2
STRIKE_LIMIT_S = 600.0  # for ranks to start and reach the fault, on a busy machine
END_LIMIT_S = 30.0  # from the detection of a fault to the end of the ranks
# above what ranks need to build their roles on a busy machine, with their imports or without
HANG_TIMEOUT_S = {"warm": 40.0, "spawned": 90.0, "torchrun": 90.0, "ray": 90.0}
RANK_PHASES = ("rollout", "log_prob", "update", "reshard", "validation", "save")
RANK_KINDS = ("kill", "term", "stop", "raise", "hang", "oom")
IDLE_KINDS = ("kill", "term", "stop")  # what has nothing to do raises nothing
TIMED = ("stop", "hang")  # found by the clock alone
# warm: as spawned, but ranks and controller are forked from a process that has imported all
LAUNCHERS = ("warm", "spawned", "torchrun", "ray")
TIMERS = {  # what the trainer calls a phase
    "rollout": "gen",
    "log_prob": "old_log_prob",
    "update": "update_actor",
    "reshard": "reshard",
    "validation": "testing",
    "save": "save_checkpoint",
}
WORDS = {
    "kill": r"SIGKILL|ended during|exitcode: -9",
    "term": r"SIGTERM|ended during|exitcode: -15",
    "crash": r"SIGSEGV|ended during",
    "stop": r"hangs in|ended during|has not heard of the controller",
    "hang": r"hangs in",
    "raise": r"RuntimeError: the planted fault",
    "oom": r"OutOfMemoryError: the planted fault",
}

CONFIG = """
data: {train_batch_size: 4, max_prompt_length: 8, max_response_length: 4}
actor:
  ppo_mini_batch_size: 4
  ppo_micro_batch_size_per_gpu: 8
  optim: {lr: 1.0e-3}
  megatron: {tensor_model_parallel_size: 2}
rollout:
  name: hf
  n: 4
  val_kwargs: {do_sample: true, temperature: 1.0, n: 1}
reward: {timeout_s: 5.0}
algorithm: {adv_estimator: grpo}
trainer:
  n_gpus_per_node: 2
  device: cpu
  logger: [console]
  val_before_train: false
  test_freq: 1
  save_freq: 1
  max_actor_ckpt_to_keep: 2
"""
REWARD = '''
"""Counts digits."""


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return sum(character.isdigit() for character in solution_str) / 4
'''


@dataclass(frozen=True)
class Fault:
    """A fault to plant; see sitecustomize.py."""

    kind: str
    phase: str
    rank: int
    step: int

    def __str__(self) -> str:
        return f"{self.kind}:{self.phase}:{self.rank}:{self.step}"


@dataclass(frozen=True)
class Ending:
    """How a job met a fault."""

    fault: Fault
    launcher: str
    seconds: float  # from the fault to the end of all ranks of that try
    detected_s: float  # of which the clock had to run before the fault could be known
    said: bool  # kind, rank, phase and step, where the launcher leaves the word to us
    left: tuple[str, ...]  # processes, shared memory, ports that outlived the ranks

    @property
    def as_wanted(self) -> bool:
        """Say whether it ended in time, with its cause, and left nothing."""
        return self.said and not self.left and self.seconds - self.detected_s < END_LIMIT_S


def write_inputs(folder: Path, model: Path) -> Path:
    """Write rows, a reward function and the config of the cheapest job; gives the config."""
    rows = [
        {
            "data_source": "sums",
            "prompt": f"{n}+{n + 3}=",
            "reward_model": {"style": "rule", "ground_truth": str(2 * n + 3)},
            "extra_info": {"index": n},
        }
        for n in range(10)
    ]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "train.jsonl").write_text(text)
    (folder / "heldout.jsonl").write_text("".join(text.splitlines(keepends=True)[:2]))
    (folder / "reward.py").write_text(REWARD)
    paths = {
        "model": {"path": str(model)},
        "data": {
            "train_files": [str(folder / "train.jsonl")],
            "val_files": [str(folder / "heldout.jsonl")],
        },
        "reward": {"custom_reward_function": {"path": str(folder / "reward.py")}},
    }
    (folder / "paths.yaml").write_text(json.dumps(paths))
    (folder / "config.yaml").write_text("base: paths.yaml\n" + CONFIG)
    return folder / "config.yaml"


def command_line(
    launcher: str,
    config: Path,
    run: Path,
    steps: int,
    restarts: int = 0,
    changes: Sequence[str] = (),
) -> list[str]:
    """Give the command of a job of so many steps."""
    mrl = ["-m", "mrl.cli", "train", str(config)]
    more = [
        f"trainer.default_local_dir={run}",
        f"trainer.total_training_steps={steps}",
        f"trainer.total_epochs={steps}",
        f"trainer.max_restarts={restarts}",
        *changes,
    ]
    match launcher:
        case "torchrun":
            torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
            mrl = [*torchrun, str(RANKS), "--max-restarts", str(restarts), *mrl]
        case "ray":
            more.append("trainer.launcher=ray")
    return [sys.executable, *mrl, *more]


def start(
    launcher: str,
    config: Path,
    run: Path,
    steps: int,
    restarts: int = 0,
    changes: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> Command:
    """Start a job; its output goes beside its run folder."""
    line = command_line(launcher, config, run, steps, restarts, changes)
    if launcher != "warm":
        return Command(line, run.parent, environment)
    from tests.faults.warm import WarmCommand

    return WarmCommand(line[3:], run.parent, environment)


class FaultyJob:
    """A job with faults to come; each try ends with one, and the next goes on from there."""

    def __init__(
        self,
        launcher: str,
        config: Path,
        folder: Path,
        faults: Sequence[Fault],
        steps: int,
        changes: Sequence[str] = (),
        hang_timeout_s: float | None = None,
    ) -> None:
        """Start it."""
        self.launcher, self.faults, self.run = launcher, tuple(faults), folder / "run"
        self.hang_timeout_s = hang_timeout_s or HANG_TIMEOUT_S[launcher]
        self.marks = folder / "marks"
        self.marks.mkdir(parents=True)
        restarts = sum(fault.phase != "reward" for fault in faults)
        environment = {
            "PYTHONPATH": os.pathsep.join([str(ROOT), PLANTER]),
            "MRL_TEST_FAULTS": " ".join(map(str, faults)),
            "MRL_TEST_FAULT_MARKS": str(self.marks),
        }
        limits = [f"trainer.hang_timeout_s={self.hang_timeout_s}", *changes]
        self.command = start(launcher, config, self.run, steps, restarts, limits, environment)
        self._ports: set[int] = set()  # at which ranks that met a fault listened
        self._told = 0  # characters of its standard error that earlier endings had

    def meet(self, index: int) -> Ending:
        """Wait for a fault and for the end of what it hit."""
        fault = self.faults[index]
        struck = self._wait_for_strike(index)
        things = self._things(index)
        limit = END_LIMIT_S + 30.0 + (self.hang_timeout_s if fault.kind in TIMED else 0.0)
        if fault.phase == "reward":
            limit += STRIKE_LIMIT_S
        left = self._left(things)
        while time.monotonic() - struck < limit and (left := self._left(things)):
            if fault.phase == "reward" and self._scored_again(index):
                break
            time.sleep(0.1)
        seconds = time.monotonic() - struck
        if fault.phase == "reward":
            return Ending(fault, self.launcher, seconds, 0.0, True, ())
        detected = self.hang_timeout_s if fault.kind in TIMED else 0.0
        said = self._said(fault)
        return Ending(fault, self.launcher, seconds, min(detected, seconds), said, tuple(left))

    def _wait_for_strike(self, index: int) -> float:
        mark = self.marks / str(index)
        deadline = time.monotonic() + STRIKE_LIMIT_S
        while not (mark.exists() and mark.read_text()):
            if self.command.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{self.faults[index]} did not strike:\n{self.command.stderr}")
            self.command.tree()
            time.sleep(0.05)
        return float(mark.read_text())

    def _things(self, index: int) -> list[tuple[str, Any]]:
        """List what the ranks that met a fault hold, each with a test that it is gone."""
        struck = (self.marks / str(index)).stat().st_mtime
        things: list[tuple[str, Any]] = []
        for process in self.command.tree():
            with contextlib.suppress(psutil.Error):
                is_of_this_try = process.create_time() < struck
                if not (is_of_this_try and self._is_rank(process)):
                    continue
                things.append((f"process {process.pid} {process.name()}", _gone(process)))
                for file in process.open_files():
                    if file.path.startswith("/dev/shm/"):
                        path = Path(file.path)
                        things.append((file.path, lambda path=path: not path.exists()))
                for socket in process.net_connections("tcp"):
                    if socket.status == psutil.CONN_LISTEN:
                        self._ports.add(socket.laddr.port)
        return things

    def _is_rank(self, process: psutil.Process) -> bool:
        if self.launcher == "warm":  # a child of the zygote, which is one of the controller
            return process.parent().ppid() == self.command.process.pid
        return "RANK" in process.environ()

    def _left(self, things: Sequence[tuple[str, Any]]) -> list[str]:
        return [name for name, gone in things if not gone()]

    def _scored_again(self, index: int) -> bool:
        """Say whether the job has finished a step since a scoring process failed."""
        metrics = self.run / "metrics.jsonl"
        struck = (self.marks / str(index)).stat().st_mtime
        return metrics.exists() and metrics.stat().st_mtime > struck

    def _said(self, fault: Fault) -> bool:
        """Say whether rank, phase, step and kind stand in one line of what is new on the screen."""
        phase = TIMERS.get(fault.phase, r"\w+")
        words, rank = WORDS[fault.kind], rf"rank {fault.rank}\b"
        place = rf"in step {fault.step} \({phase}\)"
        if (
            self.launcher == "torchrun"
            and fault.rank == 0
            and fault.kind in ("kill", "term", "stop")
        ):
            # the controller is gone with its rank: torchrun has the word, but knows no step
            place, words = "", words + r"|Signal \d+|SIG\w+"
            rank = rf"rank\s*:?\s*{fault.rank}\b|local_rank: {fault.rank}\b"
        deadline = time.monotonic() + 10.0
        while time.monotonic() < deadline:
            new = self.command.stderr[self._told :]
            for line in new.splitlines():
                if all(re.search(part, line) for part in (place, rank, words)):
                    self._told += new.index(line) + len(line)
                    return True
            time.sleep(0.2)
        return False

    def finish(self, limit_s: float = STRIKE_LIMIT_S) -> list[str]:
        """Wait for the end of a job that was restarted each time; gives what is still there."""
        status = self.command.wait(limit_s)
        assert status == 0, f"exit status {status}:\n{self.command.stderr}"
        return self.left_behind()

    def left_behind(self) -> list[str]:
        """Name processes and listening ports of the job that are there after its end."""
        survivors = self.command.survivors()
        strangers = set(psutil.pids()) - set(self.command._seen)  # may have been given the same
        left = {port: pid for port, pid in _listening() if port in self._ports}
        ports = [f"port {port}" for port, pid in left.items() if pid not in strangers]
        return survivors + ports

    def __enter__(self) -> FaultyJob:
        return self

    def __exit__(self, *error: Any) -> None:
        self.command.__exit__(*error)


def _gone(process: psutil.Process) -> Any:
    def gone() -> bool:
        try:
            return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True

    return gone


def _listening() -> list[tuple[int, int | None]]:
    """List ports with their processes."""
    connections = psutil.net_connections("tcp")
    return [(c.laddr.port, c.pid) for c in connections if c.status == psutil.CONN_LISTEN]
