"""Programs, judged by running them in the sandbox.

`ground_truth` is a JSON object of test cases, as in verl (`reward_score/sandbox_fusion`,
`prime_code`):

    {"inputs": ["1 2\\n", ..], "outputs": ["3\\n", ..]}          stdin and what must be on stdout
    {"inputs": ["1\\n2", ..], "outputs": ["3", ..], "fn_name": "add"}  arguments and result as JSON
    {"assert_case": ["assert add(1, 2) == 3", ..]}               statements that must not raise

The program is the last block of the response marked python, or else the last unmarked one; without
a block the score is 0. Each case runs alone, in a sandbox of its own. Outputs are equal line by
line, blanks at line ends aside; results are equal as JSON, and true is not 1. The score is
prime_code's: the share of the first 10 cases, and 1 only if all cases pass; `acc` is 1 for that.
A program that runs out of a case's time fails it and those after it. Expected outputs and results
never enter the sandbox; statements do, in the program's process, which could deceive them.
"""

from __future__ import annotations

import json
import re
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mrl.rewards.registry import register, sample_limit_s
from mrl.rewards.sandbox import Limits, Outcome, run

_BLOCK = re.compile(r"```([^\n`]*)\n(.*?)(?:^[ \t]*```|\Z)", re.MULTILINE | re.DOTALL)
_FIRST = 10  # cases whose share is the score of a program that fails one of them
_SHARE = 0.8  # of the sample's time that its cases may take in all
_CPU_S = 10.0  # of one case; twice as long on the clock

# Runs the program as a module: its `__main__` part is left out. The token proves that the end was
# reached: exit(0) proves nothing. LeetCode's answers expect these names.
_CALLER = """
import json, os, sys
given = json.load(sys.stdin)
names = {"__name__": "solution"}
exec("import bisect, collections, functools, heapq, itertools, math, re, string\\n"
     "from typing import *\\nfrom collections import *\\nfrom functools import *\\n"
     "from heapq import *\\nfrom itertools import *\\nfrom bisect import *", names)
with open("solution.py", encoding="utf-8") as file:
    exec(compile(file.read(), "solution.py", "exec"), names)
if "fn_name" in given:
    owner, name = names.get("Solution"), given["fn_name"]
    function = getattr(owner(), name) if hasattr(owner, name) else names[name]
    result = json.dumps(function(*given["arguments"]))
else:
    exec(compile(given["assert_case"], "assert_case", "exec"), names)
    result = ""
with open(3, "w", encoding="utf-8") as file:
    file.write(given["token"] + result)
"""


@dataclass(frozen=True, slots=True)
class Case:
    """One test: stdin and stdout, or a call and its result, or a statement."""

    stdin: str | None = None
    stdout: str | None = None
    call: Mapping[str, Any] | None = None  # `fn_name` and `arguments`, or `assert_case`
    results: tuple[Any, ...] = ()  # any of them is right


def extract(response: str) -> str | None:
    """Find the program of a response; None without a block of code."""
    blocks = [(mark.strip().lower(), text) for mark, text in _BLOCK.findall(response)]
    for marks in (("python", "py", "python3"), ("",)):
        if found := [text for mark, text in blocks if mark in marks]:
            return found[-1]
    return None


def read_cases(ground_truth: object) -> tuple[Case, ...]:
    """Read test cases.

    Raises:
        ValueError: if they are not such an object or there are none.
    """
    try:
        tests = json.loads(ground_truth) if isinstance(ground_truth, str) else ground_truth
    except json.JSONDecodeError as error:
        raise ValueError(f"ground truth is not JSON: {error}") from error
    if not isinstance(tests, Mapping):
        raise ValueError(f"ground truth is {type(tests).__name__}, expected an object of cases")
    if "assert_case" in tests:
        cases = [Case(call={"assert_case": _text(text)}) for text in tests["assert_case"]]
    elif "inputs" in tests and "outputs" in tests:
        inputs, outputs = tests["inputs"], tests["outputs"]
        if len(inputs) != len(outputs):
            raise ValueError(f"ground truth has {len(inputs)} inputs and {len(outputs)} outputs")
        name = tests.get("fn_name")
        cases = [
            _call(name, given, wanted) if name else Case(_text(given), _text(wanted))
            for given, wanted in zip(inputs, outputs, strict=True)
        ]
    else:
        raise ValueError(f"ground truth has {[*tests]}, expected inputs and outputs or assert_case")
    if not cases:
        raise ValueError("ground truth has no test case")
    return tuple(cases)


def _call(name: str, given: object, wanted: object) -> Case:
    """Read a call: JSON texts, one argument a line, or lists as of APPS.

    A list of one is that list or, as APPS has it, what is in it: verl takes either for right.
    """
    if isinstance(given, str):
        arguments = [json.loads(line) for line in given.split("\n") if line.strip()]
    else:
        arguments = _list(given)
    if isinstance(wanted, str):
        results = (json.loads(wanted),)
    else:
        inner = wanted if isinstance(wanted, list) and len(wanted) == 1 else []
        results = (wanted, *inner)
    return Case(call={"fn_name": name, "arguments": arguments}, results=results)


def _list(given: object) -> list[Any]:
    if not isinstance(given, list):
        raise ValueError(f"arguments are {given!r}, expected a list or JSON, one a line")
    return given


def _text(value: object) -> str:
    if isinstance(value, list):
        return "\n".join(map(str, value))
    return str(value)


@register("code", "codecontests", "apps", "codeforces", "taco")
def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: str | Mapping[str, Any],
    extra_info: Mapping[str, Any] | None = None,
) -> dict[str, float]:
    """Score the share of test cases that a program passes; `score` in [0, 1], `acc` 0 or 1.

    Raises:
        ValueError: if the ground truth is no object of test cases.
        TimeoutError: if a program that failed nothing leaves cases untried.
        SandboxError: if the kernel allows no sandbox.
    """
    cases = read_cases(ground_truth)
    program = extract(solution_str)
    if program is None:
        return {"score": 0.0, "acc": 0.0, "has_code": 0.0}
    score = _score(program, cases, sample_limit_s.get() * _SHARE)
    return {"score": score, "acc": float(score == 1.0), "has_code": 1.0}


def _score(program: str, cases: Sequence[Case], budget_s: float) -> float:
    """Run cases until the score is known."""
    cpu_s = min(_CPU_S, budget_s / 2)
    deadline = time.monotonic() + budget_s
    passed = 0
    for index, case in enumerate(cases):
        if index == _FIRST and passed < index:
            break
        left = deadline - time.monotonic()
        wall_s = max(0.01, min(2 * cpu_s, left))
        outcome, is_right = run_case(program, case, Limits(wall_s, max(1, round(cpu_s))))
        if outcome.status == "timeout" and left < cpu_s and passed == index:
            raise TimeoutError(f"{index} of {len(cases)} cases took {budget_s:.0f} s, all right")
        passed += is_right
        if outcome.status == "timeout" or (index >= _FIRST and not is_right):
            break
    return passed / (len(cases) if passed >= _FIRST else min(_FIRST, len(cases)))


def run_case(program: str, case: Case, limits: Limits) -> tuple[Outcome, bool]:
    """Run a program on one case and tell whether it passes."""
    if case.call is None:
        files = {"solution.py": program, "stdin": case.stdin or ""}
        outcome = run(files, ["-I", "solution.py"], limits)
        text = outcome.stdout.decode(errors="replace")
        return outcome, outcome.status == "ok" and _lines(text) == _lines(case.stdout or "")
    token = secrets.token_hex(16)
    files = {
        "solution.py": program,
        "caller.py": _CALLER,
        "stdin": json.dumps({**case.call, "token": token}),
    }
    outcome = run(files, ["-I", "caller.py"], limits)
    result = outcome.result.decode(errors="replace")
    if outcome.status != "ok" or not result.startswith(token):
        return outcome, False
    if "assert_case" in case.call:
        return outcome, result == token
    try:
        found = json.loads(result.removeprefix(token))
    except (ValueError, RecursionError):  # a program that found the token and wrote its own
        return outcome, False
    return outcome, any(_same(found, wanted) for wanted in case.results)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]


def _same(found: object, wanted: object) -> bool:
    """Compare JSON values; true is not 1, 1 is 1.0."""
    if isinstance(found, bool) or isinstance(wanted, bool):
        return found is wanted
    if isinstance(found, list) and isinstance(wanted, list):
        return len(found) == len(wanted) and all(map(_same, found, wanted))
    if isinstance(found, dict) and isinstance(wanted, dict):
        return found.keys() == wanted.keys() and all(_same(found[k], wanted[k]) for k in wanted)
    return found == wanted
