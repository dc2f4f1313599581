from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from benchmarks import peers
from benchmarks.declared import declare
from benchmarks.peers.trainers import PEERS, Trl, trl_work, verl_overrides
from benchmarks.peers.work import Measured, Work, to_json
from benchmarks.record import ROOT
from mrl.config import load_config

INSTALL = ROOT / "benchmarks" / "peers" / "install.sh"


def work_of(folder: Path, recipe: str, device: str, *overrides: str) -> Work:
    path = ROOT / "configs" / "grpo" / recipe
    given = (f"reward.custom_reward_function.path={folder / 'reward.py'}", *overrides)
    config = load_config(path, list(given))
    return Work(config, given, path, 3, device, config.trainer.n_gpus_per_node)


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = tmp_path / "train.parquet"
    row = {"prompt": "1+1", "data_source": "sums", "reward_model": {"ground_truth": "2"}}
    pq.write_table(pa.Table.from_pylist([row] * 4), path)
    return path


def test_trl_takes_the_quickstarts_step_as_4_optimizer_steps_of_128_samples(
    tmp_path: Path, rows: Path
) -> None:
    work = work_of(tmp_path, "quickstart.yaml", "cpu", f"data.train_files=[{rows}]")
    asked = trl_work(Work(work.config, work.overrides, work.recipe, 3, "cpu", 1), tmp_path / "out")
    settings = asked["settings"]
    assert asked["updates"] == 4 and settings["max_steps"] == 12
    assert settings["per_device_train_batch_size"] * settings["gradient_accumulation_steps"] == 128
    samples = settings["per_device_train_batch_size"] * settings["steps_per_generation"]
    assert samples == 64 * settings["num_generations"] == 512
    assert (settings["epsilon"], settings["epsilon_high"]) == (0.2, 0.28)
    assert (settings["max_completion_length"], settings["temperature"]) == (8, 1.0)
    assert settings["learning_rate"] == 1e-4
    assert asked["rows"][0]["prompt"] == [{"role": "user", "content": "1+1"}]


@pytest.mark.parametrize("engine", ["megatron", "dp"])
def test_verl_takes_a_recipes_shape_batch_lengths_and_sampling(
    engine: str, tmp_path: Path, rows: Path
) -> None:
    work = work_of(tmp_path, "qwen2.5_7b_2gpu.yaml", "cuda", f"data.train_files=[{rows}]")
    told = dict(text.split("=", 1) for text in verl_overrides(work, rows, engine))
    config = work.config
    assert told["data.train_batch_size"] == str(config.data.train_batch_size)
    assert told["data.max_response_length"] == str(config.data.max_response_length)
    assert told["actor_rollout_ref.rollout.n"] == str(config.rollout.n)
    assert told["actor_rollout_ref.model.path"] == config.model.path
    assert told["trainer.n_gpus_per_node"] == "2"
    assert any(".megatron." in key for key in told) == (engine == "megatron")


class Fake:
    """A trainer whose steps take what it says."""

    def __init__(self, seconds: float, fails: bool = False) -> None:
        self.seconds, self.fails, self.folders = seconds, fails, list[str]()

    def run(self, work: Work, folder: Path) -> Measured:
        self.folders.append(folder.name)
        if self.fails:
            raise RuntimeError("it needs another vLLM")
        return Measured.of([9.0, self.seconds], [9.0, self.seconds], [50.0, 100.0])


def test_sides_take_turns_and_the_ratio_is_of_tokens_a_second(tmp_path: Path) -> None:
    work = work_of(tmp_path, "quickstart.yaml", "cpu")
    order: list[str] = []
    sides = {"mrl": Fake(2.0), "trl": Fake(4.0)}
    for name, side in sides.items():
        side.folders = order  # one list for both: the order of all runs
        assert name not in order
    found = peers.side_by_side(work, sides, 2, tmp_path)
    assert order == ["mrl_0", "trl_0", "trl_1", "mrl_1"]
    result = {"peers": {"trl, quickstart": found["trl"]}}
    figures = {figure.name: figure for figure in declare("peers", result, {"gpus": []})}
    assert figures["trl, quickstart: mrl over the peer"].value == 2.0
    assert figures["trl, quickstart: trl step"].value == 4.0
    assert figures["trl, quickstart: mrl"].value == 100.0 / 2.0 / work.devices


def test_a_peer_that_fails_is_told_and_the_others_go_on(tmp_path: Path) -> None:
    work = work_of(tmp_path, "quickstart.yaml", "cpu")
    sides = {"mrl": Fake(2.0), "verl": Fake(1.0, fails=True), "trl": Fake(4.0)}
    found = peers.side_by_side(work, sides, 2, tmp_path)
    assert found["verl"] == {"failed": "it needs another vLLM"}
    assert found["trl"]["sides"]["trl"]["step_s"] == [4.0, 4.0]
    assert len(sides["verl"].folders) == 1


def test_the_first_step_is_left_out_and_counts_must_agree() -> None:
    measured = Measured.of([9.0, 2.0, 4.0], [8.0, 1.0, 3.0], [1.0, 10.0, 40.0])
    told = to_json([measured, measured], 2)
    assert told["step_s"] == [2.0, 4.0, 2.0, 4.0]
    assert told["own_step_s"] == [1.0, 3.0, 1.0, 3.0]
    assert told["tokens_per_s"] == [2.5, 5.0, 2.5, 5.0]
    with pytest.raises(ValueError, match="2 of its own timers"):
        Measured.of([1.0, 1.0, 1.0], [1.0, 1.0], [1.0, 1.0, 1.0])


def test_a_trainer_that_fails_ends_with_its_log(tmp_path: Path, rows: Path) -> None:
    work = work_of(tmp_path, "quickstart.yaml", "cpu", f"data.train_files=[{rows}]")
    false = tmp_path / "python"
    false.write_text("#!/bin/sh\necho no module named trl\nexit 3\n")
    false.chmod(0o755)
    with pytest.raises(RuntimeError, match=r"ended with 3(.|\n)*no module named trl"):
        Trl(false).run(work, tmp_path / "trl")


def test_a_peer_that_is_not_installed_is_refused_with_the_command(tmp_path: Path) -> None:
    for peer in PEERS:
        with pytest.raises(FileNotFoundError, match=r"install\.sh (trl|verl)$"):
            peers.run(["--peers", peer, "--environments", str(tmp_path)])


def test_the_install_script_knows_its_peers_and_refuses_others() -> None:
    done = subprocess.run(["bash", str(INSTALL), "nobody"], capture_output=True, text=True)
    assert done.returncode == 2
    assert "give a peer: trl verl" in done.stderr


def test_a_steps_phases_are_told_and_its_checkpoint_is_no_part_of_it() -> None:
    rows = [
        {"timing_s/step": 9.0, "timing_s/gen": 5.0, "perf/total_num_tokens": 10},
        {"timing_s/step": 4.0, "timing_s/gen": 3.0, "perf/total_num_tokens": 10},
        {
            "timing_s/step": 9.0, "timing_s/gen": 2.0, "timing_s/save_checkpoint": 4.0,
            "perf/total_num_tokens": 10,
        },
    ]  # fmt: skip
    told = to_json([Measured.of_rows(rows)], 1)
    assert told["step_s"] == [4.0, 5.0]
    assert told["median_phase_s"] == {"step": 6.5, "gen": 2.5}
