"""What a run does, step by step, and what it leaves behind."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from mrl import RayPPOTrainer, load_config
from mrl.tracking.jsonl import read_metrics
from tests.runs import (
    MRL,
    PROMPTS_A_STEP,
    TRAIN_ROWS,
    Inputs,
    Recording,
    overrides,
    rollouts_of,
    run_command,
    steps_of,
)

STEPS = 4
SAMPLES = PROMPTS_A_STEP * 4
# Every name that users meet in the documentation, but for the device's: a CPU has no peak rate.
DOCUMENTED = {
    "actor/pg_loss",
    "actor/grad_norm",
    "critic/score/mean",
    "response_length/mean",
    *(
        f"timing_s/{phase}"
        for phase in (
            "step", "gen", "reward", "old_log_prob", "ref", "values", "adv",
            "update_critic", "update_actor", "reshard", "save_checkpoint", "testing",
        )
    ),
    "perf/throughput",
    "training/rollout_probs_diff_mean",
    "training/rollout_probs_diff_max",
    "reshard/bytes_moved",
    "reshard/bytes_floor",
    "reshard/seconds",
}  # fmt: skip
OF_THE_CRITIC = {
    "critic/vf_loss",
    "critic/vf_clipfrac",
    "critic/grad_norm",
    "critic/lr",
    "critic/values/mean",
    "critic/returns/mean",
    "critic/vf_explained_var",
}


Fit = Callable[..., Recording]


@pytest.fixture
def fit(warm_pools: list[Recording]) -> Fit:
    """Run a config to its end in this process, on ranks that have their libraries loaded."""

    def fit(config_file: Path, *changes: str, max_steps: int | None = None) -> Recording:
        config = load_config(config_file, changes)
        tokenizer = AutoTokenizer.from_pretrained(config.model.path)
        RayPPOTrainer(config=config, tokenizer=tokenizer).fit(max_steps)
        return warm_pools[-1]

    return fit


def weights(run: Path, step: int, role: str = "actor") -> dict[str, torch.Tensor]:
    folder = run / f"global_step_{step}" / role / "huggingface"
    found = load_file(folder / "model.safetensors")
    head = folder / "value_head.safetensors"
    return found | ({"value_head": load_file(head)["weight"]} if head.exists() else {})


def assert_equal_weights(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    assert [name for name in a if not torch.equal(a[name], b[name])] == []


def interrupted_after(run: Path, step: int, folder: Path) -> Path:
    """Copy a run as a kill would have left it: checkpoints up to a step, later rows logged."""
    copy = folder / "run"
    shutil.copytree(run, copy)
    for later in range(step + 1, STEPS + 1):
        shutil.rmtree(copy / f"global_step_{later}")
    (copy / "latest_checkpointed_iteration.txt").write_text(f"{step}\n")
    draft = copy / f"global_step_{step + 1}.tmp-0123abcd" / "actor"
    draft.mkdir(parents=True)
    (draft / "half").write_text("a save that was cut short")
    with (copy / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "cut')
    return copy


def test_the_run_folder_has_its_documented_layout(spawned_run: Path) -> None:
    run = spawned_run
    assert (run / "latest_checkpointed_iteration.txt").read_text().strip() == str(STEPS)
    for step in range(1, STEPS + 1):
        folder = run / f"global_step_{step}"
        assert (folder / "COMPLETE").is_file()
        for role in ("actor", "critic"):
            assert (folder / role / "huggingface" / "config.json").is_file()
    assert sorted(int(path.stem) for path in (run / "rollouts").iterdir()) == [1, 2, 3, 4]
    assert sorted(int(path.stem) for path in (run / "validation").iterdir()) == [0, 2, 4]
    resolved = yaml.safe_load((run / "config.yaml").read_text())
    assert resolved["trainer"]["default_local_dir"] == str(run)
    plan = json.loads((run / "plan.json").read_text())
    assert plan["samples"] == SAMPLES
    assert not list(run.glob("*.tmp*")), "no draft is left"


def test_the_resolved_config_gives_the_same_config_again(spawned_run: Path, inputs: Inputs) -> None:
    again = load_config(spawned_run / "config.yaml")
    assert again == load_config(inputs.config, overrides(spawned_run))


def test_every_documented_metric_is_there(spawned_run: Path) -> None:
    rows = read_metrics(spawned_run / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(STEPS + 1))
    for row in rows[2:]:  # the first step warms the critic up
        assert set(row) >= DOCUMENTED | OF_THE_CRITIC
        assert "non_finite" not in row
        assert row["reshard/bytes_moved"] == row["reshard/bytes_floor"] > 0
        assert row["training/rollout_probs_diff_max"] < 1e-4
        timings = {key: value for key, value in row.items() if key.startswith("timing_s/")}
        assert sum(timings.values()) == pytest.approx(2 * timings["timing_s/step"])
    for row in rows[::2]:
        assert "val-core/sums/reward/mean@2" in row


def test_tensorboard_shows_the_metrics(spawned_run: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(spawned_run / "tensorboard"))
    events.Reload()
    for row in read_metrics(spawned_run / "metrics.jsonl"):
        for name in ("actor/grad_norm", "critic/score/mean", "val-core/sums/reward/mean@2"):
            shown = {event.step: event.value for event in events.Scalars(name)}
            assert (row["step"] in shown) == (name in row)
            assert shown.get(row["step"]) == pytest.approx(row.get(name))
    assert set(events.Tags()["scalars"]) >= DOCUMENTED | OF_THE_CRITIC


def test_one_process_writes_the_log_of_all_ranks(spawned_run: Path) -> None:
    assert len(list(spawned_run.rglob("events.*"))) == 1


def test_rollouts_pair_each_answer_with_its_own_score(spawned_run: Path) -> None:
    for step in range(1, STEPS + 1):
        rows = rollouts_of(spawned_run, step)
        assert len(rows) == SAMPLES
        for row in rows:
            left, right = row["input"].rstrip("=").split("+")
            assert row["gts"] == str(int(left) + int(right))
            assert (row["data_source"], row["step"]) == ("sums", step)
            assert row["policy_version"] == step - 1
            if row["status"] == "ok":
                digits = sum(character.isdigit() for character in row["output"])
                assert row["score"] == digits / 8
                assert row["extra"]["length"] == len(row["output"])
    assert len(rollouts_of(spawned_run, 4, "validation")) == 2 * 5


def test_samples_that_cannot_be_scored_are_counted_and_the_run_goes_on(spawned_run: Path) -> None:
    metrics, statuses = steps_of(spawned_run), []
    for step in range(1, STEPS + 1):
        rows = rollouts_of(spawned_run, step)
        found = [row["status"] for row in rows]
        for row in rows:
            fate = int(row["input"].split("+")[0])
            odd = sum(map(ord, row["output"])) % 2 == 1
            fails = odd and (fate % 8 in (1, 2) or fate == 3)
            assert (row["status"] != "ok") == (row["score"] is None) == fails
        assert metrics[step]["reward/timeouts"] == found.count("timeout")
        assert metrics[step]["reward/errors"] == found.count("error")
        assert metrics[step]["reward/unscored"] == len(found) - found.count("ok")
        scores = [row["score"] for row in rows if row["score"] is not None]
        assert metrics[step]["critic/score/mean"] == pytest.approx(sum(scores) / len(scores))
        statuses += found
    assert {"ok", "timeout", "error"} == set(statuses)


def test_warming_the_critic_up_leaves_the_actor_as_it_was(spawned_run: Path, policy: Path) -> None:
    initial = load_file(policy / "model.safetensors")
    assert_equal_weights(weights(spawned_run, 1), initial)
    assert any(not torch.equal(weights(spawned_run, 2)[name], initial[name]) for name in initial)
    head = load_file(policy / "value_head.safetensors")["weight"]
    assert not torch.equal(weights(spawned_run, 1, "critic")["value_head"], head)
    first, second = (steps_of(spawned_run)[step] for step in (1, 2))
    assert "actor/pg_loss" not in first
    assert set(first) >= OF_THE_CRITIC
    assert "actor/pg_loss" in second


def test_a_checkpoint_opens_in_transformers(spawned_run: Path) -> None:
    folder = spawned_run / f"global_step_{STEPS}" / "actor" / "huggingface"
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert_equal_weights(
        {name: model.state_dict()[name] for name in weights(spawned_run, STEPS)},
        weights(spawned_run, STEPS),
    )
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.decode(tokenizer("1+2=")["input_ids"]) == "1+2="


def assert_same_run(resumed: Path, whole: Path, after: int) -> None:
    assert steps_of(resumed) == steps_of(whole)
    for step in range(after + 1, STEPS + 1):
        assert rollouts_of(resumed, step) == rollouts_of(whole, step)
        for role in ("actor", "critic"):
            assert_equal_weights(weights(resumed, step, role), weights(whole, step, role))


# The second step ends the first epoch.
@pytest.mark.parametrize(
    "after",
    [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(3, marks=pytest.mark.slow)],
)
def test_a_resumed_run_equals_an_uninterrupted_one(
    after: int, fit: Fit, spawned_run: Path, inputs: Inputs, tmp_path: Path
) -> None:
    run = interrupted_after(spawned_run, after, tmp_path)
    fit(inputs.config, *overrides(run))
    assert_same_run(run, spawned_run, after)
    taken = [row["uid"] for step in range(1, STEPS + 1) for row in rollouts_of(run, step)]
    for epoch in ("0", "1"):
        rows = {uid for uid in taken if uid.split("-")[0] == epoch}
        assert len(rows) == TRAIN_ROWS // PROMPTS_A_STEP * PROMPTS_A_STEP


def test_nothing_is_done_again_when_all_steps_are_there(
    fit: Fit, spawned_run: Path, inputs: Inputs, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(spawned_run, run)
    before = (run / "metrics.jsonl").read_text()
    assert fit(inputs.config, *overrides(run)).batches == []
    assert (run / "metrics.jsonl").read_text() == before


@pytest.mark.slow
def test_a_shorter_run_is_the_start_of_a_longer_one(
    fit: Fit, spawned_run: Path, inputs: Inputs, tmp_path: Path
) -> None:
    fit(inputs.config, *overrides(tmp_path / "run"), max_steps=2)
    whole = steps_of(spawned_run)
    assert steps_of(tmp_path / "run") == {step: whole[step] for step in (0, 1, 2)}


def test_trainer_and_engine_apart_do_what_they_do_together(
    fit: Fit, spawned_run: Path, inputs: Inputs, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    apart = (
        "placement.mode=disaggregated",
        "placement.rollout_gpus=2",
        "trainer.n_gpus_per_node=4",
    )
    fit(inputs.config, *overrides(run, *apart), max_steps=2)
    for step in (1, 2):
        assert rollouts_of(run, step) == rollouts_of(spawned_run, step)
        for role in ("actor", "critic"):
            assert_equal_weights(weights(run, step, role), weights(spawned_run, step, role))
    moved = [row["reshard/bytes_moved"] for row in read_metrics(run / "metrics.jsonl")[1:]]
    model = sum(tensor.nbytes for tensor in weights(run, 2).values())
    assert moved == [2 * model] * 2  # both engines lack everything


def test_unscored_samples_have_no_part_in_any_update(
    fit: Fit, inputs: Inputs, tmp_path: Path
) -> None:
    changes = ("algorithm.adv_estimator=grpo", "trainer.critic_warmup=0", "actor.shuffle=false")
    pool = fit(inputs.config, *overrides(tmp_path / "run", *changes), max_steps=2)
    rows = [row for step in (1, 2) for row in rollouts_of(tmp_path / "run", step)]
    parts = [
        (tokens, advantages, weight)
        for batch in pool.batches
        for tokens, advantages, weight in zip(
            batch.sequences.tokens.rows(),
            batch.advantages.rows(),
            batch.weights.rows(),
            strict=True,
        )
    ]
    assert len(parts) == len(rows) == 2 * SAMPLES
    tokenizer = AutoTokenizer.from_pretrained(load_config(inputs.config).model.path)
    by_text: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        by_text.setdefault(row["input"] + row["output"], []).append(row)
    unscored = 0
    for tokens, advantages, weight in parts:
        text = tokenizer.decode(tokens, skip_special_tokens=True)
        (status,) = {row["status"] == "ok" for row in by_text[text]}
        if status:
            assert bool((weight > 0).all())
        else:
            unscored += 1
            assert not advantages.any() and not weight.any()
    assert unscored == sum(row["status"] != "ok" for row in rows) > 0


@pytest.mark.slow
@pytest.mark.multiprocess
def test_mrl_train_resumes_by_itself(spawned_run: Path, inputs: Inputs, tmp_path: Path) -> None:
    run = interrupted_after(spawned_run, 2, tmp_path)
    run_command([*MRL, "train", str(inputs.config), *overrides(run)], tmp_path)
    assert_same_run(run, spawned_run, 2)


@pytest.mark.slow
def test_a_resumed_run_with_vllm_equals_an_uninterrupted_one(
    fit: Fit, inputs: Inputs, tmp_path: Path
) -> None:
    whole = tmp_path / "whole"
    fit(inputs.config, *overrides(whole, "rollout.name=vllm"))
    (tmp_path / "copy").mkdir()
    run = interrupted_after(whole, 2, tmp_path / "copy")
    fit(inputs.config, *overrides(run, "rollout.name=vllm"))
    assert_same_run(run, whole, 2)
