from __future__ import annotations

import json
from pathlib import Path

import pytest

from mrl.report import write_report
from mrl.report.read import changed, read_runs
from mrl.tracking.status import FAILED, RUNNING, Status
from tests.report.folders import Row, healthy, rows_of, write_run


def written(tmp_path: Path, folder: Path) -> str:
    out = tmp_path / "page.html"
    write_report([folder], out)
    return out.read_text()


def test_a_line_cut_short_by_a_kill_is_left_out_and_said(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", rows_of(10))
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 11, "critic/score')
    (run,) = read_runs([folder])
    assert run.last_step == 10 and len(run.rows) == 11
    assert "a line of 26 characters is no whole row" in written(tmp_path, folder)


def test_a_resumed_run_reads_as_one(tmp_path: Path) -> None:
    rows = rows_of(10)
    folder = write_run(tmp_path / "run", [*rows, {**rows[5], "actor/entropy": 9.0}])
    (folder / "metrics.jsonl.superseded").write_text('{"step": 11}\n{"step": 12}\n{"st')
    (run,) = read_runs([folder])
    assert [row["step"] for row in run.rows] == list(range(11))
    assert run.rows[5]["actor/entropy"] == 9.0  # the later one counts
    assert "2 steps that were taken twice" in written(tmp_path, folder)


@pytest.mark.parametrize("name", ["plan.json", "ranks.json", "config.yaml", "metrics.jsonl"])
@pytest.mark.parametrize("left", [None, '{"a": '])
def test_a_page_is_made_from_what_is_there(name: str, left: str | None, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", rows_of(10), samples=[{}])
    (folder / name).unlink()
    if left is not None:
        (folder / name).write_text(left)
    text = written(tmp_path, folder)
    assert "</html>" in text and ("actor/<wbr>entropy" in text) == (name != "metrics.jsonl")


def test_a_config_of_another_version_is_shown_and_its_fault_told(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", rows_of(10))
    with (folder / "config.yaml").open("a") as file:
        file.write("tomorrow: {key: 7}\n")
    text = written(tmp_path, folder)
    assert "does not load here" in text and "no such key" in text


def test_how_the_run_ended_is_told(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", rows_of(10))
    assert "<dt>state</dt>" not in written(tmp_path, folder)
    Status(FAILED, 10, 80, "rank 3 ended", "node-a", 7).write(folder)
    text = written(tmp_path, folder).replace("<wbr>", "")
    assert "failed: rank 3 ended" in text and "10 of 80" in text
    Status(RUNNING, 10, 80, "", "node-a", 7).write(folder)
    assert "running when it last said so" in written(tmp_path, folder)


def test_a_run_before_its_first_step(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", [])
    assert "No step is recorded yet" in written(tmp_path, folder)
    (folder / "metrics.jsonl").write_text('{"step": 0, "val-core/gsm8k/acc/mean@1": 0.25}\n')
    assert "0.25" in written(tmp_path, folder)


def test_supervised_training_has_its_figures_alone(tmp_path: Path) -> None:
    rows = [
        {
            "step": step,
            "sft/loss": 2.0 / step,
            "sft/grad_norm": 1.0,
            "sft/lr": 1e-5,
            "perf/throughput": 100.0,
            "timing_s/update_actor": 1.0,
            "timing_s/rest": 0.1,
            "timing_s/step": 1.1,
        }
        for step in range(1, 31)
    ]
    text = written(tmp_path, write_run(tmp_path / "run", rows))
    assert "supervised" in text and "sft/<wbr>loss" in text
    assert "Entropy" not in text and "Engine and trainer" not in text


def test_a_critic_has_its_figures(tmp_path: Path) -> None:
    def critic(step: int) -> Row:
        more = {
            "critic/vf_loss": 0.1,
            "critic/vf_clipfrac": 0.0,
            "critic/grad_norm": 1.0,
            "critic/lr": 1e-5,
            "critic/values/mean": 0.5,
            "critic/returns/mean": 0.5,
            "critic/vf_explained_var": step / 60,
            "critic/skipped_updates": 0.0,
        }
        return healthy(step, 60) | more

    folder = write_run(
        tmp_path / "run", [critic(s) for s in range(1, 61)], "algorithm.adv_estimator=gae"
    )
    text = written(tmp_path, folder)
    for title in ("Value loss", "Explained variance", "Values and returns"):
        assert f"<b>{title}</b>" in text


def test_numbers_that_are_not_finite_leave_a_gap(tmp_path: Path) -> None:
    rows = rows_of(30)
    for row in rows[10:13]:
        row["actor/grad_norm"] = None
    rows[-1]["actor/never"] = None
    text = written(tmp_path, write_run(tmp_path / "run", rows))
    assert " 10: 11: 12: 13:" in text and "not finite" in text


def test_only_what_differs_from_the_defaults_is_told(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", rows_of(3), "actor.optim.lr=3e-6")
    (run,) = read_runs([folder])
    told = changed(run.settings)
    assert told["actor.optim.lr"] == (3e-6, 1e-6)
    assert changed({"critic.megatron.dtype": "auto"}) == {"critic.megatron.dtype": ("auto", None)}
    assert "actor.optim.weight_decay" not in told and "actor.optim.betas" not in told


def test_samples_of_steps_that_are_no_more_are_not_read(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", rows_of(10), samples=[{}])
    for step in (9, 11, 100):
        (folder / "rollouts" / f"{step}.jsonl").write_text("")
    (folder / "rollouts" / "notes.jsonl").write_text(json.dumps({}))
    (run,) = read_runs([folder])
    assert [path.stem for path in run.latest("rollouts", 3)] == ["10", "9"]
