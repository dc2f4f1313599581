"""The table of field cases names tests that exist, and every case."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CASES = 58
ROW = re.compile(r"^\| B(\d\d) (.+?) \| (.+) \| (.+?) \|$", re.MULTILINE)
TEST = re.compile(r"`(tests/\S+?\.py)::(\w+)`")


def rows() -> list[tuple[str, str, str, str]]:
    """Read number, title, tests and outcome of each case."""
    return ROW.findall((ROOT / "tests" / "CASES.md").read_text(encoding="utf-8"))


@cache
def functions(path: str) -> set[str]:
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_every_case_has_one_row() -> None:
    assert [int(number) for number, *_ in rows()] == list(range(1, CASES + 1))


def test_every_row_names_tests_that_exist() -> None:
    missing = []
    for number, _, tests, _ in rows():
        named = TEST.findall(tests)
        assert named, f"B{number} names no test"
        missing += [
            f"B{number}: {path}::{name}"
            for path, name in named
            if not (ROOT / path).is_file() or name not in functions(path)
        ]
    assert not missing
