"""Ranks that torchrun or srun started; the controller is a thread of rank 0."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Listener
from pathlib import Path

import torch.distributed as dist

from mrl.interrupts import ends_with_others
from mrl.workers.group import WorkerError
from mrl.workers.hangs import leave_traces
from mrl.workers.meeting import LOOPBACK, new_key, take_key
from mrl.workers.pool import SpmdPool
from mrl.workers.specs import JobSpec
from mrl.workers.spmd import rank_environment, work
from mrl.workers.wire import connect

_LAST_WORD_S = 20.0  # torchrun kills 30 s after its SIGTERM


def run_under_launcher(
    device: str,
    control: Callable[[Callable[[JobSpec], SpmdPool]], None],
    deterministic: bool = False,
) -> None:
    """Be rank 0 and the controller of a job that torchrun or srun started.

    `control(make_pool)` is the controller; it runs in a thread, since the roles want the main
    thread. When it fails, rank 0 prints the cause and ends non-zero, which makes the launcher end
    the other ranks.
    """
    is_one_host = os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]
    store, world_size = _meet(device, deterministic)
    given = take_key()
    authkey = given or new_key()
    # of several, on every address: MASTER_ADDR may name a loopback one on its own host
    listener = Listener((LOOPBACK if is_one_host else "", 0), backlog=world_size, authkey=authkey)
    host = LOOPBACK if is_one_host else os.environ["MASTER_ADDR"]
    # The store answers whoever asks: a key that the ranks were given is not put there.
    told = "" if given else authkey.hex()
    here = socket.gethostname(), os.getpid()
    store.set("controller", json.dumps([*here, host, listener.address[1], told]))

    pools: list[SpmdPool] = []
    if ends_with_others():
        outlive_sigterm(lambda: any(pool.has_failed for pool in pools))

    def make_pool(spec: JobSpec) -> SpmdPool:
        pool = SpmdPool(listener, world_size, spec, spec.hang_timeout_s, spec.timeout_s)
        pools.append(pool)
        pool.start()
        return pool

    def run() -> None:
        try:
            control(make_pool)
        except BaseException as error:
            # Process edge: the main thread may hang in a collective, so end from here.
            text = (
                str(error) if isinstance(error, WorkerError) else f"{type(error).__name__}: {error}"
            )
            if not isinstance(error, WorkerError):
                traceback.print_exc()
            print(text, file=sys.stderr, flush=True)
            _tell_torchrun(text)
            for pool in pools:  # after the last word: torchrun ends all ranks when one is killed
                pool.end_silent()
            os._exit(1)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    _work_for_controller(store, authkey)
    thread.join()


def outlive_sigterm(has_failed: Callable[[], bool]) -> None:
    """Let SIGTERM end this process a while later, if a rank has failed before.

    torchrun ends all ranks within 0.1 s of one's death: sooner than its cause is put together and
    told. The main thread may be in a collective, where Python runs no handler, but a signal's
    number reaches the pipe whatever the process does.
    """
    numbers, told = os.pipe()
    os.set_blocking(told, False)
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    signal.set_wakeup_fd(told, warn_on_full_buffer=False)

    def end() -> None:
        while os.read(numbers, 1)[0] != signal.SIGTERM:
            pass
        if has_failed():
            time.sleep(_LAST_WORD_S)  # who says it ends the process
        ctypes.CDLL(None).signal(int(signal.SIGTERM), None)  # Python's is for the main thread
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=end, daemon=True).start()


def serve_rank(device: str, deterministic: bool = False) -> None:
    """Be a rank other than 0 of a job that torchrun or srun started, until it is over."""
    store, _ = _meet(device, deterministic)
    _work_for_controller(store, take_key())


def _meet(device: str, deterministic: bool) -> tuple[dist.Store, int]:
    """Join the launcher's ranks; give the store that they share and their number."""
    store, rank, world_size = next(dist.rendezvous("env://"))
    local_rank = int(os.environ["LOCAL_RANK"])
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    os.environ |= rank_environment(
        rank, local_rank, world_size, local_size, device, os.environ, deterministic
    )
    # torchrun's store outlives its restarts, and so would the last try's controller
    tries = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"mrl/{tries}", store), world_size


def _work_for_controller(store: dist.Store, key: bytes | None) -> None:
    leave_traces()
    controller, pid, address, port, told = json.loads(store.get("controller"))
    rank = int(os.environ["RANK"])
    connection = connect((address, port), key or bytes.fromhex(told), rank)

    def on_silence() -> None:
        text = (
            f"rank {rank} has not heard of the controller, rank 0 (pid {pid} on {controller}), for "
            "trainer.hang_timeout_s: it is stopped, or its host is gone"
        )
        print(text, file=sys.stderr, flush=True)
        _tell_torchrun(text)
        if controller == socket.gethostname():  # it may be stopped, and then hears no SIGTERM
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    others = on_silence if rank else None
    work(connection, dist.PrefixStore("ranks", store), others)


def _tell_torchrun(cause: str) -> None:
    """Leave the cause where torchrun looks for it, so that its own last words repeat it."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path is not None:
        message = {"message": cause, "extraInfo": {"timestamp": str(int(time.time()))}}
        Path(path).write_text(json.dumps({"message": message}))
