from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import record, run
from benchmarks.declared import DECLARED
from mrl import cli

SUITE = {
    "train_step", "logprob", "decode", "reshard", "rl_step", "long_context", "controller",
    "startup", "peers", "eight_gpus",
}  # fmt: skip


def test_the_suite_is_listed_with_the_question_that_each_one_answers(
    capsys: pytest.CaptureFixture[str],
) -> None:
    known = run.questions()
    assert set(known) >= SUITE
    assert all(question.endswith("?") for question in known.values())
    assert cli.main(["bench"]) == 0
    shown = capsys.readouterr().out
    assert all(question in shown for question in known.values())


def test_every_benchmark_of_the_suite_declares_figures_and_how_to_run_it() -> None:
    assert set(DECLARED) >= SUITE
    for name in SUITE - {"controller"}:
        path = run.FOLDER / ("peers/__init__.py" if name == "peers" else f"{name}.py")
        text = ast.get_docstring(ast.parse(path.read_text())) or ""
        assert f"mrl bench {name} --name" in text, name


def test_an_unknown_benchmark_is_refused_with_the_known_ones(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["bench", "no_such_benchmark"]) == 2
    assert "train_step" in capsys.readouterr().err


def test_wrong_input_ends_with_a_message_and_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "compare", "none.json", "none.json"]) == 2
    assert "none.json" in capsys.readouterr().err


def test_without_a_checkout_the_command_says_where_benchmarks_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mrl").mkdir()
    monkeypatch.setattr(cli, "__file__", str(tmp_path / "mrl" / "cli.py"))
    assert cli.main(["bench"]) == 2
    assert "take a checkout" in capsys.readouterr().err


def test_reading_records_needs_no_torch() -> None:
    code = "import sys, benchmarks.compare, benchmarks.table; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=record.ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "False"
