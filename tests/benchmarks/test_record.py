from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import record, run


def test_a_result_is_saved_with_commit_versions_and_hardware(tmp_path: Path) -> None:
    saved = json.loads(record.write("sample", {"seconds": 1.5}, tmp_path).read_text())
    assert saved["name"] == "sample"
    assert saved["result"] == {"seconds": 1.5}
    assert {"commit", "dirty", "versions", "cpu", "gpus", "date"} <= set(saved["environment"])
    assert saved["environment"]["versions"]["torch"]
    assert saved["environment"]["cpu"]["cores"] >= 1


def test_a_failed_write_keeps_the_older_result(tmp_path: Path) -> None:
    path = record.write("sample", {"seconds": 1.5}, tmp_path)
    before = path.read_bytes()
    with pytest.raises(TypeError):
        record.write("sample", {"seconds": object()}, tmp_path)
    assert path.read_bytes() == before


def test_every_benchmark_asks_a_question_and_an_unknown_one_is_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    known = run.questions()
    assert known
    assert all(question.endswith("?") for question in known.values())
    assert run.main(["no_such_benchmark"]) == 2
    assert "plan_time" in capsys.readouterr().err
