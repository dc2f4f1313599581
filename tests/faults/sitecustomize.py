"""Makes ranks of a job fail; Python imports this in every process with it on PYTHONPATH.

MRL_TEST_FAULTS holds faults, `<kind>:<phase>:<rank>:<step>`, with blanks between. Each strikes once
in a job, whatever restarts, and leaves a file `<index>` in the folder MRL_TEST_FAULT_MARKS with the
moment. Phases are those of PHASES, kinds those of KINDS. A validation is told from a rollout by its
sampling: the job has `rollout.val_kwargs.n=1` and `rollout.n` above. In the phase `idle` a rank has
nothing to do, because rewards are computed; in `reward` a scoring process fails, whatever rank
and step say.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.util
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

_REWARD_CALLS = 4  # of a scoring process, between two faults


def _end(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)
    time.sleep(1.0)  # a signal may take its time


def _hang() -> None:
    while True:
        time.sleep(3600.0)


def _raise() -> None:
    raise RuntimeError("the planted fault")


def _run_out_of_memory() -> None:
    if "torch" not in sys.modules:
        raise MemoryError("the planted fault")
    import torch

    raise torch.OutOfMemoryError("the planted fault: tried to allocate 2.00 GiB")


KINDS: dict[str, Callable[[], None]] = {
    "kill": lambda: _end(signal.SIGKILL),
    "term": lambda: _end(signal.SIGTERM),
    "stop": lambda: _end(signal.SIGSTOP),
    "crash": lambda: _end(signal.SIGSEGV),
    "raise": _raise,
    "hang": _hang,
    "oom": _run_out_of_memory,
}


class Hook(NamedTuple):
    """Where a phase runs on a rank."""

    module: str
    cls: str
    method: str
    ahead: int  # of the engine's weights: the step in hand is their version plus this


_ROLLOUT = ("mrl.workers.rollout", "Rollout")
_ACTOR = ("mrl.workers.actor", "Actor")
PHASES = {
    "rollout": Hook(*_ROLLOUT, "generate", 1),
    "idle": Hook(*_ROLLOUT, "sleep", 1),
    "log_prob": Hook(*_ACTOR, "log_probs", 1),
    "update": Hook(*_ACTOR, "update", 1),
    "reshard": Hook("mrl.workers.weight_sync", "WeightSync", "run", 0),
    "validation": Hook(*_ROLLOUT, "generate", 0),
    "save": Hook(*_ACTOR, "save", 0),
}


class Fault(NamedTuple):
    """One fault to come."""

    index: int
    kind: str
    phase: str
    rank: str
    step: int

    def claim(self) -> bool:
        """Strike, unless it has been done; tells the moment to whoever waits for it."""
        mark = os.path.join(os.environ["MRL_TEST_FAULT_MARKS"], str(self.index))
        try:
            file = os.open(mark, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
        except FileExistsError:
            return False
        os.write(file, str(time.monotonic()).encode())
        os.close(file)
        return True


class _Planter(importlib.abc.MetaPathFinder):
    """Wraps the functions of some modules right after those are loaded."""

    def __init__(self) -> None:
        self.version, self.synced, self.calls = -1, False, 0
        self.modules = {hook.module for hook in PHASES.values()} | {"mrl.rewards.registry"}

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name not in self.modules:
            return None
        self.modules.remove(name)
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.loader is not None
        load = spec.loader.exec_module

        def load_and_plant(loaded: Any) -> None:
            load(loaded)
            if name == "mrl.rewards.registry":
                self.plant_reward(loaded)
                return
            hooks = {hook[1:3] for hook in PHASES.values() if hook.module == name}
            for cls, method in hooks:
                self.plant(getattr(loaded, cls), method)

        spec.loader.exec_module = load_and_plant  # type: ignore[method-assign]
        return spec

    def plant(self, cls: type, name: str) -> None:
        original = getattr(cls, name)

        @functools.wraps(original)
        def method(*args: Any, **kwargs: Any) -> Any:
            if name == "run":  # the first only brings the engine up to the trainer's weights
                if self.synced:
                    self.strike(("reshard",), args[1])
                result = original(*args, **kwargs)
                self.version, self.synced = args[1], True
                return result
            if name == "sleep":
                result = original(*args, **kwargs)
                threading.Thread(target=self.strike, args=(("idle",), self.version + 1)).start()
                return result
            phases = [p for p, hook in PHASES.items() if hook[1:3] == (cls.__name__, name)]
            if name == "generate":
                phases = ["validation" if args[2].n == 1 else "rollout"]
            self.strike(phases, self.version + PHASES[phases[0]].ahead)
            return original(*args, **kwargs)

        setattr(cls, name, method)

    def plant_reward(self, registry: Any) -> None:
        original = registry.load_custom

        def load_custom(*args: Any) -> Any:
            function = original(*args)

            def score(*args: Any, **kwargs: Any) -> Any:
                self.calls += 1
                if self.calls > _REWARD_CALLS and "mrl.rewards.worker" in sys.orig_argv:
                    self.strike(("reward",), 0)
                return function(*args, **kwargs)

            return score

        registry.load_custom = load_custom

    def strike(self, phases: Any, step: int) -> None:
        for fault in read(os.environ["MRL_TEST_FAULTS"]):
            if fault.phase not in phases:
                continue
            is_here = fault.phase == "reward" or (fault.rank, fault.step) == (
                os.environ.get("RANK"),
                step,
            )
            if is_here and fault.claim():
                self.calls = 0
                KINDS[fault.kind]()
                return


def read(text: str) -> list[Fault]:
    """Read the faults of MRL_TEST_FAULTS."""
    faults = []
    for index, word in enumerate(text.split()):
        kind, phase, rank, step = word.split(":")
        faults.append(Fault(index, kind, phase, rank, int(step)))
    return faults


if "MRL_TEST_FAULTS" in os.environ:
    sys.meta_path.insert(0, _Planter())
