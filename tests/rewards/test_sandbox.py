"""What a program may do in the sandbox, and what is left of it."""

from __future__ import annotations

import logging
import os
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

from mrl.rewards import sandbox
from mrl.rewards.sandbox import Limits, Outcome, SandboxError, run

pytestmark = pytest.mark.multiprocess
LONG = Limits(wall_s=30.0, cpu_s=20)  # for programs that end by themselves, on a busy machine
SHORT = Limits(wall_s=1.0, cpu_s=1)
# Root runs untrusted programs as nobody, who may not reach this interpreter: the system's instead.
SYSTEM = next((p for p in ("/usr/bin/python3", "/usr/local/bin/python3") if os.path.exists(p)), "")
LANDLOCK: Mapping[str, Any] = {"namespaces": False, "python": SYSTEM}
KINDS = [pytest.param({}, id="namespaces"), pytest.param(LANDLOCK, id="landlock")]


def program(text: str, stdin: str = "", limits: Limits = LONG, **how: Any) -> Outcome:
    try:
        return run({"main.py": text, "stdin": stdin}, ["-I", "main.py"], limits, **how)
    except SandboxError as error:
        if "Landlock: " in str(error) and how:
            pytest.skip(f"this machine: {error}")
        raise


def living(mark: str) -> list[int]:
    found = []
    for process in psutil.process_iter():
        try:
            if mark in " ".join(process.cmdline()):
                found.append(process.pid)
        except psutil.Error:
            continue
    return found


@pytest.mark.parametrize("how", KINDS)
def test_a_program_reads_its_input_and_its_output_and_result_come_back(how: Any) -> None:
    done = program("import os; print(input()[::-1]); os.write(3, b'r')", "abc\n", **how)
    assert (done.status, done.exit_code, done.stdout, done.result) == ("ok", 0, b"cba\n", b"r")
    assert done.isolation == ("landlock" if how else "namespaces")


def test_an_environment_behind_links_is_found(tmp_path: Path) -> None:
    (tmp_path / "env").symlink_to(sys.prefix)
    (tmp_path / "near").symlink_to("env/bin")
    (tmp_path / "python").symlink_to("../" + tmp_path.name + "/near/python")
    for python in (tmp_path / "env" / "bin" / "python", tmp_path / "python"):
        done = program("import sys; print(sys.base_prefix)", python=str(python))
        assert (done.stdout.decode().strip(), done.isolation) == (sys.base_prefix, "namespaces")


@pytest.mark.parametrize("how", KINDS)
def test_a_failing_program_is_an_error_with_its_words(how: Any) -> None:
    done = program("import sys; sys.exit('no idea')", **how)
    assert (done.status, done.exit_code) == ("error", 1)
    assert "no idea" in done.stderr
    assert program("import os; os.kill(os.getpid(), 9)", **how).exit_code == -9
    assert program("import os; os._exit(97)", **how).exit_code == 97


@pytest.mark.parametrize(
    "how", [KINDS[0], pytest.param(LANDLOCK, id="landlock", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(
    ("text", "status"),
    [
        ("while True: pass", "timeout"),
        ("import time; time.sleep(1e9)", "timeout"),
        ("import os\nwhile True:\n try: os.fork()\n except OSError: pass", "timeout"),
        ("while True: print('x' * 9999)", "output"),
        ("import os\nwhile True: os.write(3, b'x' * 9999)", "output"),
        ("x = bytearray(10 << 30)", "error"),
        ("x = []\nwhile True: x.append(bytearray(1 << 26))", "error"),
    ],
)
def test_no_program_passes_its_limits(text: str, status: str, how: Any) -> None:
    begin = time.monotonic()
    limits = SHORT if status == "timeout" else LONG
    assert program(text, limits=limits, **how).status == status
    assert time.monotonic() - begin < limits.wall_s + 8


@pytest.mark.parametrize("how", KINDS)
def test_nothing_started_by_a_program_outlives_it(how: Any) -> None:
    """Double forks in sessions of their own, after a quick and friendly end."""
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    done = program(
        "import os, subprocess, sys\n"
        "for _ in range(3):\n"
        "    if os.fork() == 0:\n"
        "        os.setsid()\n"
        "        if os.fork() == 0:\n"
        "            os.closerange(0, 9)\n"
        "            os.execv('/bin/sleep', ['sleep', '86399'])\n"
        "        os._exit(0)\n"
        "print('bye')",
        **how,
    )
    assert done.stdout == b"bye\n"
    assert living("sleep 86399") == []
    assert {child.pid for child in psutil.Process().children(recursive=True)} == before


@pytest.mark.parametrize("how", KINDS)
def test_no_file_is_written_elsewhere_and_none_is_left(how: Any, tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    boxes = set(Path(tempfile.gettempdir()).glob("mrl-box-*"))
    places = [
        str(tmp_path / "x"),
        "/etc/x",
        "/usr/x",
        f"{sys.prefix}/x",
        "/var/x",
        os.path.expanduser("~/x"),
    ]
    done = program(
        f"for place in {places}:\n"
        "    try: open(place, 'w').write('x'); print('written', place)\n"
        "    except OSError: pass\n"
        "import os; open('mine', 'w').write('x'); os.mkdir('closed'); os.chmod('closed', 0)\n"
        "print(open('mine').read())",
        **how,
    )
    assert done.stdout == b"x\n"
    assert not any(os.path.exists(place) for place in places)
    assert set(Path(tempfile.gettempdir()).glob("mrl-box-*")) == boxes


@pytest.mark.parametrize("how", KINDS)
def test_the_machine_is_not_seen(how: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = tmp_path / "secret"
    secret.write_text("xyzzy")
    secret.chmod(0o666)
    monkeypatch.setenv("MRL_TEST_SECRET", "xyzzy")
    done = program(
        f"import os; print(os.environ)\nfor place in {[str(secret), '/etc/passwd']}:\n"
        "    try: print(open(place).read())\n    except OSError: print('no')",
        **how,
    )
    assert b"xyzzy" not in done.stdout
    assert done.stdout.endswith(b"no\nno\n")


@pytest.mark.parametrize("how", KINDS)
def test_no_process_outside_is_reached(how: Any) -> None:
    done = program(
        f"import os\nfor pid in {[os.getpid()]} + [os.getppid()]:\n"
        "    try: os.kill(pid, 9); print('killed')\n"
        "    except (ProcessLookupError, PermissionError): print('no')",
        **how,
    )
    assert b"killed" not in done.stdout or not how
    assert psutil.pid_exists(os.getpid())


def test_there_is_no_network_in_the_namespaces() -> None:
    done = program(
        "import socket\n"
        "for kind, port in ((socket.SOCK_STREAM, 80), (socket.SOCK_DGRAM, 53)):\n"
        "    for host in ('127.0.0.1', '192.0.2.1'):\n"
        "        s = socket.socket(socket.AF_INET, kind)\n"
        "        try: s.connect((host, port)); print('connected', host, port)\n"
        "        except OSError as error: print(error.errno)\n"
    )
    assert done.stdout == b"101\n" * 4  # network is unreachable


def test_a_disk_in_the_namespaces_is_small_and_gone_with_them() -> None:
    done = program("f = open('big', 'wb')\nwhile True: f.write(bytes(1 << 20))")
    assert done.status == "error"
    assert done.exit_code == 1 or done.exit_code == -25  # no space left, or the file's own limit


def test_threads_run_programs_side_by_side() -> None:
    found: list[bytes] = []
    threads = [
        threading.Thread(target=lambda i=i: found.append(program(f"print({i})").stdout))
        for i in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == [b"0\n", b"1\n", b"2\n", b"3\n"]


def test_a_killed_caller_takes_the_program_with_it() -> None:
    code = (
        "from mrl.rewards.sandbox import *\n"
        "run({'m.py': 'import os; os.execv(\"/bin/sleep\", [\"sleep\", \"86398\"])'}, ['m.py'])"
    )
    with psutil.Popen([sys.executable, "-c", code]) as caller:
        until(lambda: bool(living("sleep 86398")))
        caller.kill()
    until(lambda: not living("sleep 86398"))


def until(holds: Any) -> None:
    end = time.monotonic() + 15
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_a_weaker_sandbox_is_told_loudly_and_once(caplog: pytest.LogCaptureFixture) -> None:
    sandbox._warn_once.cache_clear()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            program("1", **LANDLOCK)
    assert caplog.text.count("THE NETWORK IS NOT CLOSED") == 1


def test_without_any_confinement_nothing_is_run() -> None:
    with pytest.raises(SandboxError, match="no code is run"):
        run({"main.py": "print(1)"}, ["main.py"], SHORT, python="/no/such/python", namespaces=False)
