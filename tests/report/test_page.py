from __future__ import annotations

import html
import json
import re
import subprocess
import sys
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from mrl.cli import main
from mrl.report import report_finished, write_report
from mrl.report.svg import number
from tests.report.folders import FAULTS, healthy, rows_of, sample_row, write_run


class Told(HTMLParser):
    """What a page tells: (run, metric, statistic) to its texts, tags and warnings."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.numbers: list[tuple[str, str, str, str]] = []
        self.points: list[tuple[str, str]] = []
        self.tags: dict[str, int] = {}
        self.rules: list[str] = []
        self._at: tuple[str, str, str] | None = None
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags[tag] = self.tags.get(tag, 0) + 1
        found = {name: value or "" for name, value in attributes}
        if "data-metric" in found:
            self._at = found["data-run"], found["data-metric"], found["data-stat"]
        if "data-points" in found:
            self.points.append((found["data-name"], found["data-points"]))
        if "data-rule" in found:
            self.rules.append(found["data-rule"])

    def handle_data(self, data: str) -> None:
        if self._at is not None:
            self.numbers.append((*self._at, data.strip()))
            self._at = None


def page_of(tmp_path: Path, *folders: Path) -> str:
    out = tmp_path / "page.html"
    write_report(folders, out)
    return out.read_text()


def statistic(rows: Sequence[dict[str, Any]], metric: str, name: str) -> float | None:
    values = [row[metric] for row in rows if metric in row]
    known = [value for value in values if value is not None]
    return {
        "first": values[0],
        "last": values[-1],
        "min": min(known),
        "max": max(known),
        "median": median(known),
        "mean": sum(known) / len(known),
    }[name]


def hold(text: str, rows_of_run: dict[str, Sequence[dict[str, Any]]]) -> int:
    """Compare every number of a page with metrics.jsonl; give how many there are."""
    told = Told(text)
    for run, metric, name, shown in told.numbers:
        if shown != "-":
            assert shown == number(statistic(rows_of_run[run], metric, name)), (run, metric, name)
    return len(told.numbers)


def test_every_number_is_that_of_the_record(tmp_path: Path) -> None:
    rows = rows_of(60)
    folder = write_run(tmp_path / "run", rows, "trainer.experiment_name=one")
    assert hold(page_of(tmp_path, folder), {"one": rows}) > 4 * len(healthy(1, 60))


def test_every_point_of_a_short_run_is_drawn(tmp_path: Path) -> None:
    rows = rows_of(60)
    folder = write_run(tmp_path / "run", rows)
    points = dict(Told(page_of(tmp_path, folder)).points)
    for metric in (
        "critic/score/mean",
        "actor/entropy",
        "perf/throughput",
        "val-core/gsm8k/acc/mean@1",
    ):
        expected = [f"{row['step']}:{number(row[metric])}" for row in rows if metric in row]
        assert points[metric].split() == expected
    bars = [f"{row['step']}:{number(row['timing_s/gen'])}" for row in rows if row["step"]]
    assert points["gen"].split() == bars


def test_planted_faults_get_their_warnings_and_a_healthy_run_none(tmp_path: Path) -> None:
    names = ["entropy_collapse", "truncated", "generation_share", "slow_rank"]
    faulty = write_run(tmp_path / "faulty", rows_of(60, [FAULTS[name] for name in names]))
    assert sorted(Told(page_of(tmp_path, faulty)).rules) == sorted(names)
    good = write_run(tmp_path / "good", rows_of(60))
    text = page_of(tmp_path, good)
    assert Told(text).rules == [] and "within their limits" in text


def test_runs_are_compared(tmp_path: Path) -> None:
    one, other = rows_of(60), rows_of(40, [FAULTS["truncated"]])
    folders = [
        write_run(tmp_path / "a", one, "trainer.experiment_name=one"),
        write_run(tmp_path / "b", other, "trainer.experiment_name=other", "actor.optim.lr=3e-6"),
    ]
    text = page_of(tmp_path, *folders)
    assert hold(text, {"one": one, "other": other}) > 200
    names = {name for name, _ in Told(text).points}
    assert {"one: critic/score/mean", "other: critic/score/mean"} <= names
    assert re.search(r"actor\.<wbr>optim\.<wbr>lr</th>.*1e-06.*3e-06", text, re.S)
    assert Told(text).rules == ["truncated"]


def test_runs_of_one_name_are_told_apart_by_their_folders(tmp_path: Path) -> None:
    rows = rows_of(10)
    text = page_of(tmp_path, *(write_run(tmp_path / d / "grpo", rows) for d in ("x", "y")))
    assert {run for run, *_ in Told(text).numbers} == {"x/grpo", "y/grpo"}


def test_nothing_is_loaded(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", rows_of(60), samples=[{}, {"score": 1.0, "uid": "b"}])
    text = page_of(tmp_path, folder)
    assert "http://" not in text and "https://" not in text and "//cdn" not in text
    assert not re.search(r"\b(src|href|action|data)=\"(?!#)", text)
    assert not re.search(r"@import|url\(", text)
    assert not {"link", "iframe", "object", "embed", "img", "base"} & set(Told(text).tags)


HOSTILE = (
    '</pre></script><script>alert("x")</script><img src=x onerror=alert(1)> \x00\x1b[31m \ud800'
)


def test_what_a_model_wrote_is_only_text(tmp_path: Path) -> None:
    rows = rows_of(20)
    rows[-1]["val-core/<script>alert(2)</script>/acc/mean@1"] = 0.5
    plain = Told(page_of(tmp_path, write_run(tmp_path / "plain", rows_of(20)))).tags
    samples = [
        {"output": HOSTILE, "input": HOSTILE, "gts": HOSTILE, "detail": HOSTILE, "score": s}
        for s in (1.0, 0.0)
    ]
    folder = write_run(tmp_path / "run", rows, samples=samples)
    (folder / "tokens").mkdir()
    row = {**token_row(), "pieces": [HOSTILE, "\n", '"'], "input": HOSTILE, "data_source": HOSTILE}
    for lines in ("", json.dumps(row) + "\n"):
        (folder / "tokens" / "20.jsonl").write_text(lines)
        text = page_of(tmp_path, folder)
        assert html.escape("<script>alert(", quote=False) in text
        tags = Told(text).tags
        assert tags["script"] == plain["script"] and "img" not in tags
        assert not re.search(r"[\x00-\x08\x1b]", text)


def token_row() -> dict[str, Any]:
    return {
        "end": "best", "step": 20, "uid": "a", "data_source": "gsm8k", "input": "ask", "gts": "42",
        "score": 1.0, "finish_reason": "stop", "response_length": 3, "left_out": 0,
        "left_out_after": 3, "pieces": ["a ", "b ", "c"], "rollout_log_probs": [-0.5, -1.0, None],
        "old_log_probs": [-0.25, -1.0, -1.0], "advantages": [1.0, -0.5, None],
    }  # fmt: skip


def test_tokens_are_shaded_by_difference_and_advantage(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", rows_of(20))
    (folder / "tokens").mkdir()
    (folder / "tokens" / "20.jsonl").write_text(json.dumps(token_row()) + "\n")
    text = page_of(tmp_path, folder)
    first, second, third = re.findall(
        r'<span class="(tok[^"]*)" style="([^"]*)" title="([^"]*)">', text
    )[-3:]
    assert first == ("tok", "--gap:0.5;--adv:1", "engine -0.5, trainer -0.25, advantage 1")
    assert second == ("tok worse", "--gap:0;--adv:0.5", "engine -1, trainer -1, advantage -0.5")
    assert third == ("tok", "--gap:0;--adv:0", "trainer -1")
    assert "largest difference 0.25 nats, advantage 0.25" in text


def test_best_and_worst_come_from_the_last_recorded_step(tmp_path: Path) -> None:
    samples = [{"score": i / 10, "uid": str(i), "output": f"output {i}"} for i in range(10)]
    samples.append({"score": None, "status": "error", "output": "no score"})
    folder = write_run(tmp_path / "run", rows_of(20), samples=samples)
    later = json.dumps({**sample_row("z"), "score": 9.0, "output": "of a step that is no more"})
    (folder / "rollouts" / "21.jsonl").write_text(later + "\n")  # of before a resume
    text = page_of(tmp_path, folder)
    assert re.findall(r"output \d", text) == [f"output {i}" for i in (9, 8, 7, 0, 1, 2)]
    assert "no score" not in text and "no more" not in text


@pytest.mark.parametrize("steps", [2_000, pytest.param(10_000, marks=pytest.mark.slow)])
def test_a_long_run_makes_a_small_file(steps: int, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", rows_of(steps))
    assert len(page_of(tmp_path, folder)) < 1e6


def test_a_report_needs_no_torch(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", rows_of(5))
    code = (
        "import sys; from mrl.cli import main; code = main(sys.argv[1:]); "
        "sys.exit(code or 'torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "report", str(folder)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == str(folder / "report.html")


def test_the_command_prints_warnings_and_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    one = write_run(tmp_path / "one", rows_of(30, [FAULTS["truncated"]]))
    other = write_run(tmp_path / "other", rows_of(30))
    assert main(["report", str(one), str(other)]) == 0
    warning, path = capsys.readouterr().out.splitlines()
    assert warning.startswith("warning: 60% of the responses are cut") and path == "report.html"
    assert main(["report", str(one), "--out", "x/y.html"]) == 0
    assert (tmp_path / "x" / "y.html").is_file() and not (one / "report.html").exists()


def test_a_folder_of_something_else_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(tmp_path)]) == 2
    assert "neither metrics.jsonl nor config.yaml" in capsys.readouterr().err


def test_the_report_at_the_end_never_fails_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_run(tmp_path / "run", rows_of(30, [FAULTS["slow_rank"]]))
    report_finished(folder)
    assert (folder / "report.html").is_file()
    assert "warning: rank 1 takes 1.40 times" in capsys.readouterr().out
    (folder / "plan.json").write_text('{"roles": 7}')  # of another program
    report_finished(folder)
    assert f"no report of {folder}: " in capsys.readouterr().out
    report_finished(tmp_path / "nowhere")
    assert "no report of" in capsys.readouterr().out
