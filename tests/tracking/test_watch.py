"""What the terminal shows of a run, from what its folder holds."""

from __future__ import annotations

import io
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from mrl.config import load_config, save_resolved
from mrl.tracking.status import Status
from mrl.tracking.watch import View, sparkline, watch
from tests.runs import ROOT

NOW = 1_000_000.0


def row(step: int, **more: float | None) -> dict[str, float | None]:
    return {
        "step": step,
        "critic/score/mean": step / 100,
        "actor/entropy": 2.0 - step / 100,
        "timing_s/gen": 5.0,
        "timing_s/update_actor": 2.0,
        "timing_s/rest": 0.01,
        "timing_s/step": 10.0,
        **more,
    }


def write_run(
    folder: Path, steps: int, status: Status | None, age_s: float = 3.0, lock: str = ""
) -> Path:
    rows = [row(step) for step in range(1, steps + 1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    (folder / ".lock").write_text(lock)
    if status is not None:
        status.write(folder)
    for file in folder.iterdir():
        os.utime(file, (NOW - age_s, NOW - age_s))
    return folder


def shown(folder: Path, width: int = 80) -> str:
    console = Console(width=width, file=io.StringIO(), record=True)
    console.print(View(folder).render(NOW))
    return console.export_text()


def alive(state: str = "running", why: str = "", host: str = "", pid: int = 0) -> Status:
    return Status(state, 0, 200, why, host or socket.gethostname(), pid or os.getpid())


def ended_process() -> int:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    return child.pid


def test_a_running_run_tells_its_pace_and_what_is_left(tmp_path: Path) -> None:
    text = shown(write_run(tmp_path, 50, alive()))
    assert "running  last step 3.0 s ago" in text
    assert "step 50/200" in text and "10.0 s a step, 25 min 0 s left" in text
    gen, update = (next(r for r in text.splitlines() if n in r) for n in ("gen ", "update_actor"))
    assert "50%" in gen and "20%" in update and "\u2588" in gen
    assert text.index("gen ") < text.index("update_actor")  # the longest first
    assert "rest" not in text  # a thousandth of the step
    assert "score" in text and "0.5" in text and "\u2581" in text


@pytest.mark.parametrize("width", [80, 160])
def test_every_line_fits_the_terminal(tmp_path: Path, width: int) -> None:
    status = alive("failed", "rank 3 failed: " + "a long story " * 20)
    for line in shown(write_run(tmp_path, 300, status), width).splitlines():
        assert len(line) <= width


def test_no_step_for_long_is_a_stall_if_steps_are_short(tmp_path: Path) -> None:
    assert "stalled  last step 10 min 0 s ago" in shown(write_run(tmp_path, 9, alive(), 600.0))
    assert "running" in shown(write_run(tmp_path, 9, alive(), 100.0))
    rows = [row(1, **{"timing_s/step": 500.0})]
    folder = write_run(tmp_path, 0, alive(), 600.0)
    (folder / "metrics.jsonl").write_text(json.dumps(rows[0]) + "\n")
    os.utime(folder / "metrics.jsonl", (NOW - 600, NOW - 600))
    assert "running" in shown(folder)


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (alive("finished", "200 steps, runs/x"), "finished  200 steps, runs/x"),
        (alive("stopped", "stopped as asked after step 7"), "stopped  stopped as asked"),
        (alive("failed", "in step 7 (gen), rank 3 failed"), "failed  in step 7 (gen), rank 3"),
        (alive(pid=ended_process()), "is gone without a word"),
        (alive(host="elsewhere", pid=1), "running  last step"),
        (None, "ended  no process works in this folder"),
    ],
)
def test_the_end_is_told_with_its_cause(tmp_path: Path, status: Status | None, words: str) -> None:
    assert words in shown(write_run(tmp_path, 7, status))


def test_a_run_that_has_not_started_is_waited_for(tmp_path: Path) -> None:
    assert "waiting  nothing has started here yet" in shown(tmp_path)
    lock = f"process {os.getpid()} on {socket.gethostname()} since noon"
    assert f"starting {lock}" in " ".join(shown(write_run(tmp_path, 0, None, lock=lock)).split())
    other = alive("failed", "rank 1 failed", pid=ended_process())
    text = " ".join(shown(write_run(tmp_path, 5, other, lock=lock)).split())
    assert "starting" in text and "before: rank 1 failed" in text


def test_numbers_that_are_missing_or_not_finite_leave_the_rest(tmp_path: Path) -> None:
    folder = write_run(tmp_path, 0, alive())
    rows = [{"step": 0, "val-core/sums/acc/mean@1": 0.25}, row(1), row(2)]
    rows[2] |= {"actor/entropy": None, "timing_s/gen": None, "perf/max_memory_allocated_gb": 71.26}
    rows[2] |= {"perf/rank_spread/update_actor": 1.5, "perf/slowest_rank/update_actor": 3.0}
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows) + '{"step"')
    text = shown(folder)
    assert "sums/acc/mean@1  0.25 at step 0 (first 0.25)" in text
    assert "memory, GB  allocated 71.3" in text
    assert "update_actor (rank 3: 1.50x)" in text
    assert "step 2/200" in text


def test_warnings_are_those_of_the_report(tmp_path: Path) -> None:
    folder = write_run(tmp_path, 30, alive())
    recipe = ROOT / "configs" / "grpo" / "qwen2.5_0.5b_1gpu.yaml"
    save_resolved(load_config(recipe), folder / "config.yaml")
    assert "! generation takes 50% of the step" in shown(folder)
    (folder / "config.yaml").write_text("of: another version")
    assert "generation takes" not in shown(folder)


def test_a_sparkline_is_as_wide_as_asked_and_as_long_as_its_values() -> None:
    assert sparkline([], 10) == ""
    assert sparkline([1, 1, 1], 10) == "\u2581" * 3
    assert sparkline([0, 1], 10) == "\u2581\u2588"
    assert len(sparkline([float(i) for i in range(1000)], 60)) == 60
    assert sparkline([0, 0, 4, 4, 8, 8], 3) == "\u2581\u2585\u2588"


def test_outside_a_terminal_it_is_printed_once(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=80)
    watch(write_run(tmp_path, 3, alive()), once=False, console=console)
    assert "step 3/200" in console.file.getvalue()
    with pytest.raises(FileNotFoundError, match="no such folder"):
        watch(tmp_path / "none", once=True)
