"""Jobs whose controller and ranks are forked from this process, which has imported all they need.

Starting a job then takes a second instead of half a minute. This process must have no threads.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import traceback
from collections.abc import Mapping, Sequence
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

from mrl.workers.wire import die_with_parent
from tests.ranks import WARM_MODULES, Ranks, zygote
from tests.runs import ROOT, Command, Recording

_JOB_LIMIT_S = 7200.0
_UNUSED = "vllm"  # the jobs here generate with transformers


class _OwnRanks(Ranks):
    """Ranks forked from a fork of this process."""

    def __init__(self, logs: Path) -> None:
        self._logs, self._count, self._ready = logs, 0, False
        self._control, theirs = Pipe()
        if os.fork() == 0:
            self._control.close()
            try:
                zygote(theirs.fileno(), warm_modules())
            finally:
                os._exit(0)
        theirs.close()


class _Forked:
    """A child process as `subprocess.Popen` has them."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        return self._reap(os.WNOHANG)

    def wait(self) -> int | None:
        return self._reap(0)

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)

    def _reap(self, how: int) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, how)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode


class WarmCommand(Command):
    """`mrl ...` in a fork of this process."""

    def __init__(
        self, arguments: Sequence[str], folder: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        """Start it with its output in `folder`."""
        for name in ("mrl.trainer", *warm_modules()):
            importlib.import_module(name)
        folder.mkdir(parents=True, exist_ok=True)
        self.out_file, self.err_file = folder / "stdout.txt", folder / "stderr.txt"
        self._seen = {}
        for file in (self.out_file, self.err_file):
            file.write_bytes(b"")
        pid = os.fork()
        if pid == 0:
            self._be_controller(arguments, folder, environment or {})
        self.process: Any = _Forked(pid)

    def _be_controller(
        self, arguments: Sequence[str], folder: Path, environment: Mapping[str, str]
    ) -> None:
        code = 1
        try:
            os.setsid()
            die_with_parent()
            for number, path in ((1, self.out_file), (2, self.err_file)):
                os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND), number)
            os.chdir(ROOT)
            os.environ.update({"OMP_NUM_THREADS": "1", **environment})
            ranks = _OwnRanks(folder / f"ranks_{os.getpid()}")
            job = importlib.import_module("mrl.workers.job")
            job.SpawnedPool = lambda world, spec, logs: Recording(  # type: ignore[attr-defined]
                ranks.job(world, spec, _JOB_LIMIT_S)
            )
            code = importlib.import_module("mrl.cli").main(arguments)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)


def warm_modules() -> list[str]:
    """List what ranks of these jobs import."""
    return [name for name in WARM_MODULES if _UNUSED not in name]
