from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mrl.data import files as files_module
from mrl.data.files import RowFiles

Write = Callable[..., Path]
TOOL_CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "a"}],
    [
        {"role": "user", "content": "b"},
        {
            "role": "assistant",
            "content": "c",
            "tool_calls": [{"name": "f", "arguments": {"x": 1}}],
        },
    ],
    [
        {"role": "user", "content": "d"},
        {
            "role": "assistant",
            "content": "e",
            "tool_calls": [{"name": "g", "arguments": {"y": [1, 2]}}, {"name": "h"}],
        },
    ],
]


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
def test_rows_of_several_files_come_end_to_end(write: Write, suffix: str) -> None:
    rows = [{"n": i, "s": f"text {i}"} for i in range(30)]
    files = RowFiles([write(f"a.{suffix}", rows[:13]), write(f"b.{suffix}", rows[13:])])
    assert len(files) == 30
    assert [files.row(i) for i in range(30)] == rows
    assert [files.row(i) for i in (29, 0, 12, 13)] == [rows[i] for i in (29, 0, 12, 13)]
    assert files.where(14).endswith(f"b.{suffix} row 1")
    scanned = [(first + k, row) for first, batch in files.scan() for k, row in enumerate(batch)]
    assert scanned == list(enumerate(rows))


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
def test_messages_are_the_objects_that_were_written(write: Write, suffix: str) -> None:
    files = RowFiles([write(f"a.{suffix}", [{"prompt": chat} for chat in TOOL_CHATS])])
    assert [files.row(i)["prompt"] for i in range(3)] == TOOL_CHATS
    assert [row["prompt"] for _, batch in files.scan(["prompt"]) for row in batch] == TOOL_CHATS


def test_columns_that_are_no_messages_keep_their_none(write: Write) -> None:
    files = RowFiles([write("a.parquet", [{"info": {"x": 1}}, {"info": {"y": 2}}])])
    assert files.row(0)["info"] == {"x": 1, "y": None}


def test_a_scan_reads_the_named_columns_only(write: Write) -> None:
    path = write("a.parquet", [{"n": i, "s": "x"} for i in range(6)])
    _, batch = next(RowFiles([path]).scan(["n", "absent"]))
    assert batch == [{"n": i} for i in range(4)]


def test_blank_lines_are_no_rows(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('\n{"n": 1}\n  \n{"n": 2}')
    files = RowFiles([path])
    assert [files.row(i) for i in range(len(files))] == [{"n": 1}, {"n": 2}]


def test_a_broken_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"n": 1}\n{"n": \n[1]\n')
    files = RowFiles([path])
    with pytest.raises(ValueError, match=r"a\.jsonl row 1 is not JSON"):
        files.row(1)
    with pytest.raises(ValueError, match=r"a\.jsonl row 2 is a JSON list"):
        files.row(2)


def test_bad_files_are_refused_by_name(tmp_path: Path, write: Write) -> None:
    write("train.parquet", [{"n": 1}])
    with pytest.raises(ValueError, match=r"trian\.parquet does not exist; did you mean .*train\."):
        RowFiles([tmp_path / "trian.parquet"])
    (tmp_path / "a.csv").write_text("n\n1\n")
    with pytest.raises(ValueError, match=r"a\.csv: expected one of \.parquet, \.jsonl"):
        RowFiles([tmp_path / "a.csv"])
    (tmp_path / "b.parquet").write_text("no parquet")
    with pytest.raises(ValueError, match=r"b\.parquet is not a readable parquet file"):
        RowFiles([tmp_path / "b.parquet"])
    with pytest.raises(ValueError, match="no data files"):
        RowFiles([])


def test_held_blocks_are_bounded_in_bytes(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files_module, "_CACHE_BYTES", 3000)
    files = RowFiles([write("a.parquet", [{"s": "x" * 100} for _ in range(100)], group=10)])
    for i in [*range(100), *range(0, 100, 7)]:
        files.row(i)
        assert files._held_bytes() <= 3000
    assert len(files._held) > 1


def test_memory_is_set_by_row_groups_not_by_the_file(tmp_path: Path) -> None:
    """256 MiB of text in row groups of 1 MiB."""
    path = tmp_path / "large.parquet"
    group = pa.table({"s": [f"{i:06d}" * 170 for i in range(1024)]})
    with pq.ParquetWriter(path, group.schema, compression="zstd", use_dictionary=False) as writer:
        for _ in range(256):
            writer.write_table(group)
    process = psutil.Process()
    before = process.memory_info().rss
    files = RowFiles([path])
    seen = sum(len(batch) for _, batch in files.scan())
    assert seen == len(files) == 256 * 1024
    assert process.memory_info().rss - before < 100 << 20


def test_the_fingerprint_knows_content_not_place(tmp_path: Path, write: Write) -> None:
    rows = [{"n": i, "s": f"text {i}"} for i in range(50)]
    for suffix in ("parquet", "jsonl"):
        first = RowFiles([write(f"a.{suffix}", rows)]).fingerprint()
        assert RowFiles([write(f"moved.{suffix}", rows)]).fingerprint() == first
        changed = [*rows[:25], {"n": 25, "s": "TEXT 25"}, *rows[26:]]
        assert RowFiles([write(f"b.{suffix}", changed)]).fingerprint() != first
        assert RowFiles([write(f"c.{suffix}", rows[:-1])]).fingerprint() != first


def test_jsonl_holds_unicode_and_long_lines(tmp_path: Path) -> None:
    rows = [{"s": "\u4f60\u597d" * 5000}, {"s": "\u2028"}]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(r, ensure_ascii=False) + "\n" for r in rows), "utf-8")
    files = RowFiles([path])
    assert [files.row(i) for i in range(len(files))] == rows
