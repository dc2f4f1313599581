from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mrl.types import Ragged, Sequences
from mrl.workers.megatron.rows import PackedRow, RowCut, pack
from tests.workers.megatron.packed_rows import CPU, length_mixes, packed_row, rows_of

CUTS = [
    RowCut(),
    RowCut(multiple_of=4),
    RowCut(cp=2),
    RowCut(cp=3, multiple_of=2),
    RowCut(cp=2, zigzag=True),
    RowCut(cp=8, zigzag=True, multiple_of=2),
]


def parts(sequences: Sequences, cut: RowCut, length: int | None = None) -> list[PackedRow]:
    """Pack a row as each context-parallel rank does."""
    cuts = [RowCut(cut.cp, rank, cut.zigzag, cut.multiple_of) for rank in range(cut.cp)]
    return [pack(sequences, own, CPU, length) for own in cuts]


def whole(rows: list[PackedRow], name: str) -> Tensor:
    """Put the ranks' parts of a column back in the row's order."""
    column = torch.cat([vars(row)[name][0] for row in rows])
    out = torch.empty_like(column)
    out[torch.cat([row.part for row in rows])] = column
    return out


def test_blocks_hold_every_token_once_and_waste_little() -> None:
    for lengths in length_mixes(60):
        row = packed_row(lengths)
        owner = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
        cells = torch.cat([block.index for block in row.blocks])
        assert row.inverse is not None
        assert torch.equal(cells[row.inverse], torch.arange(sum(lengths)))  # back where it was
        assert len(row.inverse.unique()) == sum(lengths)
        assert len(cells) <= 1.5 * sum(lengths)
        for block in row.blocks:
            rectangle = block.index.view(block.shape)
            # a line is one sequence from its start; what follows repeats its last token
            assert (owner[rectangle] == owner[rectangle[:, :1]]).all()
            steps = rectangle.diff(dim=1)
            assert ((steps == 1) | (steps == 0)).all()


@pytest.mark.parametrize("cut", CUTS)
def test_the_parts_of_all_ranks_are_the_row(cut: RowCut) -> None:
    for lengths in length_mixes(20):
        sequences = rows_of(lengths)
        rows = parts(sequences, cut)
        total = rows[0].length
        assert total == cut.row_length(sequences) == sum(row.tokens.shape[1] for row in rows)
        assert sorted(torch.cat([row.part for row in rows]).tolist()) == list(range(total))
        assert {row.tokens.shape[1] % cut.multiple_of for row in rows} == {0}
        padding = whole(rows, "padding")
        assert torch.equal(whole(rows, "tokens")[~padding], sequences.tokens.values)
        assert rows[0].num_padding == int(padding.sum()) == total - sum(lengths)
        for start, size in zip(rows[0].cu_seqlens_q.tolist(), lengths, strict=False):
            own = whole(rows, "positions")[start : start + size]
            assert torch.equal(own, torch.arange(size))  # restart at each sequence
        assert rows[0].cu_seqlens_q[-1] == total


@pytest.mark.parametrize("cut", CUTS)
def test_each_response_token_is_predicted_by_one_rank(cut: RowCut) -> None:
    for lengths in length_mixes(20):
        sequences = rows_of(lengths)
        rows = parts(sequences, cut)
        wanted = torch.cat(
            [
                tokens[-int(n) :]
                for tokens, n in zip(
                    sequences.tokens.rows(), sequences.response_lengths, strict=True
                )
            ]
        )
        answers = torch.cat([row.answers for row in rows])
        assert sorted(answers.tolist()) == list(range(rows[0].num_predicted))
        assert torch.equal(torch.cat([row.targets for row in rows]), wanted[answers])
        tokens = whole(rows, "tokens")
        for row in rows:  # a predictor stands one before its target
            assert torch.equal(tokens[row.part[row.predictors] + 1], row.targets)


def test_zigzag_deals_a_sequence_as_megatron_does() -> None:
    rows = parts(rows_of([7]), RowCut(cp=2, zigzag=True))
    assert [row.part.tolist() for row in rows] == [[0, 1, 6, 7], [2, 3, 4, 5]]
    assert rows[0].cu_seqlens_q.tolist() == [0, 8]
    short = parts(rows_of([3]), RowCut(cp=8, zigzag=True, multiple_of=2))
    assert {row.tokens.shape[1] for row in short} == {2}


def test_rows_of_one_token_predict_nothing_and_are_kept() -> None:
    rows = Sequences(
        Ragged.from_rows([torch.tensor([5]), torch.tensor([6, 7])]), torch.tensor([0, 1])
    )
    for cut in CUTS:
        packed = parts(rows, cut)
        assert torch.equal(
            whole(packed, "tokens")[~whole(packed, "padding")], torch.tensor([5, 6, 7])
        )
        assert sum(len(row.targets) for row in packed) == 1


@pytest.mark.parametrize("cut", CUTS)
def test_a_row_may_be_filled_to_a_length_with_short_sequences(cut: RowCut) -> None:
    length = 50 * cut.row_multiple
    for lengths in ([], [5, 2]):
        rows = parts(rows_of(lengths), cut, length)
        assert rows[0].length == length
        assert rows[0].max_seqlen_q <= 256 + cut.sequence_multiple
        assert sum(len(row.targets) for row in rows) == rows[0].num_predicted
