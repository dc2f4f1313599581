from __future__ import annotations

import pickle

import pytest
import torch

from mrl.types import Sample
from mrl.workers.answers import SampleGroups
from mrl.workers.wire import pack


def sample(uid: str, size: int, text: str, routing: torch.Tensor | None = None) -> Sample:
    log_probs = tuple(-0.25 * k for k in range(size))
    return Sample(uid, (7, 8), tuple(range(size)), log_probs, text, "stop", 3, routing)


GROUPS = [
    (sample("a", 3, "three \u00e9"), sample("a", 0, "")),
    (),
    (sample("b", 40_000, "long \ud800"),),
]


@pytest.mark.parametrize("groups", [GROUPS, [], [()]])
def test_samples_arrive_as_they_were_sent(groups: list[tuple[Sample, ...]]) -> None:
    for found in (
        pickle.loads(pickle.dumps(SampleGroups(groups))),
        pack(SampleGroups(groups)).unpack(),
    ):
        assert list(found) == groups
        assert [[s.text for s in group] for group in found] == [[s.text for s in g] for g in groups]


@pytest.mark.parametrize("known", [(0, 1), (1,), ()])
def test_routing_arrives_where_it_was_reported(known: tuple[int, ...]) -> None:
    routing = [torch.full((2 + k, 2, 1), k) if k in known else None for k in range(2)]
    groups = SampleGroups([tuple(sample("a", k, "", routing[k]) for k in range(2))])
    (found,) = pickle.loads(pickle.dumps(groups))
    for arrived, sent in zip(found, routing, strict=True):
        assert (arrived.routing is None) == (sent is None)
        assert sent is None or torch.equal(arrived.routing, sent)


def test_large_columns_travel_beside_their_pickle() -> None:
    packed = pack(SampleGroups([(sample("a", 40_000, "x" * 100_000),)]))
    assert sorted(array.nbytes for array in packed.arrays) == [100_000, 160_000, 160_000]
    assert len(packed.pickled) < 2000
