"""Every metric of a run has an entry, and every entry is of a metric that runs have."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from mrl import RayPPOTrainer, load_config
from mrl.sft import SFTTrainer
from mrl.tracking.contract import all_metrics, metric_of, render, uncontracted
from mrl.tracking.jsonl import read_metrics
from mrl.tracking.status import read_status
from tests.runs import ROOT, Inputs, Recording, overrides
from tests.test_algorithm_runs import REWARD
from tests.test_sft import CHANGES as SFT

# GRPO with all that adds metrics, on two data-parallel ranks.
GRPO = (
    "algorithm={adv_estimator: grpo, use_kl_in_reward: false, overlong_filtering: true}",
    "algorithm.filter_groups={enable: true, metric: score, at_limit: fill}",
    "algorithm.rollout_correction={rollout_is: token, rollout_is_threshold: '0.5_5.0'}",
    "algorithm.rollout_correction.rollout_is_batch_normalize=true",
    "algorithm.rollout_correction.rollout_rs=seq_mean_k3",
    "algorithm.rollout_correction.rollout_rs_threshold=0.5",
    "actor={use_kl_loss: true, megatron: {tensor_model_parallel_size: 1}}",
    "reward.overlong_buffer={enable: true, len: 4}",
    "trainer={critic_warmup: 0, test_freq: -1, val_before_train: false}",
    "trainer={profile_steps: [1], profile_ranks: [1]}",
)
# Conditions that no run below meets: other algorithms, other models, other machines.
ELSEWHERE = {
    "adv_estimator=remax",
    "on a GPU",
    "a GPU whose peak is known",
    "a model of experts",
    "a model of experts, moe_aux_loss_coeff above 0",
    "a model of experts, moe_z_loss_coeff above 0",
}


def train(inputs: Inputs, run: Path, steps: int, *changes: str) -> list[dict[str, Any]]:
    config = load_config(inputs.config, overrides(run, *changes))
    RayPPOTrainer(config, AutoTokenizer.from_pretrained(config.model.path)).fit(steps)
    return read_metrics(run / "metrics.jsonl")


def test_runs_and_contract_name_the_same_metrics(
    warm_pools: list[Recording], inputs: Inputs, tmp_path: Path
) -> None:
    rows = train(inputs, tmp_path / "ppo", 2)
    (tmp_path / "reward.py").write_text(REWARD)
    reward = f"reward.custom_reward_function.path={tmp_path / 'reward.py'}"
    grpo = train(inputs, tmp_path / "grpo", 1, *GRPO, reward)
    files = [f"data.train_files=[{inputs.sft}]", *SFT, "trainer.total_training_steps=1"]
    config = load_config(inputs.config, overrides(tmp_path / "sft", *files))
    SFTTrainer(config, AutoTokenizer.from_pretrained(config.model.path)).fit()
    rows += [*grpo, *read_metrics(tmp_path / "sft" / "metrics.jsonl")]
    names = {name for row in rows for name in row} - {"step", "non_finite"}
    assert uncontracted(sorted(names)) == []
    unseen = {m for m in all_metrics() if not any(m.pattern.fullmatch(n) for n in names)}
    assert {m.when for m in unseen} == ELSEWHERE, [m.name for m in unseen]

    # phases and the rest are the step; rest is what no phase should have
    for row in rows:
        timings = {k: v for k, v in row.items() if k.startswith("timing_s/")}
        assert sum(timings.values()) == pytest.approx(2 * timings.get("timing_s/step", 0.0))
    # what ranks work themselves is part of what the controller waits for
    for name in ("old_log_prob", "ref", "gen", "update_actor"):
        own = grpo[-1][f"perf/rank_seconds/{name}"] * grpo[-1][f"perf/rank_spread/{name}"]
        assert 0 < own <= grpo[-1][f"timing_s/{name}"]
    check_profile(tmp_path / "grpo" / "profile")
    status = read_status(tmp_path / "grpo")
    assert status is not None and (status.state, status.step) == ("finished", 1)
    check_board(tmp_path / "grpo" / "tensorboard", grpo[-1])


def check_profile(folder: Path) -> None:
    """The chosen rank left a trace of the chosen step, its phases by the metrics' names."""
    assert [p.name for p in sorted(folder.rglob("*.*"))] == ["rank_1.trace.json.gz"]
    packed = (folder / "step_1" / "rank_1.trace.json.gz").read_bytes()
    events = json.loads(gzip.decompress(packed))["traceEvents"]
    phases = {"gen", "old_log_prob", "ref", "update_actor", "reshard"}
    assert phases <= {event["name"] for event in events}


def check_board(folder: Path, row: dict[str, Any]) -> None:
    """TensorBoard has the scalars of the row, histograms and samples."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(folder)).Reload()
    tags = board.Tags()
    assert set(tags["scalars"]) == row.keys() - {"step"}
    for tag, total in (("response_length", 32), ("critic/score", 32)):
        assert board.Histograms(tag)[0].histogram_value.num == total
    lengths = board.Histograms("response_length")[0].histogram_value
    assert lengths.sum / lengths.num == pytest.approx(row["response_length/mean"])
    assert {"critic/advantages", "training/rollout_log_probs_diff"} <= set(tags["histograms"])
    assert "train/samples/text_summary" in tags["tensors"]


def test_the_page_is_written_from_the_entries() -> None:
    page = ROOT / "docs" / "METRICS.md"
    assert page.read_text() == render(), "run `python -m mrl.tracking.contract`"


def test_every_entry_is_complete_and_the_only_one_of_its_name() -> None:
    entries = [*all_metrics()]
    assert len({m.name for m in entries}) == len(entries)
    for metric in entries:
        assert all((metric.name, metric.unit, metric.reduction, metric.what)), metric
        assert "|" not in metric.what + metric.when, "it would end a cell"


@pytest.mark.parametrize(
    ("name", "entry"),
    [
        ("timing_s/step", "timing_s/step"),
        ("timing_s/gen", "timing_s/<phase>"),
        ("timing_s/gem", None),
        ("critic/score/mean", "critic/score/<stat>"),
        ("critic/score/median", None),
        ("critic/grad_norm", "<role>/grad_norm"),
        ("ref/grad_norm", None),
        ("reward/format/ok/mean", "reward/<name>/mean"),
        ("val-core/openai/gsm8k/acc/mean@8", "val-core/<data source>/<acc or reward>/mean@<n>"),
        ("val-core/openai/gsm8k/acc/best@8", None),
        ("rollout_corr/rollout_rs_token_k1_max", "rollout_corr/rollout_rs_<rule>_<stat>"),
        ("perf/slowest_rank/update_critic", "perf/slowest_rank/<ranked phase>"),
        ("perf/slowest_rank/adv", None),
    ],
)
def test_patterns_match_whole_names(name: str, entry: str | None) -> None:
    found = metric_of(name)
    assert (found.name if found else None) == entry
