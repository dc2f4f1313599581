"""The numbers of `mrl reshard` against known ones, and against arithmetic."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mrl.cli import main
from mrl.config import ConfigError
from mrl.resharding.estimate import direct_links, gather_links
from mrl.resharding.hardware import GPUS, NETWORKS
from mrl.resharding.report import ReshardReport, build_report
from tests.resharding.reports import layout_overrides, make_config, small_report


def reshard_json(
    folder: Path, capsys: pytest.CaptureFixture[str], overrides: tuple[str, ...], *options: str
) -> dict:
    file = folder / "empty.yaml"
    file.write_text("{}\n")
    assert main(["reshard", str(file), *overrides, "--json", *options]) == 0
    return json.loads(capsys.readouterr().out)


def mean_gb(report: dict, name: str) -> float:
    return sum(rank[name] for rank in report["ranks"]) / len(report["ranks"]) / 1e9


# model, trainer tp and pp, engine tp, nodes, GPUs a node; GB: model, received mean with rank i in
# slot i, with the best slots, all-gather
KNOWN = {
    "70B tp8 pp4 to 8": ("Llama-3-70B", 8, 4, 8, 8, 8, 141.11, 13.23, 13.23, 136.70),
    "7B tp4 pp4 to 4": ("Qwen2.5-7B", 4, 4, 4, 4, 8, 15.23, 2.856, 2.856, 14.279),
    "32B tp8 pp4 to 8": ("Qwen2.5-32B", 8, 4, 8, 8, 8, 65.53, 6.145, 6.145, 63.48),
    "70B tp4 pp2 to 2": ("Llama-3-70B", 4, 2, 2, 1, 8, 141.11, 61.735, 52.92, 123.47),
    "7B tp4 pp2 to 2": ("Qwen2.5-7B", 4, 2, 2, 1, 8, 15.23, 6.664, 5.712, 13.327),
    "70B tp2 to 1": ("Llama-3-70B", 2, 1, 1, 1, 2, 141.11, 70.55, 70.55, 70.55),
    "7B tp2 to 1": ("Qwen2.5-7B", 2, 1, 1, 1, 2, 15.23, 7.615, 7.615, 7.615),
    "70B tp4 pp2 to 8": ("Llama-3-70B", 4, 2, 8, 1, 8, 141.11, 15.43, 8.82, 123.47),
    "70B tp8 to 2": ("Llama-3-70B", 8, 1, 2, 1, 8, 141.11, 61.73, 52.92, 123.47),
    "1.5B tied tp2 pp2 to 4": ("Qwen2.5-1.5B", 2, 2, 4, 1, 4, 3.09, 0.558, 0.333, 2.199),
}


@pytest.mark.parametrize("case", KNOWN)
def test_known_layouts_receive_the_known_bytes(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    *layout, size, natural, best, gathered = KNOWN[case]
    report = reshard_json(tmp_path, capsys, layout_overrides(*layout))
    assert report["model"]["bytes"] / 1e9 == pytest.approx(size, abs=0.006)
    assert mean_gb(report, "received") == pytest.approx(best, rel=1e-3)
    assert mean_gb(report, "allgather") == pytest.approx(gathered, rel=1e-3)
    assert all(rank["received"] == rank["floor"] for rank in report["ranks"])
    if natural != best:
        report = reshard_json(tmp_path, capsys, layout_overrides(*layout), "--natural")
        assert report["target"]["slots"] == list(range(len(report["ranks"])))
        assert mean_gb(report, "received") == pytest.approx(natural, rel=1e-3)


def test_heads_that_do_not_divide_are_refused_with_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty.yaml").write_text("{}\n")
    overrides = layout_overrides("Qwen2.5-7B", 8, 4, 8, nodes=8, gpus=8)
    assert main(["reshard", str(tmp_path / "empty.yaml"), *overrides, "--json"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "actor.megatron.tensor_model_parallel_size = 8" in err
    assert "does not divide the 28 attention heads" in err and "nearest legal: 1, 2, 4" in err
    assert "Traceback" not in err


def test_the_json_has_the_promised_shape(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = layout_overrides("Qwen2.5-0.5B", 2, 2, 2, nodes=2, gpus=2)
    report = reshard_json(tmp_path, capsys, overrides)
    assert [rank["rank"] for rank in report["ranks"]] == [0, 1, 2, 3]
    keys = ["rank", "local", "sent", "received", "floor", "allgather", "peers", "buckets",
            "peak_staging"]  # fmt: skip
    for rank in report["ranks"]:
        assert list(rank) == keys
        assert all(isinstance(value, int) for value in rank.values())
    for name, total in report["totals"].items():
        assert total == sum(rank[name] for rank in report["ranks"])
    assert report["totals"]["sent"] == report["totals"]["received"]
    assert (report["source"]["tp"], report["source"]["pp"], report["source"]["dp"]) == (2, 2, 1)
    assert (report["target"]["tp"], report["target"]["replicas"]) == (2, 2)
    assert sorted(report["target"]["slots"]) == [0, 1, 2, 3]
    assert report["seconds"]["direct"]["total"] > 0
    assert report["seconds"]["assumptions"]


def test_each_rank_ends_with_what_its_engine_shard_needs(tmp_path: Path) -> None:
    report = small_report(tmp_path)
    for traffic in report.ranks:
        need = sum(
            report.plan.dst.tensors[piece.tensor].item_bytes * _elements(piece.box)
            for piece in report.plan.dst.pieces_of(traffic.rank)
        )
        assert traffic.local + traffic.received == need


def _elements(box: tuple[tuple[int, int], ...]) -> int:
    count = 1
    for start, stop in box:
        count *= stop - start
    return count


def test_a_larger_bucket_means_fewer_of_them_and_never_less_staging(tmp_path: Path) -> None:
    small = small_report(tmp_path, "resharding.bucket_bytes=16777216")
    large = small_report(tmp_path, "resharding.bucket_bytes=268435456")
    assert small.plan.num_buckets > large.plan.num_buckets
    assert max(small.column("peak_staging")) <= max(large.column("peak_staging"))
    assert small.column("received") == large.column("received")


def test_disaggregated_engine_ranks_receive_all_they_need(tmp_path: Path) -> None:
    report = small_report(
        tmp_path,
        "placement.mode=disaggregated",
        "placement.rollout_gpus=2",
        "actor.megatron.pipeline_model_parallel_size=1",
    )
    trainers, engines = report.ranks[:2], report.ranks[2:]
    assert [t.rank for t in engines] == [2, 3] == list(report.target_ranks)
    assert all(t.received == 0 and t.sent > 0 for t in trainers)
    assert all(t.local == 0 and t.received == t.floor for t in engines)
    assert all(t.allgather == report.model_bytes for t in engines)
    assert report.mean("received") == sum(t.received for t in engines) / 2


def test_bytes_cross_the_network_only_between_nodes(tmp_path: Path) -> None:
    one = small_report(tmp_path, "trainer.nnodes=1", "trainer.n_gpus_per_node=4")
    two = small_report(tmp_path)
    for report, crosses in ((one, False), (two, True)):
        for links in (direct_links(report.plan), _gather(report)):
            assert any(link.network > 0 for link in links) == crosses
    for direct, gather in zip(direct_links(two.plan), _gather(two), strict=True):
        assert direct.network <= gather.network * 1.01 and direct.memory < gather.memory


def _gather(report: ReshardReport) -> list:
    return gather_links(report.plan, report.source, report.bucket_bytes)


def test_an_all_gather_moves_by_its_links_what_the_plan_counts(tmp_path: Path) -> None:
    report = small_report(tmp_path)
    for traffic, links in zip(report.ranks, _gather(report), strict=True):
        assert links.network + links.nvlink == pytest.approx(traffic.allgather, rel=0.01)


def test_a_faster_network_is_never_slower(tmp_path: Path) -> None:
    config = make_config(tmp_path, *layout_overrides("Qwen2.5-0.5B", 2, 2, 2, nodes=2, gpus=2))
    slow, fast = (build_report(config, "a100-80", name).estimate for name in ("hdr", "ndr"))
    assert fast.direct.total < slow.direct.total
    assert fast.direct.nvlink == slow.direct.nvlink


def test_an_adapter_beside_the_model_is_said_to_move_alone_later(tmp_path: Path) -> None:
    beside, merged = (
        small_report(tmp_path, "model.lora.rank=8", f"model.lora.merge={merge}").hints()
        for merge in ("false", "true")
    )
    assert any("adapter alone" in hint for hint in beside)
    assert not any("adapter" in hint for hint in merged)


def test_forwarding_inside_nodes_spares_the_network_and_is_hinted_at(tmp_path: Path) -> None:
    layout = layout_overrides("Qwen2.5-7B", 4, 2, 1, nodes=2, gpus=4)
    plain = small_report(tmp_path, *layout)
    forwarded = small_report(tmp_path, *layout, "resharding.forward_within_node=true")
    assert any("resharding.forward_within_node=true" in hint for hint in plain.hints())
    assert not forwarded.hints()
    assert forwarded.estimate.direct.network < 0.3 * plain.estimate.direct.network
    assert forwarded.column("received") == plain.column("received") == plain.column("floor")


def test_unknown_hardware_and_engines_are_refused(tmp_path: Path) -> None:
    config = make_config(tmp_path, *layout_overrides("Qwen2.5-0.5B", 1, 1, 1, nodes=1, gpus=1))
    with pytest.raises(ValueError, match="--gpu b300: expected one of h100, h200, a100-80"):
        build_report(config, "b300")
    with pytest.raises(ValueError, match="--network token-ring: expected one of hdr"):
        build_report(config, "h100", "token-ring")
    with pytest.raises(ConfigError, match=r"rollout\.name = 'hf'.*nearest legal: vllm"):
        small_report(tmp_path, "rollout.name=hf", "rollout.tensor_model_parallel_size=1")


def test_a_folder_without_config_json_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty.yaml").write_text("{}\n")
    overrides = layout_overrides("nowhere", 1, 1, 1, nodes=1, gpus=1)
    assert main(["reshard", str(tmp_path / "empty.yaml"), *overrides]) == 2
    err = capsys.readouterr().err
    assert err.count("mrl reshard:") == 1 and "nowhere/config.json" in err


def test_hardware_says_where_its_numbers_come_from() -> None:
    rates = [rate for gpu in GPUS.values() for rate in (gpu.memory, gpu.nvlink)]
    rates += [network.link for network in NETWORKS.values()]
    assert all(rate.source and 0 < rate.reached <= 1 and rate.nominal > 0 for rate in rates)
    assert all(gpu.network in NETWORKS for gpu in GPUS.values())
