"""Rows of parquet and jsonl files, read block by block.

A block is a parquet row group, or a run of jsonl lines whose byte offsets are known. Memory is set
by the blocks that are held (a few, bounded in bytes), not by the files. Rows are plain Python
objects. Arrow gives all structs of a column the same fields and fills the absent ones with None;
in messages (structs with a `role`) those fields are removed again, so that a chat template sees
what was written.
"""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import json
from bisect import bisect_right
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

Row = dict[str, Any]
_CACHE_BYTES = 256 << 20  # of decoded blocks
_LINES = 1024  # of a jsonl block, and rows of one scan batch
_EDGE_BYTES = 1 << 20  # of each end of a file that its fingerprint reads


class Block(Protocol):
    """Decoded rows that are held in memory."""

    nbytes: int

    def row(self, index: int) -> Row:
        """Build one row."""
        ...


class Reader(Protocol):
    """One file: its rows in blocks."""

    path: Path
    counts: Sequence[int]  # rows of each block

    def columns(self) -> Sequence[str]:
        """Name the columns; of jsonl, those of the first row."""
        ...

    def read(self, block: int) -> Block:
        """Decode a block."""
        ...

    def scan(self, block: int, columns: Sequence[str] | None) -> Iterator[list[Row]]:
        """Stream a block in batches, of some columns where the format can."""
        ...

    def tail_bytes(self) -> int:
        """Size of the end of the file that speaks of all its rows."""
        ...


def _is_messages(kind: pa.DataType) -> bool:
    return (
        (pa.types.is_list(kind) or pa.types.is_large_list(kind))
        and pa.types.is_struct(kind.value_type)
        and kind.value_type.get_field_index("role") >= 0
    )


def _without_none(value: Any) -> Any:
    """Remove the None fields of structs, at any depth."""
    if isinstance(value, dict):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_none(item) for item in value]
    return value


class _Table:
    """A decoded row group."""

    def __init__(self, path: Path, block: int, table: pa.Table, messages: frozenset[str]) -> None:
        self._path, self._block = path, block
        self._table = table
        self._messages = messages
        self.nbytes = table.nbytes

    def row(self, index: int) -> Row:
        """Build one row of Python objects."""
        with _readable(self._path, self._block):
            return _plain(self._table.slice(index, 1), self._messages)[0]


def _plain(table: pa.Table | pa.RecordBatch, messages: frozenset[str]) -> list[Row]:
    rows: list[Row] = table.to_pylist()
    return [
        {key: _without_none(value) if key in messages else value for key, value in row.items()}
        for row in rows
    ]


@contextlib.contextmanager
def _readable(path: Path, block: int | None = None) -> Iterator[None]:
    """Name the file, and the row group, that Arrow cannot read."""
    try:
        yield
    except (pa.ArrowException, OSError, ValueError, OverflowError) as error:
        place = "" if block is None else f" in row group {block}"
        raise ValueError(f"{path} is not a readable parquet file{place}: {error}") from error


class _Parquet:
    """A parquet file; its blocks are the row groups."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with _readable(path):
            self._file = pq.ParquetFile(path, memory_map=True)
            schema = self._file.schema_arrow
        metadata = self._file.metadata
        self.counts: Sequence[int] = [
            metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)
        ]
        if len(set(schema.names)) < len(schema.names):
            twice = next(n for n, count in Counter(schema.names).items() if count > 1)
            raise ValueError(f"{path} has two columns named {twice!r}")
        self._messages = frozenset(field.name for field in schema if _is_messages(field.type))

    def columns(self) -> Sequence[str]:
        """Name the columns of the schema."""
        return tuple(self._file.schema_arrow.names)

    def read(self, block: int) -> _Table:
        """Decode a row group."""
        with _readable(self.path, block):
            table = self._file.read_row_group(block)
            self._check_count(block, table.num_rows)
        return _Table(self.path, block, table, self._messages)

    def scan(self, block: int, columns: Sequence[str] | None) -> Iterator[list[Row]]:
        """Stream a row group in batches, reading the named columns only."""
        wanted = self.columns() if columns is None else [c for c in self.columns() if c in columns]
        batches = self._file.iter_batches(_LINES, row_groups=[block], columns=list(wanted))
        found = 0
        while True:
            with _readable(self.path, block):
                batch = next(batches, None)
                if batch is None:
                    self._check_count(block, found)
                    return
                found += batch.num_rows
                rows = _plain(batch, self._messages)
            yield rows

    def _check_count(self, block: int, found: int) -> None:
        if found != self.counts[block]:
            raise ValueError(f"it holds {found} rows, its metadata count {self.counts[block]}")

    def tail_bytes(self) -> int:
        """Size of the footer: schema, and sizes and statistics of all row groups."""
        return int(self._file.metadata.serialized_size)


def _object(pairs: list[tuple[str, Any]]) -> Row:
    """Make an object; one of two values of a key would be lost."""
    row = dict(pairs)
    if len(row) < len(pairs):
        twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise ValueError(f"the key {twice!r} is given twice")
    return row


_parse = json.JSONDecoder(object_pairs_hook=_object).decode


class _Lines:
    """Lines of a jsonl file."""

    def __init__(self, lines: Sequence[bytes], reader: _Jsonl, first: int) -> None:
        self._lines, self._reader, self._first = lines, reader, first
        self.nbytes = sum(map(len, lines))

    def row(self, index: int) -> Row:
        """Parse one line."""
        where = f"{self._reader.path} row {self._first + index}"
        try:
            # utf-8-sig: Windows marks a file's start; json would guess UTF-16 from a NUL.
            row = _parse(self._lines[index].decode("utf-8-sig"))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{where} is not JSON: {error}") from error
        if not isinstance(row, dict):
            raise ValueError(f"{where} is a JSON {type(row).__name__}, expected an object")
        return row


class _Jsonl:
    """A file of JSON objects, one a line; blank lines are no rows."""

    def __init__(self, path: Path) -> None:
        self.path = path
        starts: list[int] = []
        offset = 0
        with path.open("rb") as file:
            for line in file:
                if not line.isspace():
                    starts.append(offset)
                offset += len(line)
        self._starts = np.array(starts, dtype=np.int64)  # [rows]
        full, rest = divmod(len(starts), _LINES)
        self.counts: Sequence[int] = [_LINES] * full + ([rest] if rest else [])

    def columns(self) -> Sequence[str]:
        """Name the keys of the first row."""
        return tuple(self.read(0).row(0)) if self.counts else ()

    def read(self, block: int) -> _Lines:
        """Read the lines of a block; they are parsed when asked for."""
        first = block * _LINES
        with self.path.open("rb") as file:
            lines = []
            for start in self._starts[first : first + self.counts[block]].tolist():
                file.seek(start)
                lines.append(file.readline())
        return _Lines(lines, self, first)

    def scan(self, block: int, columns: Sequence[str] | None) -> Iterator[list[Row]]:
        """Parse a block; a line has to be read whole, whatever the columns."""
        lines = self.read(block)
        yield [lines.row(index) for index in range(self.counts[block])]

    def tail_bytes(self) -> int:
        """No part of the file speaks of the whole."""
        return 0


_READERS: Mapping[str, type[_Parquet] | type[_Jsonl]] = {".parquet": _Parquet, ".jsonl": _Jsonl}


def _open(path: Path) -> Reader:
    if not path.is_file():
        siblings = [entry.name for entry in path.parent.glob("*")] if path.parent.is_dir() else []
        near = difflib.get_close_matches(path.name, siblings, n=1)
        hint = f"; did you mean {path.parent / near[0]}?" if near else ""
        raise ValueError(f"data file {path} does not exist{hint}")
    if path.suffix not in _READERS:
        raise ValueError(f"data file {path}: expected one of {', '.join(_READERS)}")
    return _READERS[path.suffix](path)


class RowFiles:
    """The rows of several files end to end."""

    def __init__(self, files: Sequence[str | Path]) -> None:
        """Index the files.

        Raises:
            ValueError: if there is no file, or one is missing, unreadable or of another kind.
        """
        if isinstance(files, str | Path):
            files = [files]
        if not files:
            raise ValueError("no data files given: set data.train_files and data.val_files")
        self.readers = tuple(_open(Path(file)) for file in files)
        self._blocks = [
            (reader, block, first)
            for reader in self.readers
            for block, first in enumerate(accumulate(reader.counts, initial=0))
            if block < len(reader.counts)
        ]
        counts = [count for reader in self.readers for count in reader.counts]
        self._ends = list(accumulate(counts))
        self._held: OrderedDict[int, Block] = OrderedDict()

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __str__(self) -> str:
        return ", ".join(str(reader.path) for reader in self.readers)

    def _locate(self, index: int) -> tuple[int, int]:
        """Give the block of a row and its place there."""
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        block = bisect_right(self._ends, index)
        return block, index - (self._ends[block - 1] if block else 0)

    def where(self, index: int) -> str:
        """Name the file and the row in it."""
        block, place = self._locate(index)
        reader, _, first = self._blocks[block]
        return f"{reader.path} row {first + place}"

    def row(self, index: int) -> Row:
        """Read one row; its block is held for the next ones."""
        block, place = self._locate(index)
        if block not in self._held:
            reader, number, _ = self._blocks[block]
            self._held[block] = reader.read(number)
            while len(self._held) > 1 and self._held_bytes() > _CACHE_BYTES:
                self._held.popitem(last=False)
        self._held.move_to_end(block)
        return self._held[block].row(place)

    def _held_bytes(self) -> int:
        return sum(block.nbytes for block in self._held.values())

    def scan(self, columns: Sequence[str] | None = None) -> Iterator[tuple[int, list[Row]]]:
        """Stream all rows in batches, each with the index of its first row.

        Args:
            columns: the columns to read, where the format can; those that are absent are left out.
        """
        index = 0
        for reader, block, _ in self._blocks:
            for batch in reader.scan(block, columns):
                yield index, batch
                index += len(batch)

    def require(self, columns: Mapping[str, str]) -> None:
        """Check that every file has some columns.

        Args:
            columns: each name with the hint of what to do without it.

        Raises:
            ValueError: naming the file, the missing column, what is there and the hint.
        """
        for reader in self.readers:
            present = reader.columns()
            for name, hint in columns.items():
                if reader.counts and name not in present:
                    raise ValueError(
                        f"{reader.path} has no column {name!r}; "
                        f"it has: {', '.join(present)}; {hint}"
                    )

    def fingerprint(self) -> str:
        """Identify the content: sizes, row counts, and the bytes at both ends of every file.

        A parquet file's end holds its schema and the sizes and statistics of all row groups.
        Paths and times do not count.
        """
        digest = hashlib.sha256()
        for reader in self.readers:
            size = reader.path.stat().st_size
            digest.update(f"{size} {sum(reader.counts)}\n".encode())
            tail = _EDGE_BYTES + reader.tail_bytes()
            with reader.path.open("rb") as file:
                digest.update(file.read(_EDGE_BYTES))
                file.seek(max(0, size - tail))
                digest.update(file.read())
        return digest.hexdigest()
