"""What `mrl reshard` shows."""

from __future__ import annotations

import struct
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from mrl.resharding.draw import print_report
from mrl.resharding.holdings import extents_of, shown_tensor, span, stages
from mrl.resharding.plot import save_plot
from mrl.resharding.report import ReshardReport
from tests.resharding.reports import small_report


def shown(report: ReshardReport, width: int = 80, **options: object) -> str:
    console = Console(file=StringIO(), width=width, color_system=None)
    print_report(report, console=console, **options)
    return console.file.getvalue()


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ([], ""),
        ([3], "3"),
        ([0, 1, 2, 3], "0-3"),
        ([0, 8], "0, 8"),
        ([0, 8, 16, 24], "0, 8 .. 24"),
        ([0, 1, 4, 5, 8, 9], "0-1, 4-5 .. 8-9"),
        ([0, 1, 2, 7, 9], "0-2, 7, 9"),
    ],
)
def test_numbers_are_written_briefly(numbers: list[int], text: str) -> None:
    assert span(numbers) == text


def test_touching_extents_are_joined() -> None:
    boxes = [((4, 8), (0, 2)), ((0, 4), (0, 2)), ((10, 12), (0, 2))]
    assert extents_of(boxes, 0) == ((0, 8), (10, 12))
    assert extents_of(boxes, 1) == ((0, 2),)


def test_stages_name_their_layers_and_what_else_they_hold(tmp_path: Path) -> None:
    first, last = stages(small_report(tmp_path))
    assert first == "embed_tokens, layers 0-11"
    assert last == "norm, embed_tokens, layers 12-23"  # tied: the head is a second embedding


@pytest.mark.parametrize("width", [80, 120])
def test_nothing_is_cut_off_at_common_widths(tmp_path: Path, width: int) -> None:
    text = shown(small_report(tmp_path), width)
    assert "\u2026" not in text
    assert all(len(line) <= width for line in text.splitlines())


def test_both_layouts_are_drawn_with_their_ranks(tmp_path: Path) -> None:
    text = shown(small_report(tmp_path, best_slots=False))
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert "0 0-1 p0 t0 p0 t1" in lines and "1 2-3 p1 t0 p1 t1" in lines
    assert "0-1 0-3 0-1 t0 t1" in lines  # two nodes that look alike, replicas 0 and 1
    assert "p0: embed_tokens, layers 0-11" in lines


def test_a_tensor_is_drawn_where_it_lies(tmp_path: Path) -> None:
    report = small_report(tmp_path)
    text = shown(report, tensor="model.layers.0.mlp.down_proj.weight")
    assert "model.layers.0.mlp.down_proj.weight [896 x 4864]" in text
    assert "columns 0-2431" in text and "columns 2432-4863" in text
    full, empty = "\u2588", "\u2591"
    assert full * 12 + empty * 12 in text and empty * 12 + full * 12 in text


def test_an_unknown_tensor_is_refused_with_the_nearest(tmp_path: Path) -> None:
    report = small_report(tmp_path)
    assert shown_tensor(report, None) == "model.layers.0.self_attn.q_proj.weight"
    with pytest.raises(ValueError, match=r"nearest: model\.layers\.0\.mlp\.up_proj\.weight"):
        shown_tensor(report, "model.layers.0.mlp.up_proj.weigh")


def test_many_ranks_are_summarised_and_all_on_demand(tmp_path: Path) -> None:
    report = small_report(tmp_path, "trainer.nnodes=8")
    brief, full = shown(report), shown(report, every_rank=True)
    table = brief[brief.index("what a rank moves") :]
    assert "all" in table and "mean" in table
    table = full[full.index("what a rank moves") :]
    for rank in range(16):
        assert f"\n {rank} " in table
    assert "mean" not in table


def test_the_estimate_is_shown_with_its_assumptions(tmp_path: Path) -> None:
    text = " ".join(shown(small_report(tmp_path)).split())
    for words in ("H100", "InfiniBand NDR", "NVLink", "datasheet", "GB/s", "us ("):
        assert words in text


def test_a_picture_is_saved_as_png(tmp_path: Path) -> None:
    report = small_report(tmp_path)
    file = tmp_path / "plot.png"
    save_plot(report, file)
    data = file.read_bytes()
    assert data.startswith(b"\x89PNG")
    width, height = struct.unpack(">II", data[16:24])
    assert min(width, height) > 600
    with pytest.raises(ValueError, match=r"name it .*plot\.png"):
        save_plot(report, tmp_path / "plot.pdf")
