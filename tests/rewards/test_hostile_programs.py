"""Programs that mean harm score 0 within their limit and leave nothing behind."""

from __future__ import annotations

import json

import psutil
import pytest

from mrl.rewards.code import compute_score
from mrl.rewards.registry import sample_limit_s
from tests.marks import slow_but

pytestmark = pytest.mark.multiprocess
ADD = "a = int(input())\nprint(a + 1)"
HOSTILE = {
    "loop": "while True: pass",
    "forks": "import os\nwhile True:\n try: os.fork()\n except OSError: pass",
    "memory": "x = bytearray(10 << 30)\nprint(int(input()) + 1)",
    "exit": "import sys\nsys.exit(0)",
    "stdin-twice": "input()\nprint(int(input()) + 1)",
    "output": "import sys\nwhile True: sys.stdout.write('x' * (1 << 20))",
    "orphan": "import os, time\nif os.fork() == 0: os.setsid(), time.sleep(1e9)\nwhile True: pass",
}


def processes() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True)}


def score(program: str, *numbers: int, limit_s: float = 10.0) -> float:
    tests = {"inputs": [f"{n}\n" for n in numbers], "outputs": [f"{n + 1}\n" for n in numbers]}
    token = sample_limit_s.set(limit_s)
    try:
        found = compute_score("code", f"```python\n{program}\n```", json.dumps(tests))
    except TimeoutError:
        return 0.0
    finally:
        sample_limit_s.reset(token)
    return found["score"]


@pytest.mark.parametrize("name", slow_but(("loop", "exit", "output"), HOSTILE))
def test_a_hostile_program_scores_nothing_and_ends_whole(name: str) -> None:
    before = {p.pid for p in psutil.process_iter() if "mrl-box" in " ".join(_words(p))}
    children = processes()
    assert score(HOSTILE[name], 1, limit_s=2.0) == 0.0
    assert processes() == children
    after = {p.pid for p in psutil.process_iter() if "mrl-box" in " ".join(_words(p))}
    assert after <= before
    assert score(ADD, 1, 2) == 1.0  # the next one is judged as ever


def _words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


@pytest.mark.slow
def test_a_hundred_programs_leave_as_many_processes_as_before() -> None:
    before = processes()
    for number in range(100):
        hostile = HOSTILE["exit" if number % 2 else "stdin-twice"]
        assert score(hostile, number) == 0.0
    assert processes() == before
