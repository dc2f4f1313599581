"""Makes one rank of a job fail; Python imports this in every process with it on PYTHONPATH.

MRL_TEST_FAULT=<kind>:<role>.<method>:<rank>:<n> strikes at the n-th call of a role's method on one
rank: `raise` raises, `kill` ends the process as the kernel does when memory runs out. The moment is
written to the file MRL_TEST_FAULT_MARK.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.util
import os
import signal
import sys
import time
from typing import Any

_HOMES = {
    "actor": ("mrl.workers.actor", "Actor"),
    "critic": ("mrl.workers.critic", "Critic"),
    "rollout": ("mrl.workers.rollout", "Rollout"),
}


class _Planter(importlib.abc.MetaPathFinder):
    """Wraps a method of a class right after its module is loaded."""

    def __init__(self, fault: str) -> None:
        self.kind, target, rank, number = fault.split(":")
        self.role, self.method = target.split(".")
        self.rank, self.number, self.calls = rank, int(number), 0

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        module, cls = _HOMES[self.role]
        if name != module:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.loader is not None
        load = spec.loader.exec_module

        def load_and_plant(loaded: Any) -> None:
            load(loaded)
            self.plant(getattr(loaded, cls))

        spec.loader.exec_module = load_and_plant  # type: ignore[method-assign]
        return spec

    def plant(self, cls: type) -> None:
        original = getattr(cls, self.method)

        @functools.wraps(original)
        def method(*args: Any, **kwargs: Any) -> Any:
            if os.environ.get("RANK") == self.rank:
                self.calls += 1
                if self.calls == self.number:
                    self.strike()
            return original(*args, **kwargs)

        setattr(cls, self.method, method)

    def strike(self) -> None:
        with open(os.environ["MRL_TEST_FAULT_MARK"], "w") as mark:
            mark.write(str(time.monotonic()))
        if self.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise RuntimeError("the planted fault")


if "MRL_TEST_FAULT" in os.environ:
    sys.meta_path.insert(0, _Planter(os.environ["MRL_TEST_FAULT"]))
