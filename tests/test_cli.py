"""The command line: plans at once, and bad input refused in one clear message."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
import pytest

from mrl.cli import main
from tests.runs import MRL, ROOT, Inputs, overrides

Refuse = Callable[..., str]


@pytest.fixture
def refuse(inputs: Inputs, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Refuse:
    """Give the one message with which `mrl train` refuses a config file and overrides."""

    def refuse(*changes: str, config: Path = inputs.config, command: str = "train") -> str:
        run = tmp_path / "run"
        before = set(psutil.Process().children(recursive=True))
        status = main([command, str(config), *overrides(run, *changes)])
        said = capfd.readouterr().err.strip()
        assert status == 2
        assert set(psutil.Process().children(recursive=True)) <= before, "no worker starts"
        assert not run.exists()
        assert "Traceback" not in said
        message = said[said.index(f"mrl {command}: ") :]
        assert message.count(f"mrl {command}: ") == 1
        return message

    return refuse


def test_an_unknown_key_is_refused_with_the_nearest_one(refuse: Refuse) -> None:
    message = refuse("actor.optim.lrr=1e-6", "+rollout.temprature=0.7")
    assert "actor.optim.lrr" in message and "did you mean actor.optim.lr?" in message
    assert "rollout.temprature" in message and "did you mean rollout.temperature?" in message


@pytest.mark.parametrize("key", ["actor.megatron.tensor_model_parallel_size",
                                 "rollout.tensor_model_parallel_size"])  # fmt: skip
def test_a_tp_that_does_not_divide_the_heads_is_refused(refuse: Refuse, key: str) -> None:
    message = refuse(f"{key}=3", "trainer.n_gpus_per_node=6", "rollout.name=vllm")
    assert f"{key} = 3" in message and "4 attention heads" in message
    assert "nearest legal: 1, 2" in message


def test_all_violations_are_told_at_once(refuse: Refuse) -> None:
    message = refuse("rollout.temperature=0", "data.train_batch_size=6", "actor.optim.lr=-1")
    for key in ("rollout.temperature", "data.train_batch_size", "actor.optim.lr"):
        assert key in message
    assert "violations:" in message


def test_greedy_training_is_refused_and_greedy_validation_is_not(refuse: Refuse) -> None:
    message = refuse("rollout.temperature=0", "rollout.val_kwargs={do_sample: false, n: 1}")
    assert "rollout.temperature = 0" in message and "training samples" in message
    assert "val_kwargs" not in message.split("training samples")[0]


def test_missing_files_are_refused(refuse: Refuse) -> None:
    message = refuse("data.train_files=[nowhere.parquet]", "data.val_files=[gone.jsonl]")
    assert "data.train_files = 'nowhere.parquet': no such file" in message
    assert "data.val_files = 'gone.jsonl': no such file" in message


def test_a_model_folder_without_weights_is_refused(
    refuse: Refuse, policy: Path, tmp_path: Path
) -> None:
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "config.json").write_bytes((policy / "config.json").read_bytes())
    assert "no weights" in refuse(f"model.path={tmp_path / 'bare'}")
    assert "no such folder" in refuse(f"model.path={tmp_path / 'missing'}")


def test_data_that_filtering_empties_is_refused(refuse: Refuse) -> None:
    message = refuse("data.max_prompt_length=2", "data.truncation=filter")
    assert "0 rows after filtering" in message and "data.max_prompt_length=2" in message


def test_a_prompt_above_the_limit_is_refused_with_its_row(refuse: Refuse) -> None:
    message = refuse("data.max_prompt_length=5")
    assert "train.jsonl" in message and "6 tokens" in message and "data.truncation" in message


def test_fewer_rows_than_a_batch_are_refused(refuse: Refuse) -> None:
    message = refuse("data.train_batch_size=24")
    assert "20 rows" in message and "train_batch_size 24" in message


@pytest.mark.parametrize("file", ["train_files", "val_files"])
def test_an_unknown_data_source_needs_a_custom_reward(
    refuse: Refuse, inputs: Inputs, tmp_path: Path, file: str
) -> None:
    known = tmp_path / "known.jsonl"
    rows = (inputs.folder / "train.jsonl").read_text()
    known.write_text(rows.replace('"sums"', '"gsm8k"'))
    other = {"train_files": "val_files", "val_files": "train_files"}[file]
    message = refuse("reward.custom_reward_function.path=null", f"data.{other}=[{known}]")
    assert "no reward function for data_source 'sums'" in message
    assert "gsm8k" in message and "reward.custom_reward_function.path" in message


def test_a_broken_reward_function_is_refused(refuse: Refuse, tmp_path: Path) -> None:
    (tmp_path / "r.py").write_text("def compute_scores(**rest): return 1.0\n")
    path = f"reward.custom_reward_function.path={tmp_path / 'r.py'}"
    assert "did you mean 'compute_scores'" in refuse(path)
    (tmp_path / "r.py").write_text("def compute_score(:\n")
    assert "failed to load" in refuse(path)
    assert "no such file" in refuse("reward.custom_reward_function.path=none.py")


def test_a_config_file_that_is_not_there_or_not_yaml_is_refused(
    refuse: Refuse, tmp_path: Path
) -> None:
    file = tmp_path / "c.yaml"
    assert f"config file = '{file}': no such file" in refuse(config=file)
    file.write_text("actor: [1, 2\n")
    assert "not YAML" in refuse(config=file)
    file.write_text("- a\n- b\n")
    assert "must be a mapping" in refuse(config=file)
    file.write_text("base: gone.yaml\n")
    message = refuse(config=file)
    assert "gone.yaml" in message and f"named as the base of {file}" in message


def test_an_override_without_equals_is_refused(refuse: Refuse) -> None:
    assert "an override must be key=value" in refuse("actor.optim.lr")


def test_supervised_training_refuses_rows_without_a_response(refuse: Refuse) -> None:
    assert "response" in refuse("algorithm.adv_estimator=grpo", "trainer.critic_warmup=0",
                                "algorithm.use_kl_in_reward=false", command="sft")  # fmt: skip


def run_mrl(*arguments: str, python: Sequence[str] = MRL) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*python, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=120
    )


def test_the_command_says_one_thing_and_ends_with_status_2(inputs: Inputs) -> None:
    done = run_mrl("train", str(inputs.config), "actor.optim.lrr=1")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("mrl train: config refused: actor.optim.lrr = 1: unknown key")
    assert len(done.stderr.splitlines()) == 1


WORKED = (  # the worked example of the batch arithmetic
    "data.train_batch_size=60",
    "actor_rollout_ref.actor.ppo_mini_batch_size=60",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8",
    "actor_rollout_ref.rollout.n=12",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8",
    "actor_rollout_ref.rollout.tensor_model_parallel_size=2",
    "trainer.n_gpus_per_node=6",
    "algorithm.adv_estimator=grpo",
)


@pytest.fixture
def empty(tmp_path: Path) -> str:
    (tmp_path / "empty.yaml").write_text("{}\n")
    return str(tmp_path / "empty.yaml")


def test_a_plan_has_the_worked_numbers(empty: str) -> None:
    done = run_mrl("plan", empty, "--json", *WORKED)
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    assert plan["samples"] == 720
    assert plan["replicas"] == 3
    assert plan["prompts_per_replica"] == [20, 20, 20]
    assert plan["sequences_per_replica"] == [240, 240, 240]
    actor = plan["roles"]["actor"]
    expected = {
        "dp": 6,
        "samples_per_rank": 120,
        "micro_batches": 15,
        "logprob_passes": 15,
        "optimizer_steps": 1,
    }
    assert {key: actor[key] for key in expected} == expected
    ulysses = "actor_rollout_ref.actor.ulysses_sequence_parallel_size=2"
    actor = json.loads(run_mrl("plan", empty, "--json", *WORKED, ulysses).stdout)["roles"]["actor"]
    assert (actor["dp"], actor["samples_per_rank"], actor["micro_batches"]) == (3, 240, 30)


def test_a_plan_takes_prompts_that_the_replicas_cannot_share_evenly(empty: str) -> None:
    batch = ("data.train_batch_size=64", "actor_rollout_ref.actor.ppo_mini_batch_size=64")
    plan = json.loads(run_mrl("plan", empty, "--json", *WORKED, *batch).stdout)
    assert sorted(plan["prompts_per_replica"]) == [21, 21, 22]
    assert plan["roles"]["actor"]["samples_per_rank"] == 128
    done = run_mrl("plan", empty, *WORKED, *batch, "actor_rollout_ref.rollout.n=1")
    assert done.returncode == 2
    for word in ("actor.ppo_mini_batch_size", "rollout.n", "64", "6", "60", "66"):
        assert word in done.stderr


def test_planning_is_quick_and_loads_no_torch(empty: str) -> None:
    code = (
        "import sys, time; start = time.process_time()\n"
        "from mrl.cli import main\n"
        f"status = main(['plan', {empty!r}, *{list(WORKED)!r}])\n"
        "heavy = {'torch', 'numpy', 'transformers', 'pyarrow', 'ray', 'vllm'} & set(sys.modules)\n"
        "print(status, sorted(heavy), time.process_time() - start)"
    )
    start = time.monotonic()
    done = run_mrl("-c", code, python=(sys.executable,))
    assert done.returncode == 0, done.stderr
    *table, last = done.stdout.splitlines()
    assert "720" in "\n".join(table)
    status, heavy, seconds = last.split(" ", 2)[0], last[2 : last.rindex(" ")], last.split()[-1]
    assert (status, heavy.strip()) == ("0", "[]")
    assert float(seconds) < 2.0, f"{seconds} s of the processor, {time.monotonic() - start:.1f} s"


def test_a_reshard_plan_of_many_gpus_loads_no_torch() -> None:
    config = "configs/grpo/llama3_70b_8node.yaml"
    code = (
        "import sys\n"
        "from mrl.cli import main\n"
        f"status = main(['reshard', {config!r}, '--json'])\n"
        "heavy = {'torch', 'transformers', 'ray', 'vllm', 'megatron'} & set(sys.modules)\n"
        "print(status, sorted(heavy), file=sys.stderr)"
    )
    done = run_mrl("-c", code, python=(sys.executable,))
    assert done.stderr.splitlines()[-1:] == ["0 []"], done.stderr
    report = json.loads(done.stdout)
    assert len(report["ranks"]) == 64
    assert report["totals"]["received"] / 64 / 1e9 == pytest.approx(13.23, abs=0.005)
    assert report["totals"]["allgather"] / 64 / 1e9 == pytest.approx(136.70, abs=0.005)


@pytest.mark.parametrize("order", [("--json", "trainer.nnodes=1"), ("trainer.nnodes=1", "--json")])
def test_options_and_overrides_come_in_any_order(
    order: tuple[str, str], empty: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", empty, *WORKED, *order]) == 0
    assert json.loads(capsys.readouterr().out)["samples"] == 720


@pytest.mark.parametrize("arguments", [("plan", "c.yaml", "--jsonn"), ("train", "c.yaml", "-n")])
def test_an_unknown_option_is_refused(
    arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert f"unrecognized arguments: {arguments[-1]}" in capsys.readouterr().err


def test_help_names_the_commands() -> None:
    done = run_mrl("--help")
    assert done.returncode == 0
    for command in ("train", "sft", "plan", "reshard", "quickstart"):
        assert command in done.stdout
