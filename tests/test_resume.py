"""Resuming whole runs: in another layout, beside training, with other settings."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from mrl.checkpoint.changes import CONFIG_FILE
from mrl.checkpoint.folder import TRACKER, CheckpointFolder
from mrl.checkpoint.lock import FolderInUseError
from tests.runs import Inputs, overrides, rollouts_of, steps_of
from tests.test_trainer import (
    STEPS,
    Fit,
    assert_same_run,
    fit,
    interrupted_after,
)

__all__ = ["fit"]
LAYOUTS = {
    "pp2": ("actor.megatron.tensor_model_parallel_size=1",
            "actor.megatron.pipeline_model_parallel_size=2"),
    "dp2": ("actor.megatron.tensor_model_parallel_size=1",),
}  # fmt: skip
OTHER_RANKS = {  # whose replicas are other in number, and draw other responses
    "one": ("actor.megatron.tensor_model_parallel_size=1", "trainer.n_gpus_per_node=1"),
    "tp2-dp2": ("trainer.n_gpus_per_node=4",),
}  # fmt: skip


def assert_close(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    for name, value in wanted.items():
        if not name.startswith(("reshard/", "training/rollout_probs")):
            assert found[name] == pytest.approx(value, rel=1e-3, abs=1e-5), name


@pytest.fixture
def unwritten(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Give the steps whose checkpoint counted before their metrics were written."""
    found: list[int] = []
    commit = CheckpointFolder.commit

    def noted(folder: CheckpointFolder, step: int, best: int | None = None) -> Path:
        if step not in steps_of(folder.root):
            found.append(step)
        return commit(folder, step, best)

    monkeypatch.setattr(CheckpointFolder, "commit", noted)
    yield found
    assert found == []


@pytest.mark.usefixtures("unwritten")
@pytest.mark.parametrize("name", ["pp2", pytest.param("dp2", marks=pytest.mark.slow)])
def test_a_run_resumed_in_another_layout_goes_on_with_the_same_numbers(
    name: str, fit: Fit, spawned_run: Path, inputs: Inputs, tmp_path: Path
) -> None:
    run = interrupted_after(spawned_run, 2, tmp_path)
    fit(inputs.config, *overrides(run, *LAYOUTS[name]))
    resumed, whole = steps_of(run), steps_of(spawned_run)
    for step in (3, STEPS):
        assert_close(resumed[step], whole[step])
        texts = [[row["output"] for row in rollouts_of(r, step)] for r in (run, spawned_run)]
        assert texts[0] == texts[1]


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHER_RANKS)
def test_a_run_resumed_on_other_ranks_has_the_same_policy_and_goes_on(
    name: str, fit: Fit, spawned_run: Path, inputs: Inputs, tmp_path: Path
) -> None:
    greedy = ("rollout.val_kwargs.do_sample=false", "rollout.val_kwargs.temperature=0",
              "rollout.val_kwargs.n=1", "trainer.val_only=true")  # fmt: skip
    texts = []
    for folder, layout in ("same", ()), ("other", OTHER_RANKS[name]):
        run = interrupted_after(spawned_run, 2, tmp_path / folder)
        fit(inputs.config, *overrides(run, *layout, *greedy))
        texts.append([row["output"] for row in rollouts_of(run, 2, "validation")])
    assert len(texts[0]) == 5
    assert texts[0] == texts[1]
    fit(inputs.config, *overrides(run, *OTHER_RANKS[name]))
    assert max(steps_of(run)) == STEPS


@pytest.mark.usefixtures("unwritten")
def test_saving_beside_training_changes_no_number(
    fit: Fit, spawned_run: Path, inputs: Inputs, tmp_path: Path
) -> None:
    run = interrupted_after(spawned_run, 2, tmp_path)
    fit(inputs.config, *overrides(run, "actor.checkpoint.async_save=true"))
    assert_same_run(run, spawned_run, 2)
    assert (run / TRACKER).read_text().strip() == str(STEPS)
    assert all(CheckpointFolder(run).has(step) for step in range(1, STEPS + 1))
    assert not list(run.glob("*.tmp*"))


@pytest.mark.slow
def test_the_best_step_is_kept_and_stays_best_after_a_resume(
    fit: Fit, inputs: Inputs, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    metric = "val-core/sums/reward/mean@2"
    keys = (
        f"trainer.best_metric={metric}", "trainer.test_freq=1", "trainer.max_actor_ckpt_to_keep=1"
    )  # fmt: skip
    fit(inputs.config, *overrides(run, *keys), max_steps=2)
    fit(inputs.config, *overrides(run, *keys))
    values = {step: row[metric] for step, row in steps_of(run).items() if step > 0}
    best = max(values, key=lambda step: (values[step], -step))
    assert (run / "best").resolve().name == f"global_step_{best}"
    assert CheckpointFolder(run).steps() == sorted({best, STEPS})


@pytest.fixture
def saved(spawned_run: Path, tmp_path: Path) -> Path:
    return interrupted_after(spawned_run, 2, tmp_path)


def test_a_changed_config_is_explained_before_any_process_starts(
    fit: Fit, saved: Path, inputs: Inputs
) -> None:
    config = json.loads((saved / "global_step_2" / CONFIG_FILE).read_text())
    assert config["actor"]["megatron"]["tensor_model_parallel_size"] == 2
    changes = ("algorithm.adv_estimator=grpo", "trainer.critic_warmup=0")
    with (
        pytest.warns(UserWarning, match=r"adv_estimator was 'gae', is 'grpo'"),
        pytest.raises(
            ValueError,
            match=r"the same with trainer\.allow_changed=\[algorithm\.adv",
        ),
    ):
        fit(inputs.config, *overrides(saved, *changes))
    assert sorted(CheckpointFolder(saved).steps()) == [1, 2]


def test_two_jobs_do_not_share_a_folder(fit: Fit, saved: Path, inputs: Inputs) -> None:
    hold = (
        "import sys, time; from pathlib import Path; from mrl.checkpoint.lock import folder_lock\n"
        "with folder_lock(Path(sys.argv[1])): print('held', flush=True); time.sleep(600)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", hold, str(saved)], stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None and other.stdout.readline() == "held\n"
        with pytest.raises(FolderInUseError, match=rf"in use by process {other.pid}"):
            fit(inputs.config, *overrides(saved))
        other.kill()
