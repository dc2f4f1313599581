from __future__ import annotations

import pytest
from megatron.core.parallel_state import RankGenerator

from mrl.cli import main
from mrl.config import ParallelLayout
from mrl.launching.dry_run import coordinates

LAYOUTS = [
    ParallelLayout(2, 2, None, 1, 1, 2, 2, True),
    ParallelLayout(2, 2, None, 2, 1, 2, 2, True),
    ParallelLayout(1, 2, None, 1, 4, 1, 4, False),
    ParallelLayout(4, 1, None, 1, 2, 2, 2, True),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_coordinates_are_those_of_megatron(layout: ParallelLayout) -> None:
    dense = RankGenerator(layout.tp, 1, layout.dp, layout.pp, layout.cp, "tp-cp-ep-dp-pp")
    stage = layout.tp * layout.cp * layout.dp
    copies = stage // (layout.etp * layout.ep)
    experts = RankGenerator(layout.etp, layout.ep, copies, layout.pp, 1, "tp-cp-ep-dp-pp")
    for kind, generator in (*((k, dense) for k in ("tp", "cp", "dp", "pp")), ("ep", experts)):
        for group in generator.get_ranks(kind):
            found = [getattr(coordinates(layout, rank), kind) for rank in group]
            assert found == list(range(len(group))), (kind, group)


def test_a_dry_run_says_what_each_rank_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("NCCL_IB_HCA", "mlx5_0")
    words = ["train", "configs/grpo/quickstart.yaml", "--dry-run", "trainer.device=cpu"]
    size = ["trainer.n_gpus_per_node=4", "actor.megatron.tensor_model_parallel_size=2"]
    size.append("actor.ppo_micro_batch_size_per_gpu=64")
    assert main([*words, *size]) == 0
    printed = capsys.readouterr().out
    rows = [line.split() for line in printed.splitlines()]
    assert [
        "3",
        "0",
        "3",
        "cpu",
        "actor:",
        "tp1",
        "cp0",
        "dp1",
        "pp0",
        "ep0",
        "replica",
        "3",
        "tp0",
    ] in rows
    assert ["OMP_NUM_THREADS", "3", "yours"] in rows
    assert ["NCCL_IB_HCA", "mlx5_0", "yours"] in rows
    assert "spawns 4 ranks on this host" in printed


def test_a_rank_without_a_gpu_is_told_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "NoDevFiles")
    words = ["train", "configs/grpo/quickstart.yaml", "--dry-run", "trainer.device=cuda"]
    assert main(words) == 1
    assert "CUDA_VISIBLE_DEVICES=NoDevFiles" in capsys.readouterr().out
