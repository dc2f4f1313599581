"""Rendered Slurm scripts and sweeps."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from mrl.config import ConfigError
from mrl.launching.slurm import SlurmJob, render
from mrl.launching.sweep import combinations, overrides_of

ROOT = Path(__file__).resolve().parents[2]
CONFIG = "configs/grpo/quickstart.yaml"
NASTY = 'data.train_files=["/data/a\'b $(touch HURT) `touch HURT`.jsonl"]'


def job(*overrides: str, **more: object) -> SlurmJob:
    return SlurmJob(CONFIG, overrides, nodes=1, gpus_per_node=2, **more)  # type: ignore[arg-type]


def arguments(script: str, folder: Path, task: str = "0") -> list[str]:
    """Run a rendered script whose launcher prints the arguments it is given."""
    for name in ("slurm_torchrun.sbatch", "slurm_ray.sbatch"):
        (folder / "launch").mkdir(exist_ok=True)
        (folder / "launch" / name).write_text('printf "%s\\0" "$@"\n')
    environment = {
        "SLURM_SUBMIT_DIR": str(folder),
        "SLURM_ARRAY_TASK_ID": task,
        "PATH": "/usr/bin:/bin",
    }
    done = subprocess.run(
        ["bash", "-c", script], env=environment, capture_output=True, text=True, check=True
    )
    return done.stdout.split("\0")[:-1]


@pytest.fixture(autouse=True)
def _at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


@pytest.mark.parametrize("launcher", ["torchrun", "ray"])
def test_arguments_reach_the_run_as_they_were_given(launcher: str, tmp_path: Path) -> None:
    words = (NASTY, "trainer.experiment_name=a;b | c", "data.seed=3")
    assert arguments(render(job(*words, launcher=launcher)), tmp_path) == [CONFIG, *words]
    assert not list(tmp_path.rglob("HURT")) and not (ROOT / "HURT").exists()


def test_the_header_has_what_was_asked_for() -> None:
    script = render(job(time="4:00:00", partition="gpu", options=("--mem=0",), save_before_s=120))
    for line in (
        "--nodes=1", "--gpus-per-node=2", "--time=4:00:00", "--partition=gpu", "--mem=0",
        "--signal=B:USR1@120", "--job-name=mrl-quickstart", "--requeue",
    ):  # fmt: skip
        assert f"#SBATCH {line}\n" in script
    assert "--array" not in script


def test_a_sweep_is_a_job_array_of_runs_with_folders_of_their_own(tmp_path: Path) -> None:
    sweep = ("actor.optim.lr=1e-4|2e-4", "data.seed=1|2")
    folder = "trainer.default_local_dir=runs/${trainer.experiment_name}"
    script = render(job(folder, sweep=sweep))
    assert "#SBATCH --array=0-3\n" in script
    _, shared, lr, seed, name = arguments(script, tmp_path, "2")
    assert (shared, lr, seed) == (folder, "actor.optim.lr=2e-4", "data.seed=1")
    assert name.startswith("trainer.experiment_name=") and name.endswith("-2")
    with pytest.raises(ValueError, match="share the folder /r"):
        render(job("trainer.default_local_dir=/r", sweep=sweep))
    with pytest.raises(ValueError, match=r"expected key=a\|b"):
        render(job(sweep=("data.seed",)))


@pytest.mark.parametrize(
    "bad",
    [
        {"partition": "gpu\n#SBATCH --uid=0"},
        {"account": "a b"},
        {"options": ("mem=0",)},
        {"qos": "'"},
    ],
)
def test_what_sbatch_could_not_read_is_refused(bad: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="cannot stand in an #SBATCH line"):
        render(job(**bad))


def test_a_run_that_cannot_start_is_refused_before_it_is_queued() -> None:
    with pytest.raises(ConfigError, match="tensor_model_parallel_size"):
        render(job("actor.megatron.tensor_model_parallel_size=3"))
    with pytest.raises(ValueError, match="leave the overrides out"):
        render(job("trainer.nnodes=2", "actor.ppo_micro_batch_size_per_gpu=32"))


def test_combinations_run_through_the_last_axis_first() -> None:
    assert combinations(["a=1|2", "b=x"]) == [("a=1", "b=x"), ("a=2", "b=x")]
    with pytest.raises(ValueError, match="gives a twice"):
        combinations(["a=1", "a=2"])


def test_a_sweep_file_has_a_run_a_line(tmp_path: Path) -> None:
    file = tmp_path / "lr.txt"
    file.write_text("# rates\nactor.optim.lr=1e-6\n\ndata.prompt_key='a b' trainer.seed=2\n")
    assert overrides_of(file, 0) == ["actor.optim.lr=1e-6", "trainer.experiment_name=lr-0"]
    assert overrides_of(file, 1)[0] == "data.prompt_key=a b"
    with pytest.raises(ValueError, match="has 2 runs, this is run 2: submit --array=0-1"):
        overrides_of(file, 2)
    file.write_text("seed\n")
    with pytest.raises(ValueError, match="'seed' is no key=value"):
        overrides_of(file, 0)
