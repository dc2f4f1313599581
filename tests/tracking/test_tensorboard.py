from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from mrl.tracking.tensorboard import TensorBoard


def read(folder: Path) -> EventAccumulator:
    return EventAccumulator(str(folder)).Reload()


def test_after_resuming_every_step_has_one_value(tmp_path: Path):
    with TensorBoard(tmp_path, purge_step=None) as board:
        for step in range(1, 8):
            board.scalars(step, {"actor/pg_loss": 1.0})
    time.sleep(1.1)  # event files are read in the order of their names, which hold whole seconds
    with TensorBoard(tmp_path, purge_step=6) as board:
        for step in range(6, 10):
            board.scalars(step, {"actor/pg_loss": 2.0})
    values = [(e.step, e.value) for e in read(tmp_path).Scalars("actor/pg_loss")]
    assert values == [(step, 1.0 if step < 6 else 2.0) for step in range(1, 10)]


def test_one_writer_makes_one_file(tmp_path: Path):
    with TensorBoard(tmp_path, purge_step=None) as board:
        board.scalars(1, {"a": 1.0, "b/c": 2.0})
        board.text(1, "config", "x: 1")
    assert len(list(tmp_path.rglob("events.*"))) == 1


def test_values_are_readable_before_the_run_ends(tmp_path: Path):
    with TensorBoard(tmp_path, purge_step=None) as board:
        board.scalars(1, {"a": 1.0})
        assert [e.value for e in read(tmp_path).Scalars("a")] == [1.0]


def test_a_table_survives_bars_tags_and_line_breaks(tmp_path: Path):
    with TensorBoard(tmp_path, purge_step=None) as board:
        board.table(3, "val/generations", ["input", "score"], [["a|b\n<i>c", 1.0]])
    (event,) = read(tmp_path).Tensors("val/generations/text_summary")
    text = event.tensor_proto.string_val[0].decode()
    assert event.step == 3
    assert text.splitlines() == [
        "| input | score |",
        "| --- | --- |",
        "| a&#124;b<br>&lt;i>c | 1.0 |",
    ]


def spread(folder: Path, *chunks: torch.Tensor):
    with TensorBoard(folder, purge_step=None) as board:
        board.histograms(4, {"lengths": lambda: iter(chunks), "none": lambda: iter(())})
    board = read(folder)
    assert board.Tags()["histograms"] == (["lengths"] if chunks else [])
    (event,) = board.Histograms("lengths")
    assert event.step == 4
    return event.histogram_value


def test_a_histogram_counts_every_value_once_however_it_is_chunked(tmp_path: Path):
    values = torch.rand(1000, generator=torch.Generator().manual_seed(0)) * 8 - 3
    whole, parts = spread(tmp_path / "a", values), spread(tmp_path / "b", *values.split(300))
    assert whole == parts
    assert (whole.num, sum(whole.bucket)) == (1000, 1000)
    assert (whole.min, whole.max) == (float(values.min()), float(values.max()))
    assert whole.sum == pytest.approx(float(values.sum()), rel=1e-4)
    below = int((values <= whole.bucket_limit[9]).sum())
    assert abs(sum(whole.bucket[:10]) - below) <= 1  # a value on the edge


def test_a_histogram_of_one_value_and_without_what_is_not_finite(tmp_path: Path):
    found = spread(tmp_path, torch.tensor([2, 2]), torch.tensor([torch.nan, torch.inf]))
    assert (found.num, found.min, found.max, found.bucket) == (2, 2.0, 2.0, [2.0])
