"""Ragged columns: rows of different length, as messages carry them.

Shape legend: N rows (sequences), T values of all rows end to end.
"""

from __future__ import annotations

import math
from collections.abc import Buffer, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from pickle import PickleBuffer
from typing import Any, Self, SupportsIndex

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_CHUNK = 1 << 16  # values that stay in the cache
_Pieces = tuple[npt.NDArray[Any], ...]  # a row: arrays to be put end to end


@dataclass(frozen=True, slots=True)
class Ragged:
    """Rows of different length stored end to end."""

    values: Tensor  # [T] any dtype
    lengths: Tensor  # [N] int64, sums to T

    def __post_init__(self) -> None:
        total, held = int(self.lengths.sum()), self.values.shape[0]
        if total != held:
            raise ValueError(f"ragged lengths sum to {total}, values hold {held}")

    @staticmethod
    def from_rows(rows: Sequence[Tensor]) -> Ragged:
        """Join rows [R_i] into one column."""
        if not rows:
            return Ragged(torch.empty(0), torch.empty(0, dtype=torch.int64))
        lengths = torch.tensor([row.shape[0] for row in rows], dtype=torch.int64)
        return Ragged(torch.cat(list(rows)), lengths)

    @staticmethod
    def concat(columns: Sequence[Ragged]) -> Ragged:
        """Stack columns under one another."""
        return Ragged(
            torch.cat([c.values for c in columns]), torch.cat([c.lengths for c in columns])
        )

    @staticmethod
    def in_order(columns: Sequence[Ragged], order: Sequence[int]) -> Ragged:
        """Put rows back where they came from: row i of the stacked columns to place `order[i]`.

        Raises ValueError unless `order` names each place once.
        """
        places = np.asarray(order, np.int64)
        rows = [row for column in columns for row in column._pieces()]
        row_of = np.argsort(places, kind="stable")
        if len(rows) != len(order) or (places[row_of] != np.arange(len(order))).any():
            raise ValueError(f"{len(rows)} rows do not fill the places 0 to {len(order) - 1}")
        lengths = torch.cat([column.lengths for column in columns])[torch.from_numpy(row_of)]
        return Joined([rows[i] for i in row_of.tolist()], lengths, columns[0])

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[Any, ...]:
        """Pickle the values as plain bytes: those of a view alone, not of all its storage."""
        values = self.values
        array = np.ascontiguousarray(_as_numpy(values.cpu())).reshape(-1).view(np.uint8)
        raw = PickleBuffer(array) if int(protocol) >= 5 else array  # may travel beside the pickle
        shape = tuple(values.shape)
        return _unpickle_ragged, (raw, _name(values.dtype), shape, to_bytes(self.lengths))

    def __len__(self) -> int:
        return self.lengths.shape[0]

    @property
    def total(self) -> int:
        """Count the values of all rows, T."""
        return int(self.lengths.sum())

    def rows(self) -> tuple[Tensor, ...]:
        """Split into views [R_i]."""
        return torch.split(self.values, self.lengths.tolist())

    def row_index(self) -> Tensor:
        """Give the row of each value, [T] int64."""
        return repeat(torch.arange(len(self)), self.lengths)

    def select(self, indices: Sequence[int]) -> Ragged:
        """Take rows by index, in that order; no value is copied."""
        if not len(indices):
            return Ragged(self.values[:0], self.lengths[:0])
        first, stop = indices[0], indices[0] + len(indices)
        if first >= 0 and _are_consecutive(indices):
            if stop > len(self):
                raise IndexError(f"row {stop - 1} of {len(self)}")
            start = int(self.lengths[:first].sum())
            lengths = self.lengths[first:stop]
            return Ragged(self.values[start : start + int(lengths.sum())], lengths)
        rows = self._pieces()
        return Joined([rows[i] for i in indices], self.lengths[torch.as_tensor(indices)], self)

    def contiguous(self) -> Ragged:
        """Give the column with its values end to end, of which consecutive rows are a view."""
        return self

    def split(self, sizes: Sequence[int]) -> Sequence[Ragged]:
        """Cut into consecutive parts of so many rows, N in all; no value is copied."""
        stops = np.concatenate([[0], self.lengths.cumsum(0).numpy()])
        totals = np.diff(stops[np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])])
        values = torch.split(self.values, totals.tolist())
        return list(map(Ragged, values, torch.split(self.lengths, list(sizes))))

    def to(self, device: torch.device) -> Ragged:
        """Bring the values to a device; the lengths stay on the CPU."""
        return Ragged(self.values.to(device), self.lengths)

    def with_values(self, values: Tensor) -> Ragged:
        """Keep the row lengths under new values [T]."""
        return Ragged(values, self.lengths)

    def row_sums(self, dtype: torch.dtype | None = None) -> Tensor:
        """Sum each row, [N], in a dtype (None: that of the values)."""
        sums = torch.zeros(len(self), dtype=dtype or self.values.dtype)
        filled = self.lengths > 0
        starts = (self.lengths.cumsum(0) - self.lengths)[filled]
        if len(starts):
            found = np.add.reduceat(self.values.numpy(), starts.numpy(), dtype=sums.numpy().dtype)
            sums[filled] = torch.from_numpy(found)
        return sums

    def chunks(self, size: int) -> Iterator[Tensor]:
        """Iterate over the values, whole rows of about `size` values at a time."""
        stops = self.lengths.cumsum(0).numpy()
        total, row, stop = self.total, 0, 0
        while stop < total:
            first, start = row, stop
            row = min(int(np.searchsorted(stops, start + size, "left")) + 1, len(self))
            stop = int(stops[row - 1])
            yield self._between(first, row, start, stop)

    def mean(self) -> float:
        """Average all values; NaN where there are none."""
        total = self.total
        return math.fsum(float(c.sum()) for c in self.chunks(_CHUNK)) / total if total else math.nan

    def _between(self, first: int, last: int, start: int, stop: int) -> Tensor:
        """Give the values of rows first to last - 1, which are those from start to stop - 1."""
        return self.values[start:stop]

    def _pieces(self) -> Sequence[_Pieces]:
        """Split into views as numpy's, which are made and joined several times as fast."""
        array = _as_numpy(self.values)
        stops = self.lengths.cumsum(0).tolist()
        return [(array[start:stop],) for start, stop in pairwise([0, *stops])]


class Joined(Ragged):
    """A column whose rows lie apart: where they arrived, until their values are asked for.

    So a batch is brought into another order, and split, without a copy; its rows are brought
    together once, when they are sent.
    """

    __slots__ = ("_joined", "_like", "_rows")
    _rows: Sequence[_Pieces]
    _like: Tensor  # [0] of the dtype
    _joined: Tensor | None

    def __init__(self, rows: Sequence[_Pieces], lengths: Tensor, like: Tensor | Ragged) -> None:
        """Take the arrays of each row and the lengths of the rows [N]; `like` has the dtype."""
        while isinstance(like, Joined):
            like = like._like
        object.__setattr__(self, "_rows", rows)
        object.__setattr__(self, "_like", like.values[:0] if isinstance(like, Ragged) else like[:0])
        object.__setattr__(self, "_joined", None)
        object.__setattr__(self, "lengths", lengths)

    @property
    def values(self) -> Tensor:
        """Bring the values together [T]: once, they are kept."""
        if self._joined is None:
            object.__setattr__(self, "_joined", self._between(0, len(self), 0, 0))
        assert self._joined is not None
        return self._joined

    def contiguous(self) -> Ragged:
        """Bring the values together, for all rows at once: large arrays get large pages."""
        return Ragged(self.values, self.lengths)

    def select(self, indices: Sequence[int]) -> Joined:
        """Take rows by index, in that order; no value is copied."""
        lengths = self.lengths[torch.as_tensor(indices, dtype=torch.int64)]
        return Joined([self._rows[i] for i in indices], lengths, self._like)

    def _between(self, first: int, last: int, start: int, stop: int) -> Tensor:
        rows = chain.from_iterable(self._rows[first:last])
        like = _as_numpy(self._like)
        # without the dtype a row of another width would be read as other numbers below
        joined = np.concatenate([like, *rows], dtype=like.dtype, casting="same_kind")
        return torch.from_numpy(joined).view(self._like.dtype)

    def _pieces(self) -> Sequence[_Pieces]:
        return self._rows


class ByRow(Ragged):
    """A column that follows from one number a row: held and sent as that number alone."""

    __slots__ = ("numbers",)
    numbers: Tensor  # [N] any dtype

    def __init__(self, numbers: Tensor, lengths: Tensor) -> None:
        """Take the numbers [N] and lengths [N] int64 of the rows; raises ValueError otherwise."""
        if numbers.shape != lengths.shape:
            raise ValueError(f"{len(numbers)} numbers for {len(lengths)} rows")
        object.__setattr__(self, "numbers", numbers)
        object.__setattr__(self, "lengths", lengths)

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[Any, ...]:
        """Pickle the numbers."""
        numbers = self.numbers
        return _unpickle_by_row, (
            type(self),
            _name(numbers.dtype),
            to_bytes(numbers),
            to_bytes(self.lengths),
        )

    def split(self, sizes: Sequence[int]) -> Sequence[Self]:
        """Cut into consecutive parts of so many rows, N in all."""
        numbers, lengths = (torch.split(c, list(sizes)) for c in (self.numbers, self.lengths))
        return list(map(type(self), numbers, lengths))

    def select(self, indices: Sequence[int]) -> Self:
        """Take rows by index, in that order."""
        rows = torch.as_tensor(indices, dtype=torch.int64)
        return type(self)(self.numbers[rows], self.lengths[rows])


class Repeated(ByRow):
    """Rows that repeat one number, such as a mask of whole rows or an outcome's advantage."""

    __slots__ = ()

    @property
    def values(self) -> Tensor:
        """Make the values [T]: a new tensor each time."""
        return self._between(0, len(self), 0, 0)

    def _between(self, first: int, last: int, start: int, stop: int) -> Tensor:
        return repeat(self.numbers[first:last], self.lengths[first:last])

    def row_sums(self, dtype: torch.dtype | None = None) -> Tensor:
        """Sum each row, [N], in a dtype (None: that of the numbers)."""
        numbers = self.numbers.to(dtype or self.numbers.dtype)
        return torch.where(self.lengths > 0, numbers * self.lengths, 0).to(numbers.dtype)


class AtEnd(ByRow):
    """Rows of zeros but for a number at the last value, such as an outcome's reward."""

    __slots__ = ()

    @property
    def values(self) -> Tensor:
        """Make the values [T]: a new tensor each time."""
        values = torch.zeros(self.total, dtype=self.numbers.dtype)
        filled = self.lengths > 0
        values[self.lengths.cumsum(0)[filled] - 1] = self.numbers[filled]
        return values

    def _between(self, first: int, last: int, start: int, stop: int) -> Tensor:
        return AtEnd(self.numbers[first:last], self.lengths[first:last]).values

    def row_sums(self, dtype: torch.dtype | None = None) -> Tensor:
        """Sum each row, [N], in a dtype (None: that of the numbers)."""
        numbers = self.numbers.to(dtype or self.numbers.dtype)
        return torch.where(self.lengths > 0, numbers, 0)


def _as_numpy(values: Tensor) -> npt.NDArray[Any]:
    """Give a view; of bfloat16, which numpy lacks, the bits."""
    values = values.detach()
    return (values.view(torch.int16) if values.dtype == torch.bfloat16 else values).numpy()


def repeat(numbers: Tensor, counts: Tensor) -> Tensor:
    """Repeat each number so many times, [sum of counts].

    By numpy: torch's own wakes all threads, and a rank on a node of many cores waited for them now
    and then for longer than a micro-batch takes.
    """
    return torch.from_numpy(np.repeat(numbers.numpy(), counts.numpy()))


def _name(dtype: torch.dtype) -> str:
    """Name a dtype: it is looked up faster than torch's own object is pickled."""
    return str(dtype).removeprefix("torch.")


def to_bytes(values: Tensor) -> bytes:
    """Give the bytes of a small tensor: numpy and torch take many times as long to pickle one."""
    return values.numpy().tobytes()


def from_bytes(raw: Buffer, dtype: torch.dtype) -> Tensor:
    """Make a tensor [*] on these bytes, or on a copy if they must not be written.

    Ray's arrays lie in a store that all ranks of a node share.
    """
    view = memoryview(raw)
    if not view.nbytes:
        return torch.empty(0, dtype=dtype)  # which torch does not read from a buffer
    return torch.frombuffer(bytearray(view) if view.readonly else view, dtype=dtype)


def _unpickle_ragged(raw: Buffer, dtype: str, shape: tuple[int, ...], lengths: bytes) -> Ragged:
    values = from_bytes(raw, getattr(torch, dtype))
    shaped = values.view(shape) if len(shape) > 1 else values
    return Ragged(shaped, from_bytes(lengths, torch.int64))


def _unpickle_by_row(kind: type[ByRow], dtype: str, numbers: bytes, lengths: bytes) -> ByRow:
    return kind(from_bytes(numbers, getattr(torch, dtype)), from_bytes(lengths, torch.int64))


def _are_consecutive(indices: Sequence[int]) -> bool:
    span = range(indices[0], indices[0] + len(indices))
    return indices == span if isinstance(indices, range) else list(indices) == list(span)
