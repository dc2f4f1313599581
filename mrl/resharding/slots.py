"""Which place in the engine each rank takes, so that the bytes to move are the fewest.

An engine's replicas are alike and its ranks are told their place when they start, so the shards
can be dealt to the ranks that already hold most of them (HybridFlow's strided groups, arXiv
2409.19256, are the special case of layouts that divide each other).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from mrl.resharding.gate import check_layouts
from mrl.resharding.geometry import geometries
from mrl.resharding.layout import Layout, num_rows


def choose_slots(src: Layout, engine: Layout, tp: int) -> tuple[int, ...]:
    """Choose the engine slot (replica * tp + tp rank) of each engine rank, ranks ascending.

    `engine` is the engine's layout with slot i on its i-th rank; `tp` ranks make a replica. A
    replica stays on its node where nodes hold whole replicas, else on the fewest neighbouring
    nodes that do; there the received bytes are the least possible. Ranks keep the slot that they
    have where another would save nothing. Raises ValueError where `tp` does not divide the ranks,
    or as `plan` does.
    """
    ranks = engine.ranks
    if len(ranks) % tp:
        raise ValueError(f"{engine.name}: {len(ranks)} ranks are no whole replicas of tp {tp}")
    held = held_bytes(src, engine)
    slots = list(range(len(ranks)))
    for group in _groups(ranks, {**src.node_of_rank, **engine.node_of_rank}, tp):
        for index, slot in zip(group, _assign(held[np.ix_(group, group)]), strict=True):
            slots[index] = group[slot]
    return tuple(slots)


def held_bytes(src: Layout, engine: Layout) -> npt.NDArray[np.int64]:
    """Count the bytes that engine rank i holds as trainer of what engine rank j needs: [i, j]."""
    check_layouts(src, engine)
    index = {rank: i for i, rank in enumerate(engine.ranks)}
    held = np.zeros((len(index), len(index)), np.int64)
    for geometry in geometries(src, engine):
        for cell in geometry.cells:
            size = geometry.row_bytes(cell) * num_rows(cell.box) * len(geometry.tensors)
            holders = [index[rank] for rank in cell.holders if rank in index]
            times = Counter(index[rank] for rank, _ in cell.takers)
            takers, counts = list(times), np.array(list(times.values()), np.int64)
            held[np.ix_(holders, takers)] += size * counts
    return held


def _groups(ranks: Sequence[int], node_of_rank: Mapping[int, int], tp: int) -> list[list[int]]:
    """Gather the indices of ranks, node by node, into groups that hold whole replicas."""
    by_node: dict[int, list[int]] = defaultdict(list)
    for index, rank in enumerate(ranks):
        by_node[node_of_rank.get(rank, 0)].append(index)
    groups: list[list[int]] = [[]]
    for indices in by_node.values():
        if len(groups[-1]) % tp == 0 and groups[-1]:
            groups.append([])
        groups[-1] += indices
    return groups


def _assign(held: npt.NDArray[np.int64]) -> list[int]:
    from scipy.optimize import linear_sum_assignment

    # a slot of one's own counts less than one byte; float64 is exact up to 2^53
    count = len(held)
    value = held.astype(np.float64) * (count + 1) + np.eye(count)
    return [int(slot) for slot in linear_sum_assignment(value, maximize=True)[1]]
