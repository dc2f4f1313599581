"""Which programs pass which test cases."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from mrl.config.schema import CustomRewardConfig
from mrl.rewards import code
from mrl.rewards.code import compute_score, extract, read_cases
from mrl.rewards.registry import ScoreItem, sample_limit_s
from mrl.rewards.runner import RewardRunner

SUM = {"inputs": ["1 2\n", "5 6\n"], "outputs": ["3\n", "11\n"]}
ADD = {"inputs": ["1\n2", "[1]\n[2]"], "outputs": ["3", "[1, 2]"], "fn_name": "add"}
ASSERTS = {"assert_case": ["assert add(1, 2) == 3", "assert add(2, 2) == 4"]}
GOOD_SUM = "print(sum(map(int, input().split())))"
GOOD_ADD = "def add(a, b):\n    return a + b"


def score(program: str, tests: Any) -> float:
    text = f"So:\n```python\n{program}\n```\nDone."
    found = compute_score("code", text, json.dumps(tests))
    assert found["acc"] == float(found["score"] == 1.0)
    return found["score"]


@pytest.mark.parametrize(
    ("program", "tests", "value"),
    [
        (GOOD_SUM, SUM, 1.0),
        ("print(3)  ", SUM, 0.5),
        ("print(3)\nprint()", SUM, 0.5),  # blank ends do not count
        ("print(3.0)", SUM, 0.0),
        ("print(3, end='')\nraise SystemExit(1)", SUM, 0.0),
        ("if __name__ == '__main__':\n    " + GOOD_SUM, SUM, 1.0),
        ("import sys\nsys.exit(0)", SUM, 0.0),
        ("def f(:", SUM, 0.0),
        (GOOD_ADD, ADD, 1.0),
        ("class Solution:\n    def add(self, a: List[int], b): return a + b", ADD, 1.0),
        ("def add(a, b):\n    return (3,) if a == 1 else (1, 2)", ADD, 0.5),  # a tuple is a list
        ("def add(a, b):\n    return {a, b}", ADD, 0.0),
        ("def add(a, b):\n    print(a + b)", ADD, 0.0),
        ("def plus(a, b):\n    return a + b", ADD, 0.0),
        (GOOD_ADD, ASSERTS, 1.0),
        ("def add(a, b):\n    return 3", ASSERTS, 0.5),
        (GOOD_ADD + "\nif __name__ == '__main__':\n    input()", ASSERTS, 1.0),
        ("import os\nos._exit(0)", ASSERTS, 0.0),
        ("import os\nos.write(3, b'passed')\nos._exit(0)", ASSERTS, 0.0),
        ("raise SystemExit", ASSERTS, 0.0),
    ],
)
def test_the_score_is_the_share_of_cases_that_pass(program: str, tests: Any, value: float) -> None:
    assert score(program, tests) == value


@pytest.mark.parametrize(("found", "wanted"), [("True", "1"), ("1", "true"), ("'1'", "1")])
def test_values_of_other_types_are_not_equal(found: str, wanted: str) -> None:
    tests = {"inputs": ["1"], "outputs": [wanted], "fn_name": "f"}
    assert score(f"def f(x):\n    return {found}", tests) == 0.0


def test_lists_as_apps_has_them_are_cases_too() -> None:
    tests = {"inputs": [[1, 2]], "outputs": [[3]], "fn_name": "add"}
    assert score(GOOD_ADD, tests) == 1.0


def test_past_the_first_ten_only_all_cases_give_1(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in verl's prime_code, a program that fails one of the first gets their share."""
    monkeypatch.setattr(code, "_FIRST", 2)
    tests = {"inputs": [f"{i}\n" for i in range(4)], "outputs": [f"{i}\n" for i in range(4)]}
    assert score("print(input())", tests) == 1.0
    assert score("print(min(int(input()), 2))", tests) == 0.75
    assert score("print(0)", tests) == 0.5


@pytest.fixture
def eight_seconds() -> Iterator[None]:
    token = sample_limit_s.set(8.0)
    yield
    sample_limit_s.reset(token)


@pytest.mark.usefixtures("eight_seconds")
def test_a_case_out_of_time_fails_it_and_those_after_it() -> None:
    tests = {"inputs": ["1\n", "2\n", "1\n"], "outputs": ["1\n", "2\n", "1\n"]}
    assert score("x = input()\nwhile x == '2': pass\nprint(x)", tests) == pytest.approx(1 / 3)


@pytest.mark.slow
@pytest.mark.usefixtures("eight_seconds")
def test_cases_that_a_right_program_has_no_time_for_leave_it_unscored() -> None:
    tests = {"inputs": ["1\n"] * 60, "outputs": ["1\n"] * 60}
    with pytest.raises(TimeoutError, match="all right"):
        score("import time\ntime.sleep(0.5)\nprint(input())", tests)


@pytest.mark.parametrize(
    ("response", "program"),
    [
        ("```python\na\n```\n```python\nb\n```", "b\n"),
        ("```py\na\n```\nprints\n```\n3\n```", "a\n"),
        ("```\na\n```", "a\n"),
        ("text ```python\na\n```", "a\n"),
        ("```python\na", "a"),  # cut off
        ("```cpp\nint x;\n```", None),
        ("print(1)", None),
        ("", None),
    ],
)
def test_the_last_python_block_is_the_program(response: str, program: str | None) -> None:
    assert extract(response) == program


def test_a_response_without_a_program_scores_0_without_a_run() -> None:
    found = compute_score("apps", "print(3)", json.dumps(SUM))
    assert found == {"score": 0.0, "acc": 0.0, "has_code": 0.0}


@pytest.mark.parametrize(
    ("truth", "problem"),
    [
        ("", "not JSON"),
        ("[1]", "list, expected an object"),
        ("{}", "expected inputs and outputs or assert_case"),
        ('{"inputs": [], "outputs": []}', "no test case"),
        ('{"assert_case": []}', "no test case"),
        ('{"inputs": ["1"], "outputs": []}', "1 inputs and 0 outputs"),
        ('{"inputs": ["{"], "outputs": ["1"], "fn_name": "f"}', "Expecting"),
        ('{"inputs": [1], "outputs": [1], "fn_name": "f"}', "expected a list or JSON"),
    ],
)
def test_a_truth_without_cases_is_an_error(truth: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        read_cases(truth)


@pytest.mark.multiprocess
def test_the_pool_scores_programs_and_outlives_hostile_ones() -> None:
    text = "```python\n{}\n```".format
    bomb = "import os\nwhile True:\n try: os.fork()\n except OSError: pass"
    with RewardRunner(CustomRewardConfig(), 2, timeout_s=10.0) as runner:
        scores = runner.score(
            [
                ScoreItem("codeforces", text(GOOD_SUM), json.dumps(SUM), {}),
                ScoreItem("taco", text(bomb), json.dumps(SUM), {}),
                ScoreItem("apps", text(GOOD_ADD), json.dumps(ADD), {}),
                ScoreItem("code", text(GOOD_ADD), "no cases", {}),
            ]
        )
    assert [s.value for s in scores] == [1.0, 0.0, 1.0, None]
    assert "not JSON" in scores[3].detail
