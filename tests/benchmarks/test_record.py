from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import record
from benchmarks.figures import FLOP_CONVENTION, Record


def test_a_result_is_saved_with_commit_versions_and_hardware(tmp_path: Path) -> None:
    saved = json.loads(record.write("sample", {"seconds": 1.5}, tmp_path).read_text())
    assert saved["name"] == "sample"
    assert saved["result"]["seconds"] == 1.5
    assert {"commit", "dirty", "versions", "cpu", "gpus", "date"} <= set(saved["environment"])
    assert saved["environment"]["versions"]["torch"]
    assert saved["environment"]["cpu"]["cores"] >= 1


def test_a_saved_result_lists_its_figures_and_names_the_flop_convention(tmp_path: Path) -> None:
    result = {"cases": {"tiny": {"seconds": {"imports": [3.0, 1.0, 2.0]}}}}
    path = record.write("startup_here", result, tmp_path)
    found = Record.read(path)
    (figure,) = found.figures
    assert (figure.name, figure.value, figure.min, figure.max) == ("tiny imports", 2.0, 1.0, 3.0)
    assert (figure.unit, figure.better, figure.repeats) == ("s", "lower", 3)
    assert found.result["flop_convention"] == FLOP_CONVENTION
    assert "causal" in FLOP_CONVENTION and "lookup" in FLOP_CONVENTION


def test_a_failed_write_keeps_the_older_result(tmp_path: Path) -> None:
    path = record.write("sample", {"seconds": 1.5}, tmp_path)
    before = path.read_bytes()
    with pytest.raises(TypeError):
        record.write("sample", {"seconds": object()}, tmp_path)
    assert path.read_bytes() == before


def test_a_smoke_run_never_takes_the_place_of_a_baseline(tmp_path: Path) -> None:
    parser = record.parser_of("decode", None)
    real = record.output_of("decode", parser.parse_args([]))
    smoke = record.output_of("decode", parser.parse_args(["--smoke"]))
    assert (real.name, real.folder) == ("decode", record.RESULTS)
    assert smoke.name == "decode_smoke" and smoke.folder != record.RESULTS
    named = parser.parse_args(["--name", "decode_h200", "--folder", str(tmp_path)])
    assert record.output_of("decode", named) == record.Output("decode_h200", tmp_path)
    with pytest.raises(ValueError, match="begin it with 'decode'"):
        record.output_of("decode", parser.parse_args(["--name", "h200"]))


def test_what_was_measured_is_saved_before_figures_are_made_of_it(tmp_path: Path) -> None:
    with pytest.raises(KeyError):
        record.write("startup_here", {"seconds": 1.5}, tmp_path)
    saved = json.loads((tmp_path / "startup_here.json").read_text())
    assert saved["result"]["seconds"] == 1.5
