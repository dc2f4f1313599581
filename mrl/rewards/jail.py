"""The jail of one program: `python -I -S jail.py RESULT_FD STATUS_FD`, its job as JSON on stdin.

Four processes: this one keeps time and, as a subreaper, ends only when all others are gone; the
second leaves for namespaces of its own; the third is their init; the fourth becomes the program.
In the namespaces there is no network, no other process is visible, and the file system is a small
tmpfs with the interpreter and the system's libraries read-only in it. When their init ends the
kernel ends every process in them, whatever sessions or double forks it hid behind, and the tmpfs
with them. Where namespaces are not allowed, Landlock (`landlock.py`) takes their place.

Standard library only: it must start fast and see nothing of the trainer.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Collection
from typing import Any, NoReturn

sys.path.append(os.path.dirname(__file__))  # last: `math.py` there is not the library's
import landlock  # type: ignore[import-not-found]  # mrl.rewards.landlock, without the package

_LIBC = ctypes.CDLL(None, use_errno=True)
_SET_DEATH_SIGNAL, _DROP_BOUND, _SET_SUBREAPER, _SET_NO_NEW_PRIVS = 1, 24, 36, 38  # linux/prctl.h
_RDONLY, _NOSUID, _NODEV, _REMOUNT, _BIND, _REC, _PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18
_KEPT_FLAGS = 1 | 2 | 4 | 8 | 1024 | 2048  # ro, nosuid, nodev, noexec, noatime, nodiratime
_NAMESPACES = (
    os.CLONE_NEWUSER | os.CLONE_NEWNS | os.CLONE_NEWPID | os.CLONE_NEWNET | os.CLONE_NEWIPC
)
_INSIDE, _NOBODY = 1000, 65534  # the program's user: inside, and outside if we are root there
_VISIBLE = (
    *("/usr", "/lib", "/lib64", "/bin", "/sbin", "/etc/ld.so.cache", "/etc/alternatives"),
    *("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom"),
)
_ROOTS = ("/tmp", "/dev/shm", "/var/tmp", "/mnt")  # where the tmpfs may lie: it hides the place
_BOX = "/box"
_DISK_MIB, _FILES = 64, 4096
_STDIN = "stdin"  # the one of the job's files that the program reads as its input

Job = dict[str, Any]


def main() -> None:
    """Run the job and write what became of it to the status pipe."""
    result_fd, status_fd = int(sys.argv[1]), int(sys.argv[2])
    for fd in (result_fd, status_fd):
        os.set_inheritable(fd, False)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD, signal.SIGTERM})
    _prctl(_SET_DEATH_SIGNAL, signal.SIGTERM)
    _prctl(_SET_SUBREAPER, 1)
    job: Job = json.load(sys.stdin) | {"result_fd": result_fd}
    with contextlib.suppress(OSError):  # should memory run out, the program goes first
        _write("/proc/self/oom_score_adj", "1000")
    status: Job = {"refused": "not asked for"}
    if job["namespaces"]:
        status = {"isolation": "namespaces"} | _supervise(_enter_namespaces, job)
    if refusal := status.get("refused"):
        status = _supervise(_enter_landlock, job)
        status |= {"isolation": "landlock", "namespaces": refusal}
    os.write(status_fd, json.dumps(status).encode())


def _supervise(enter: Callable[[Job, int], None], job: Job) -> Job:
    """Run the job behind `enter` in a process of its own, and see that nothing is left of it."""
    reports, report_fd = os.pipe()  # closed on exec: out of the program's reach
    child = os.fork()
    if child == 0:
        _guarded(report_fd, lambda: enter(job, report_fd))
    os.close(report_fd)
    asked = _wait(child, job["wall_s"])
    _end_all()
    with open(reports, encoding="utf-8") as file:
        status: Job = json.loads(file.readline() or "{}")
    return status or {"stopped" if asked else "timed_out": True}


def _wait(child: int, wall_s: float) -> bool:
    """Wait for a child for so long; tell whether a signal to stop came instead."""
    deadline = time.monotonic() + wall_s
    while (left := deadline - time.monotonic()) > 0:
        heard = signal.sigtimedwait({signal.SIGCHLD, signal.SIGTERM}, left)
        if heard is not None and heard.si_signo == signal.SIGTERM:
            return True
        if os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
            return False
    return False


def _end_all() -> None:
    """Kill our descendants until there are none; a subreaper inherits the orphans."""
    stopped: set[int] = set()
    while _has_children():
        found = _descendants()
        # What is stopped forks no more: killed at once, a fork bomb would refill its ranks.
        order = signal.SIGKILL if found <= stopped else signal.SIGSTOP
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, order)
        stopped |= found


def _has_children() -> bool:
    """Reap the dead and tell whether any child is left."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return False
    return True


def _descendants() -> set[int]:
    parents = {}
    for entry in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{entry}/stat", "rb") as file:
            parents[int(entry)] = int(file.read().rpartition(b")")[2].split()[1])
    found, new = set(), {os.getpid()}
    while new:
        new = {pid for pid, parent in parents.items() if parent in new}
        found |= new
    return found


def _guarded(report_fd: int, work: Callable[[], None]) -> NoReturn:
    """Do the work of a fork, which never returns; what stops it is reported as a refusal."""
    try:
        work()
    except BaseException as error:  # the edge of a process
        _report(report_fd, {"refused": f"{type(error).__name__}: {error}"})
    os._exit(0)


def _report(report_fd: int, status: Job) -> None:
    os.write(report_fd, json.dumps(status).encode() + b"\n")


def _enter_namespaces(job: Job, report_fd: int) -> None:
    """Leave for namespaces of our own and run the program under an init there."""
    _prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)
    left, leave = os.pipe()
    mapped, confirm = os.pipe()
    outside = os.fork()  # maps our users: from within, a root may map none but its own
    if outside == 0:
        _guarded(report_fd, lambda: _map_users(left, confirm))
    os.close(confirm)
    os.unshare(_NAMESPACES)
    os.write(leave, b"\n")
    is_mapped = os.read(mapped, 1)
    os.waitpid(outside, 0)
    if not is_mapped:
        return  # it has reported why
    init = os.fork()
    if init == 0:
        _guarded(report_fd, lambda: _be_init(job, report_fd))
    os.waitpid(init, 0)


def _map_users(left: int, confirm: int) -> None:
    os.read(left, 1)
    place = f"/proc/{os.getppid()}"
    uid, gid = os.geteuid(), os.getegid()
    if uid != 0:
        _write(f"{place}/setgroups", "deny")
    for name, own in (("uid_map", uid), ("gid_map", gid)):
        # root stays 0 inside while it builds the file system, then the program is nobody
        both = f"0 0 1\n{_INSIDE} {_NOBODY} 1\n"
        _write(f"{place}/{name}", both if uid == 0 else f"{_INSIDE} {own} 1\n")
    os.write(confirm, b"\n")


def _be_init(job: Job, report_fd: int) -> None:
    """As process 1 of the namespace: build the file system, run the program, report its end."""
    _prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)
    if os.getpid() != 1:
        raise OSError("not process 1 of a namespace")
    _build_root(job)
    _run_in(_BOX, job, report_fd, os.geteuid() == 0, job["processes"] + 3)


def _build_root(job: Job) -> None:
    """Make a tmpfs with what the interpreter needs, read-only, and an empty box; live in it."""
    links: dict[str, str] = {}
    wanted = filter(os.path.exists, (*_VISIBLE, *job["readable"], job["python"]))
    places = {_follow(path, links) for path in wanted}
    shown = [path for path in sorted(places) if not _lies_in(path, places)]
    root = next(r for r in _ROOTS if not any(_lies_in(path, {r}) for path in (*shown, *links)))
    _mount("none", "/", "", _REC | _PRIVATE)
    sources = {path: os.open(path, os.O_PATH) for path in shown}
    options = f"size={_DISK_MIB}m,nr_inodes={_FILES},mode=755"
    _mount("tmpfs", root, "tmpfs", _NOSUID | _NODEV, options)
    for path, target in links.items():
        if not _lies_in(path, places):
            os.makedirs(os.path.dirname(root + path), exist_ok=True)
            os.symlink(target, root + path)
    for path, fd in sources.items():
        _show(f"/proc/self/fd/{fd}", root + path)
        os.close(fd)
    for name in (_BOX, "/tmp", "/dev/shm"):
        os.makedirs(root + name, exist_ok=True)
        os.chmod(root + name, 0o1777)
    os.mkdir(f"{root}/proc")
    with contextlib.suppress(OSError):  # refused in a container that masks parts of its own
        _mount("proc", f"{root}/proc", "proc", _NOSUID | _NODEV)
    os.chroot(root)


def _follow(path: str, links: dict[str, str]) -> str:
    """Return where a path leads, and note each symbolic link on the way and its target."""
    done, left = "/", path.split("/")
    while left:
        step = os.path.normpath(os.path.join(done, left.pop(0)))
        if os.path.islink(step):
            links[step] = os.readlink(step)
            left = links[step].split("/") + left
            done = "/" if os.path.isabs(links[step]) else done
        else:
            done = step
    return done


def _lies_in(path: str, folders: Collection[str]) -> bool:
    return any(path.startswith(f"{folder}/") for folder in folders)


def _show(source: str, target: str) -> None:
    """Make a file or a folder visible at another place, read-only."""
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        _write(target, "")
    _mount(source, target, "", _BIND | _REC)
    kept = os.statvfs(target).f_flag & _KEPT_FLAGS  # a user may not lift them
    _mount("none", target, "", _BIND | _REMOUNT | _RDONLY | kept)


def _enter_landlock(job: Job, report_fd: int) -> None:
    """Run the program under Landlock in a folder that the caller removes."""
    os.mkdir(job["box"], 0o700)
    is_root = os.geteuid() == 0
    if is_root:
        interpreter = os.path.realpath(job["python"])
        if not _open_to_all(interpreter):
            raise PermissionError(
                f"the interpreter {interpreter} cannot be run by another user than root, as whom "
                "no untrusted program is run"
            )
        os.chown(job["box"], _NOBODY, _NOBODY)
    processes = job["processes"] + _threads_of(_NOBODY if is_root else os.geteuid())

    def restrict() -> None:
        readable = [p for p in (*_VISIBLE, *job["readable"]) if os.access(p, os.R_OK)]
        landlock.restrict(readable, writable=[job["box"]])

    _run_in(job["box"], job, report_fd, is_root, processes, restrict)


def _open_to_all(path: str) -> bool:
    if not os.stat(path).st_mode & 1:
        return False
    return path == "/" or _open_to_all(os.path.dirname(path))


def _threads_of(uid: int) -> int:
    """Count a user's threads, as the kernel's limit of processes does."""
    count = 0
    for entry in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if os.stat(f"/proc/{entry}").st_uid == uid:
                count += len(os.listdir(f"/proc/{entry}/task"))
    return count


def _run_in(
    box: str,
    job: Job,
    report_fd: int,
    is_root: bool,
    processes: int,
    restrict: Callable[[], None] = lambda: None,
) -> None:
    """Write the job's files into the box, run the program there and report how it ended."""
    os.chdir(box)
    for name, text in job["files"].items():
        _write(name, text)
        os.chmod(name, 0o644)
    program = os.fork()
    if program == 0:
        _guarded(report_fd, lambda: _become(box, job, is_root, processes, restrict))
    _, status = os.waitpid(program, 0)
    _report(report_fd, {"exit_code": os.waitstatus_to_exitcode(status)})


def _become(
    box: str, job: Job, is_root: bool, processes: int, restrict: Callable[[], None]
) -> None:
    """Give up every privilege, set the limits and become the program."""
    os.setsid()
    os.dup2(os.open(_STDIN, os.O_RDONLY), 0)
    os.unlink(_STDIN)
    os.dup2(job["result_fd"], 3)
    os.set_inheritable(3, True)
    if is_root:
        inside = _INSIDE if box == _BOX else _NOBODY
        for capability in range(64):
            _LIBC.prctl(_DROP_BOUND, capability, 0, 0, 0)
        os.setgroups([])
        os.setresgid(inside, inside, inside)
        os.setresuid(inside, inside, inside)
    _prctl(_SET_NO_NEW_PRIVS, 1)
    restrict()
    for kind, limit in (
        (resource.RLIMIT_CPU, job["cpu_s"]),
        (resource.RLIMIT_AS, job["memory_bytes"]),
        (resource.RLIMIT_FSIZE, _DISK_MIB << 20),
        (resource.RLIMIT_NPROC, processes),
        (resource.RLIMIT_NOFILE, 256),
        (resource.RLIMIT_CORE, 0),
    ):
        ceiling = limit + 1 if kind == resource.RLIMIT_CPU else limit  # a signal, then the end
        hard = resource.getrlimit(kind)[1]
        most = ceiling if hard == resource.RLIM_INFINITY else min(ceiling, hard)
        resource.setrlimit(kind, (min(limit, most), most))
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    environment = {
        **{"HOME": box, "TMPDIR": box, "PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"},
        **{"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"},
        # hashes decide the order in which a set is printed: the same score each time
        "PYTHONHASHSEED": "0",
    }
    os.execve(job["python"], [job["python"], *job["arguments"]], environment)


def _write(path: str, text: str) -> None:
    with open(path, "w", encoding="utf-8", errors="surrogatepass") as file:
        file.write(text)


def _prctl(option: int, value: int) -> None:
    if _LIBC.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl {option}: {os.strerror(ctypes.get_errno())}")


def _mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    texts = [text.encode() for text in (source, target, kind)]
    if _LIBC.mount(*texts, ctypes.c_ulong(flags), options.encode() or None) != 0:
        reason = os.strerror(ctypes.get_errno())
        raise OSError(ctypes.get_errno(), f"mount {source} on {target}: {reason}")


if __name__ == "__main__":
    main()
