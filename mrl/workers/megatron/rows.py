"""Packed rows: the sequences of a micro-batch end to end, and each context-parallel rank's part.

T tokens of a row, t = T / cp of a rank, N sequences, M predicted tokens of a row, m of a rank.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from math import lcm
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from mrl.columns import repeat
from mrl.types import Sequences

# A padded attention block holds sequences of at most this length ratio, so that its waste is
# bounded whatever the mix of lengths.
_BLOCK_LENGTH_RATIO = 1.5
# Padding is cut into sequences of about this length: attention is quadratic in them.
_PAD_LENGTH = 256
_PAD_TOKEN = 0


@dataclass(frozen=True, slots=True)
class RowCut:
    """How rows are padded and dealt over the context-parallel ranks.

    Contiguous parts suit our own all-to-all attention. Megatron and Transformer Engine deal each
    sequence in zigzag halves (chunk r and chunk 2 cp - 1 - r), which levels causal work: then a
    sequence is padded to a multiple of 2 cp.
    """

    cp: int = 1
    cp_rank: int = 0
    zigzag: bool = False
    multiple_of: int = 1  # of a rank's tokens, for sequence parallelism and FP8

    @property
    def row_multiple(self) -> int:
        """Give what a row's tokens divide by."""
        return lcm(self.cp * self.multiple_of, self.sequence_multiple)

    @property
    def sequence_multiple(self) -> int:
        """Give what each sequence's tokens divide by."""
        return 2 * self.cp if self.zigzag and self.cp > 1 else 1

    def padded[Length: (int, Tensor)](self, length: Length) -> Length:
        """Give the tokens that a sequence takes in a row, or each of some sequences."""
        return length + -length % self.sequence_multiple

    def row_length(self, sequences: Sequences) -> int:
        """Give the tokens of the row of a micro-batch; one of no sequences is padding alone."""
        total = int(self.padded(sequences.tokens.lengths).sum())
        return max(total + -total % self.row_multiple, self.row_multiple)

    def part(self, lengths: Tensor) -> Tensor:
        """List the row positions [t] of this rank, for sequences of these padded lengths [N]."""
        if self.sequence_multiple == 1:
            part = int(lengths.sum()) // self.cp
            return torch.arange(self.cp_rank * part, (self.cp_rank + 1) * part)
        sizes = lengths // self.sequence_multiple
        chunks = torch.tensor([self.cp_rank, self.sequence_multiple - 1 - self.cp_rank])
        starts = _starts(lengths)[:, None] + sizes[:, None] * chunks
        return _ranges(starts.reshape(-1), sizes.repeat_interleave(2))


@dataclass(frozen=True, slots=True)
class Block:
    """Sequences of similar length as one right-padded rectangle."""

    index: Tensor  # [n * L] int64: row position of each cell; padding repeats a real token
    shape: tuple[int, int]  # n, L


@dataclass
class PackedRow(PackedSeqParams):
    """Megatron's packed-sequence parameters with what our attention and heads need beside them."""

    tokens: Tensor | None = None  # [1, t] int64
    positions: Tensor | None = None  # [1, t] int64, restarting at each sequence
    padding: Tensor | None = None  # [1, t] bool: tokens that are no sequence's own
    predictors: Tensor | None = None  # [m] positions in `tokens` whose logits predict responses
    targets: Tensor | None = None  # [m] response tokens
    answers: Tensor | None = None  # [m] which of the row's M predictions each is
    lengths: Tensor | None = None  # [N] response lengths, on the CPU; they sum to M
    length: int = 0  # T
    num_padding: int = 0  # tokens of the whole row that are no sequence's own
    part: Tensor | None = None  # [t] positions of `tokens` in the whole row, on the CPU
    blocks: tuple[Block, ...] = ()  # of the whole row
    inverse: Tensor | None = None  # [T] cell of each token among all blocks' cells
    cos: Tensor | None = None  # [T, 1, D]
    sin: Tensor | None = None  # [T, 1, D]
    experts: Any = None  # a `RoutedRow` where the model has experts

    @property
    def num_predicted(self) -> int:
        """Count the predicted tokens M of the whole row."""
        assert self.lengths is not None
        return int(self.lengths.sum())


def pack(
    sequences: Sequences, cut: RowCut, device: torch.device, length: int | None = None
) -> PackedRow:
    """Lay sequences end to end in one row of `length` tokens (None: as few as `cut` allows).

    Padding behind a sequence is never seen by it; the rest of the row is filled with sequences of
    padding, which predict nothing.
    """
    own = sequences.tokens.lengths
    padded = cut.padded(own)
    total = cut.row_length(sequences) if length is None else length
    fill = total - int(padded.sum())
    size = _PAD_LENGTH + -_PAD_LENGTH % cut.sequence_multiple
    rest = [size] * (fill // size) + ([fill % size] if fill % size else [])
    lengths = torch.cat((padded, torch.tensor(rest, dtype=torch.int64)))
    starts = _starts(lengths)
    cells = _ranges(starts[: len(own)], own)
    tokens = torch.full((total,), _PAD_TOKEN)
    tokens[cells] = sequences.tokens.values.long()
    padding = torch.ones(total, dtype=torch.bool)
    padding[cells] = False
    positions = torch.arange(total) - repeat(starts, lengths)
    part = cut.part(lengths)
    counts = sequences.response_lengths
    answers, predictors = _predictors(part, total, starts[: len(own)] + own - counts - 1, counts)
    ends = torch.cat((starts, torch.tensor([total])))
    cu_seqlens = ends.to(device, torch.int32)
    longest = int(lengths.max())
    return PackedRow(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        # Transformer Engine's all-to-all wants them; padding behind a sequence is part of it
        cu_seqlens_q_padded=cu_seqlens if cut.sequence_multiple > 1 else None,
        cu_seqlens_kv_padded=cu_seqlens if cut.sequence_multiple > 1 else None,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        tokens=tokens[part][None].to(device),
        positions=positions[part][None].to(device),
        padding=padding[part][None].to(device),
        predictors=predictors.to(device),
        targets=tokens[part[predictors] + 1].to(device),
        answers=answers.to(device),
        lengths=sequences.response_lengths,
        length=total,
        num_padding=int(padding.sum()),
        part=part,
    )


def _starts(lengths: Tensor) -> Tensor:
    """Give where each of some parts begins that lie end to end."""
    return lengths.cumsum(0) - lengths


def _ranges(starts: Tensor, counts: Tensor) -> Tensor:
    """List counts[i] numbers up from starts[i], one range behind the other."""
    return repeat(starts - _starts(counts), counts) + torch.arange(int(counts.sum()))


def _predictors(
    part: Tensor, total: int, starts: Tensor, responses: Tensor
) -> tuple[Tensor, Tensor]:
    """Find this rank's predictors: which of the M they are, and their positions in its part."""
    predictors = _ranges(starts, responses)
    here = torch.full((total,), -1)
    here[part] = torch.arange(len(part))
    local = here[predictors]
    (answers,) = torch.nonzero(local >= 0, as_tuple=True)
    return answers, local[answers]


def fill_blocks(row: PackedRow) -> None:
    """Set what `PackedAttention` reads: rectangles of similar sequences, and each token's cell."""
    device, starts = row.cu_seqlens_q.device, row.cu_seqlens_q.tolist()
    lengths = [end - start for start, end in itertools.pairwise(starts)]
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    groups: list[list[int]] = []
    for i in order:
        if groups and lengths[groups[-1][0]] <= _BLOCK_LENGTH_RATIO * lengths[i]:
            groups[-1].append(i)
        else:
            groups.append([i])
    inverse = torch.empty(starts[-1], dtype=torch.int64)
    blocks, offset = [], 0
    for group in groups:
        width = lengths[group[0]]
        first = torch.tensor([starts[i] for i in group])[:, None]
        last = torch.tensor([lengths[i] - 1 for i in group])[:, None]
        column = torch.arange(width)[None]
        index = first + torch.minimum(column, last)
        cells = torch.arange(index.numel()).view_as(index) + offset
        real = column <= last
        inverse[index[real]] = cells[real]
        blocks.append(Block(index.reshape(-1).to(device), (len(group), width)))
        offset += index.numel()
    row.blocks, row.inverse = tuple(blocks), inverse.to(device)
