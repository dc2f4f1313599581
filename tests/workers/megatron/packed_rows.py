"""Random packed rows."""

from __future__ import annotations

import random

import torch

from mrl.types import Ragged, Sequences
from mrl.workers.megatron.rows import PackedRow, RowCut, fill_blocks, pack

CPU = torch.device("cpu")


def rows_of(lengths: list[int], seed: int = 0) -> Sequences:
    """Draw sequences of tokens from 1 on with responses of any length."""
    draw = random.Random(seed)
    rows = [torch.tensor([draw.randrange(1, 90) for _ in range(n)]) for n in lengths]
    responses = torch.tensor([draw.randint(1, n - 1) for n in lengths], dtype=torch.int64)
    return Sequences(Ragged.from_rows(rows), responses)


def packed_row(lengths: list[int], length: int | None = None, **cut: int | bool) -> PackedRow:
    """Pack random sequences of these lengths, for our own attention."""
    row = pack(rows_of(lengths), RowCut(**cut), CPU, length)
    fill_blocks(row)
    return row


def length_mixes(count: int) -> list[list[int]]:
    """Draw mixes of short, equal and long sequences."""
    draw = random.Random(1)
    ranges = [(2, 4), (2, 60), (30, 33), (2, 400)]
    return [
        [draw.randint(*draw.choice(ranges)) for _ in range(draw.randint(1, 20))]
        for _ in range(count)
    ]
