from __future__ import annotations

import pickle
import random

import numpy as np
import pytest
import torch

from mrl.types import AtEnd, ByRow, Joined, Ragged, Repeated, Sequences
from mrl.workers.wire import pack


def column(lengths: list[int], dtype: torch.dtype = torch.float32) -> Ragged:
    values = torch.arange(sum(lengths)).to(dtype)
    return Ragged(values, torch.tensor(lengths, dtype=torch.int64))


def assert_equal(found: Ragged, wanted: Ragged) -> None:
    assert found.values.dtype == wanted.values.dtype
    assert torch.equal(found.values, wanted.values)
    assert torch.equal(found.lengths, wanted.lengths)


@pytest.mark.parametrize("seed", range(5))
def test_rows_that_were_dealt_out_come_back_in_order(seed: int) -> None:
    draw = random.Random(seed)
    whole = column([draw.randint(0, 9) for _ in range(20)])
    order = draw.sample(range(20), 20)
    cuts = sorted(draw.sample(range(21), 3))
    hands = [order[: cuts[0]], order[cuts[0] : cuts[1]], order[cuts[1] : cuts[2]], order[cuts[2] :]]
    assert_equal(Ragged.in_order([whole.select(hand) for hand in hands], order), whole)


def test_no_rows_keep_their_dtype_and_shape() -> None:
    none = Ragged(torch.empty(0, 3, 2, dtype=torch.uint8), torch.empty(0, dtype=torch.int64))
    assert Ragged.in_order([none, none], []).values.shape == (0, 3, 2)
    assert_equal(Ragged.in_order([none], []), none)


@pytest.mark.parametrize("order", [[0, 0], [1, 2], [0], [0, 1, 2]])
def test_rows_that_do_not_fill_their_places_are_an_error(order: list[int]) -> None:
    with pytest.raises(ValueError):
        Ragged.in_order([column([1, 2])], order)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_a_view_is_sent_without_the_rest_of_its_storage(dtype: torch.dtype) -> None:
    whole = column([1000, 3, 4, 1000], dtype)
    view = whole.select([1, 2])
    sent = pickle.dumps(view, protocol=pickle.HIGHEST_PROTOCOL)
    assert len(sent) < 1000
    assert_equal(pickle.loads(sent), view)


def test_what_arrives_in_shared_memory_may_be_written_without_harm() -> None:
    buffers: list[pickle.PickleBuffer] = []
    sent = pickle.dumps(column([2, 3]), protocol=5, buffer_callback=buffers.append)
    shared = [memoryview(bytes(buffer.raw())) for buffer in buffers]  # read-only, as Ray's are
    assert shared
    first = pickle.loads(sent, buffers=shared)
    first.values.add_(1)
    first.lengths.zero_()
    assert_equal(pickle.loads(sent, buffers=shared), column([2, 3]))


def lazy(lengths: list[int], seed: int) -> tuple[Joined, Ragged]:
    """Draw rows of two arrays each; gives them apart and as one column."""
    draw = random.Random(seed)
    whole = column(lengths)
    rows = []
    for row in whole.rows():
        cut = draw.randint(0, len(row))
        rows.append((row[:cut].numpy(), row[cut:].numpy()))
    return Joined(rows, whole.lengths, torch.empty(0)), whole


@pytest.mark.parametrize("seed", range(5))
def test_rows_that_lie_apart_are_the_column_that_they_make(seed: int) -> None:
    draw = random.Random(seed)
    apart, whole = lazy([draw.randint(0, 9) for _ in range(20)], seed)
    order = draw.sample(range(20), 12)
    assert_equal(apart.select(order).select(range(3, 9)), whole.select(order).select(range(3, 9)))
    assert_equal(apart.select([]), whole.select([]))
    assert_equal(pickle.loads(pickle.dumps(apart.select(order))), whole.select(order))
    assert torch.equal(apart.row_sums(), whole.row_sums())
    assert apart.mean() == pytest.approx(float(whole.values.mean()))
    for size in (1, 7, 1000):
        pairs = list(zip(apart.chunks(size), whole.chunks(size), strict=True))
        assert all(torch.equal(a, b) for a, b in pairs)
        assert torch.equal(torch.cat([a for a, _ in pairs]), whole.values)


@pytest.mark.parametrize("kind", [Repeated, AtEnd])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bool])
def test_a_number_a_row_stands_for_the_column_that_it_makes(
    kind: type[ByRow], dtype: torch.dtype
) -> None:
    lengths = torch.tensor([3, 0, 1, 2])
    short = kind(torch.tensor([2.0, 5.0, 0.0, 7.0]).to(dtype), lengths)
    whole = Ragged(short.values, lengths)
    assert whole.values.dtype == dtype
    assert torch.equal(short.row_sums(torch.float64), whole.row_sums(torch.float64))
    assert_equal(short.select([3, 1, 0]), whole.select([3, 1, 0]))
    assert_equal(short.to(torch.device("cpu")), whole)
    assert torch.equal(torch.cat(list(short.chunks(2))), whole.values)
    sent = pickle.loads(pickle.dumps(short))
    assert type(sent) is kind
    assert_equal(sent, whole)
    assert len(pickle.dumps(kind(torch.zeros(4), 10**6 + lengths))) < 2000


def test_a_number_for_each_row_is_needed() -> None:
    with pytest.raises(ValueError, match="1 numbers for 2 rows"):
        Repeated(torch.ones(1), torch.tensor([1, 2]))


def test_sums_of_bfloat16_rows_and_of_empty_ones() -> None:
    assert column([2, 0, 3]).row_sums().tolist() == [1.0, 0.0, 9.0]
    apart = column([2, 0, 3], torch.bfloat16).select([2, 0])
    assert_equal(apart, Ragged.from_rows([apart.rows()[0], apart.rows()[1]]))
    assert apart.values.tolist() == [2.0, 3.0, 4.0, 0.0, 1.0]


def test_rows_of_another_width_keep_their_numbers() -> None:
    rows = [(np.array([5, 6], np.int32), np.array([7], np.int64)), (np.array([8], np.int64),)]
    column = Joined(rows, torch.tensor([3, 1]), torch.empty(0, dtype=torch.int32))
    assert column.values.dtype == torch.int32 and column.values.tolist() == [5, 6, 7, 8]
    with pytest.raises(TypeError, match="same_kind"):
        _ = Joined([(np.array([0.5]),)], torch.tensor([1]), column.values).values


@pytest.mark.parametrize("rows", [[], [0], [0, 0]])
def test_a_part_without_rows_or_tokens_arrives_as_it_was_sent(rows: list[int]) -> None:
    lengths = torch.tensor(rows, dtype=torch.int64)
    numbers = torch.ones(len(rows))
    sequences = Sequences(Ragged(torch.empty(0, dtype=torch.int32), lengths), lengths)
    column = Ragged(torch.empty(0), lengths)
    for sent in (sequences, column, Repeated(numbers, lengths)):
        found = pack(sent).unpack()
        assert len(found) == len(rows)
        tokens = found.tokens if isinstance(found, Sequences) else found
        assert torch.equal(tokens.lengths, lengths) and tokens.values.dtype in (
            torch.int32,
            torch.float32,
        )
