"""Rates are over the tokens that were trained and the GPUs that the job holds."""

from __future__ import annotations

from pathlib import Path

import pytest

from mrl import load_config
from mrl.batching.experience import collect
from mrl.config import build_plan
from mrl.resharding.families import ModelShape
from mrl.tracking.flops import training_flops
from mrl.tracking.rates import Rates
from mrl.types import Sample
from mrl.workers.specs import RankInfo

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "configs" / "models" / "Qwen3-30B-A3B"
PEAK = 989e12
TIMINGS = {"timing_s/step": 10.0, "timing_s/update_actor": 4.0, "timing_s/gen": 5.0}
SPLIT = ("placement.mode=disaggregated", "placement.rollout_gpus=4")


def rates(folder: Path, device: str, *overrides: str) -> Rates:
    file = folder / "run.yaml"
    file.write_text(
        f"""
model: {{path: {MODEL}}}
data: {{train_batch_size: 8}}
actor: {{ppo_mini_batch_size: 8, use_dynamic_bsz: true}}
algorithm: {{adv_estimator: grpo}}
trainer: {{n_gpus_per_node: 8}}
"""
    )
    config = load_config(file, overrides)
    infos = [RankInfo(rank, "host", 1, f"cuda:{rank}", device) for rank in range(8)]
    return Rates(config, build_plan(config), infos)


def batch_of(*lengths: tuple[int, int]):
    """Give samples of prompts and responses of these lengths."""
    samples = [
        Sample(str(i), (1,) * prompt, (2,) * response, (0.0,) * response, "", "stop", 0)
        for i, (prompt, response) in enumerate(lengths)
    ]
    return collect([(sample,) for sample in samples])


BATCH = batch_of((100, 300), (10, 90), (250, 250))


@pytest.mark.parametrize(("overrides", "trainers"), [((), 8), (SPLIT, 4)])
def test_throughput_counts_every_gpu_and_utilisation_those_that_train(
    tmp_path: Path, overrides: tuple[str, ...], trainers: int
) -> None:
    found = rates(tmp_path, "NVIDIA H100 80GB HBM3", *overrides)(TIMINGS, BATCH, updated=True)
    assert found["perf/throughput"] == 1000 / 10 / 8 == 12.5
    flops = training_flops(ModelShape.from_folder(MODEL), [400, 100, 500], 640)
    assert found["perf/mfu/actor"] == pytest.approx(flops / (4.0 * trainers * PEAK))
    assert found.keys() >= TIMINGS.keys()


def test_utilisation_counts_sequences_and_neither_padding_nor_rows_as_packed(
    tmp_path: Path,
) -> None:
    rate = rates(tmp_path, "NVIDIA H100 80GB HBM3")
    packed = rate(TIMINGS, batch_of((500, 500), (500, 500), (1000, 1000)), updated=True)
    one = rate(TIMINGS, batch_of((2000, 2000)), updated=True)
    assert packed["perf/throughput"] == one["perf/throughput"]
    shape = ModelShape.from_folder(MODEL)
    # causal attention of all heads, forward and backward
    a_square = 3 * 2 * shape.num_layers * shape.num_heads * shape.head_dim
    gap = (one["perf/mfu/actor"] - packed["perf/mfu/actor"]) * 4.0 * 8 * PEAK
    assert gap == pytest.approx(a_square * (16e6 - 6e6), rel=1e-6)


def test_every_epoch_over_the_samples_counts(tmp_path: Path) -> None:
    once, twice = (
        rates(tmp_path, "NVIDIA H200", f"actor.ppo_epochs={n}")(TIMINGS, BATCH, updated=True)
        for n in (1, 2)
    )
    assert twice["perf/mfu/actor"] == pytest.approx(2 * once["perf/mfu/actor"])
    assert twice["perf/throughput"] == once["perf/throughput"]


@pytest.mark.parametrize(("device", "updated"), [("x86_64", True), ("NVIDIA H100", False)])
def test_no_utilisation_is_told_where_there_is_none(
    tmp_path: Path, device: str, updated: bool
) -> None:
    found = rates(tmp_path, device)(TIMINGS, BATCH, updated)
    assert not any("mfu" in name for name in found)
