"""A metrics file is read while it grows, is cut, or is replaced by another."""

from __future__ import annotations

import json
import os
from pathlib import Path

from mrl.tracking.follow import Follower


def line(step: int) -> str:
    return json.dumps({"step": step}) + "\n"


def test_a_row_is_read_once_and_only_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    follower = Follower(path)
    assert follower.read() == []
    path.write_text(line(1) + line(2)[:5])
    assert follower.read() == [{"step": 1}]
    with path.open("a") as file:
        file.write(line(2)[5:] + "no row\n" + '{"step": "x"}\n' + line(3))
    assert follower.read() == [{"step": 1}, {"step": 2}, {"step": 3}]
    assert follower.read() == [{"step": 1}, {"step": 2}, {"step": 3}]


def test_a_file_that_was_cut_replaced_or_removed_is_read_anew(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    follower = Follower(path)
    path.write_text(line(1) + line(2) + line(3))
    assert len(follower.read()) == 3
    os.truncate(path, len(line(1)))
    assert follower.read() == [{"step": 1}]
    (tmp_path / "other").write_text(line(7) + line(8))
    os.replace(tmp_path / "other", path)
    assert follower.read() == [{"step": 7}, {"step": 8}]
    path.unlink()
    assert follower.read() == []
    path.write_text(line(9))
    assert follower.read() == [{"step": 9}]


def test_bytes_that_are_no_text_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"\xff\xfe\x00\n" + line(4).encode())
    assert Follower(path).read() == [{"step": 4}]
