from __future__ import annotations

import os
from pathlib import Path

import pytest

from mrl.checkpoint.atomic import write_atomically


def test_a_failed_write_leaves_the_old_content(tmp_path: Path, monkeypatch):
    path = tmp_path / "deep" / "file.txt"
    write_atomically(path, "old")

    def full_disk(handle: int) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(OSError, match="No space"):
        write_atomically(path, "new")
    assert path.read_text() == "old"


def test_a_write_leaves_nothing_beside_the_file(tmp_path: Path):
    write_atomically(tmp_path / "file.txt", "one")
    write_atomically(tmp_path / "file.txt", "two")
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("file.txt", "two")]
