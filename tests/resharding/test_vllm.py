from __future__ import annotations

import pytest
import torch
from torch import nn

from mrl.resharding import Layout, Piece
from mrl.resharding.coverage import padding_of
from mrl.resharding.vllm import addresses, check_addresses, live_params, trace
from tests.resharding.closed_form import tensor_info


class Loader(nn.Module):
    """A module that loads two stacked shards, a column slice and a padded vocabulary."""

    def __init__(self):
        super().__init__()
        self.stacked = nn.Parameter(torch.full((6, 4), 7.0))
        self.sliced = nn.Parameter(torch.full((3, 2), 7.0))
        self.experts = nn.Parameter(torch.full((2, 3, 4), 7.0))
        self.vocab = nn.Parameter(torch.full((8, 1), 7.0))

    def load_weights(self, weights):
        for name, weight in weights:
            if name == "a":
                self.stacked.data.narrow(0, 0, 2).copy_(weight.narrow(0, 2, 2))
            elif name == "b":
                self.stacked.data[2:].copy_(weight[4:])
            elif name == "c":
                self.sliced.data.copy_(weight[:, 2:4])
            elif name in ("e0", "e1"):
                self.experts.data[int(name[1])].copy_(weight)
            elif name == "v":
                self.vocab[:5].data.copy_(weight)
                self.vocab[5:].data.fill_(0)
            elif name == "t":
                self.sliced.data.copy_(weight.t())


SOURCES = {
    "a": tensor_info(4, 4),
    "b": tensor_info(8, 4),
    "c": tensor_info(3, 4),
    "v": tensor_info(5, 1),
}


def test_a_trace_records_every_copy_and_writes_nothing():
    model = Loader()
    pieces = trace(model, SOURCES, rank=3)
    assert pieces == [
        Piece("a", ((2, 4), (0, 4)), (3,), "stacked", ((0, 2), (0, 4))),
        Piece("b", ((4, 8), (0, 4)), (3,), "stacked", ((2, 6), (0, 4))),
        Piece("c", ((0, 3), (2, 4)), (3,), "sliced", ((0, 3), (0, 2))),
        Piece("v", ((0, 5), (0, 1)), (3,), "vocab", ((0, 5), (0, 1))),
    ]
    assert all((param == 7).all() for param in model.parameters())  # nor the padding
    layout = Layout("vllm", SOURCES, tuple(pieces), padded=frozenset({"v"}))
    params = {name: p for name, p in live_params(model).items() if name != "experts"}
    assert [view.shape for view in padding_of(layout, 3, params)] == [(3, 1)]


def test_a_copy_that_is_no_box_is_refused():
    with pytest.raises(ValueError, match="no box of a known source"):
        trace(Loader(), {"t": tensor_info(2, 3)}, 0)


def test_a_stack_of_experts_is_a_matrix_of_their_rows():
    model = Loader()
    pieces = trace(model, {"e1": tensor_info(3, 4), "e0": tensor_info(3, 4)}, 0)
    whole = ((0, 3), (0, 4))
    assert pieces == [
        Piece("e1", whole, (0,), "experts", ((3, 6), (0, 4))),
        Piece("e0", whole, (0,), "experts", whole),
    ]
    live_params(model)["experts"][3:].fill_(1)
    assert (model.experts[1] == 1).all() and (model.experts[0] == 7).all()


def test_what_the_engine_derives_is_no_parameter_to_write():
    model = Loader()
    model.W_UV = nn.Parameter(torch.ones(2))
    assert "W_UV" not in live_params(model)
    assert "W_UV" in addresses(model)


def test_a_tensor_that_moved_is_named():
    model = Loader()
    model.register_buffer("table", torch.zeros(2))
    model.plain = torch.zeros(3)
    before = addresses(model)
    check_addresses(model, before)
    model.plain = torch.zeros(3)
    model.sliced.data = torch.zeros(3, 2)
    with pytest.raises(RuntimeError, match="took them: sliced, plain"):
        check_addresses(model, before)


def test_repacked_parameters_are_refused_with_the_remedy():
    model = Loader()
    model.sliced.data = torch.empty(0)
    with pytest.raises(ValueError, match=r"sliced; on CPU set vllm\._custom_ops"):
        live_params(model)
