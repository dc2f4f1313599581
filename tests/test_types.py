from __future__ import annotations

import pickle
import random

import pytest
import torch

from mrl.types import Ragged


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
