"""Running a program that nobody trusts, within limits, leaving nothing behind.

`jail.py` does the confining, in processes of its own; this side hands over the job, bounds what is
read back, and sees the jail end. What confines depends on the kernel: `Outcome.isolation`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

logger = logging.getLogger(__name__)

_JAIL = Path(__file__).with_name("jail.py")
_GRACE_S = 10.0  # for the jail to start and to end beside the program's own time
_READ = 1 << 16
_STDERR_BYTES = 4096  # of its end, kept


class SandboxError(RuntimeError):
    """No confinement could be set up, so the program did not run."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What one program may use."""

    wall_s: float = 20.0
    cpu_s: int = 10  # of each of its processes
    memory_bytes: int = 1 << 30  # address space of each of its processes
    output_bytes: int = 1 << 20  # to stdout, stderr and the result, each
    processes: int = 16  # at a time, threads included


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a program ended, and what it wrote."""

    status: str  # "ok" (exit code 0), "error", "timeout" (wall or CPU) or "output" (too much)
    exit_code: int | None  # negative: the signal that ended it; None: it was ended by us
    stdout: bytes
    stderr: str  # its end
    result: bytes  # what it wrote to file descriptor 3
    isolation: str  # "namespaces" or "landlock"


def run(
    files: Mapping[str, str],
    arguments: Sequence[str],
    limits: Limits = Limits(),
    *,
    python: str = sys.executable,
    namespaces: bool = True,
) -> Outcome:
    """Run `python ARGUMENTS` in an empty folder that holds `files`, the one `stdin` as its input.

    All that it started is gone when this returns. With `namespaces=False` they are not tried.

    Raises:
        SandboxError: if the kernel allows no confinement; the program did not run.
    """
    box = os.path.join(tempfile.gettempdir(), f"mrl-box-{secrets.token_hex(8)}")
    job = {
        "files": {"stdin": "", **files},
        "arguments": list(arguments),
        "python": python,
        "box": box,
        "readable": sorted({sys.prefix, sys.base_prefix}),
        "namespaces": namespaces,
        "wall_s": limits.wall_s,
        "cpu_s": limits.cpu_s,
        "memory_bytes": limits.memory_bytes,
        "processes": limits.processes,
    }
    result, result_end = os.pipe()
    status, status_end = os.pipe()
    jail = subprocess.Popen(
        [sys.executable, "-I", "-S", str(_JAIL), str(result_end), str(status_end)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        pass_fds=(result_end, status_end),
        start_new_session=True,
        env={"LANG": "C.UTF-8"},  # no secret of ours
        cwd="/",
    )
    try:
        os.close(result_end)
        os.close(status_end)
        assert jail.stdin and jail.stdout and jail.stderr
        with contextlib.suppress(BrokenPipeError), jail.stdin as stdin:
            stdin.write(json.dumps(job).encode())
        streams = (jail.stdout.fileno(), jail.stderr.fileno(), result, status)
        texts, excess = _read_all(jail, streams, limits)
    finally:
        _end(jail)
        os.close(result)
        os.close(status)
        _remove(box)
    return _outcome(texts, excess)


def _read_all(
    jail: subprocess.Popen[bytes], streams: Sequence[int], limits: Limits
) -> tuple[list[bytes], bool]:
    """Read all streams to their ends; past a limit have the jail end its program."""
    texts = {fd: bytearray() for fd in streams}
    deadline = time.monotonic() + limits.wall_s + _GRACE_S
    excess = False
    with selectors.DefaultSelector() as selector:
        for fd in streams:
            selector.register(fd, selectors.EVENT_READ)
        while selector.get_map() and (left := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                if not (part := os.read(key.fd, _READ)):
                    selector.unregister(key.fd)
                elif len(texts[key.fd]) + len(part) <= limits.output_bytes:
                    texts[key.fd] += part
                elif not excess:  # what comes after is read and dropped, so that nobody blocks
                    excess = True
                    jail.send_signal(signal.SIGTERM)
    return [bytes(texts[fd]) for fd in streams], excess


def _end(jail: subprocess.Popen[bytes]) -> None:
    """See the jail gone; one that does not end by itself is killed with what it holds."""
    if jail.poll() is None:
        jail.send_signal(signal.SIGTERM)
        try:
            jail.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            jail.kill()
            jail.wait()
    for stream in (jail.stdout, jail.stderr):
        if stream is not None:
            stream.close()


def _outcome(texts: Sequence[bytes], excess: bool) -> Outcome:
    stdout, stderr, result, status_text = texts
    errors = stderr[-_STDERR_BYTES:].decode(errors="replace")
    status = json.loads(status_text) if status_text else {"refused": f"jail failed: {errors}"}
    if "namespaces" in status:
        _warn_once(status["namespaces"])
    if "refused" in status:
        raise SandboxError(
            f"no sandbox, so no code is run: namespaces: {status.get('namespaces', 'no answer')}; "
            f"Landlock: {status['refused']}"
        )
    code = status.get("exit_code")
    name = "ok" if code == 0 else "error"
    if excess:
        name = "output"
    elif status.get("timed_out") or code == -signal.SIGXCPU:
        name = "timeout"
    assert code is None or isinstance(code, int)
    return Outcome(name, code, stdout, errors, result, status["isolation"])


def _remove(box: str) -> None:
    """Remove a folder whose owner may have closed parts of it; without namespaces there is one."""
    if not os.path.isdir(box):
        return
    for folder, names, _ in os.walk(box):
        for name in names:
            if not os.path.islink(path := os.path.join(folder, name)):
                os.chmod(path, 0o700)
    shutil.rmtree(box)


@cache
def _warn_once(refusal: str) -> None:
    logger.warning(
        "SANDBOX WEAKENED: this kernel refuses namespaces (%s). Landlock keeps programs from "
        "writing outside their folder, but THE NETWORK IS NOT CLOSED TO THEM (TCP is from Linux "
        "6.7 on, UDP never), AND BEFORE "
        "LINUX 6.12 NEITHER ARE SIGNALS to this user's processes. In a container, allow user "
        "namespaces (seccomp, AppArmor, user.max_user_namespaces).",
        refusal,
    )
