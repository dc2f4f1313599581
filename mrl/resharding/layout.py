"""Where each element of a model lives: logical tensors, and the pieces of them that ranks hold.

A *logical tensor* is a Hugging Face checkpoint tensor. A *piece* is a box of one, kept by a rank
in a box of one of its own parameters. Checkpoint files, Megatron partitions and vLLM shards are
all lists of pieces, so that one planner serves loading, export and rollout sync.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

Box = tuple[tuple[int, int], ...]  # half-open range of each dimension

FILE_RANK = -1  # the "rank" that holds checkpoint files: every process can read it

DTYPE_BYTES: Mapping[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Shape and element type (a key of `DTYPE_BYTES`) of a logical tensor."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def item_bytes(self) -> int:
        """Give the bytes of one element."""
        return DTYPE_BYTES[self.dtype]

    @property
    def num_bytes(self) -> int:
        """Give the bytes of the whole tensor."""
        return math.prod(self.shape) * self.item_bytes


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of logical `tensor`, held by each of `ranks` in the box `local` of its `param`."""

    tensor: str
    box: Box
    ranks: tuple[int, ...]  # ascending
    param: str
    local: Box  # same extents as `box`


@dataclass(frozen=True)
class Layout:
    """One placement of a model.

    A parameter that holds a tensor of `padded` may have further elements, of no piece.
    """

    name: str
    tensors: Mapping[str, TensorInfo]
    pieces: tuple[Piece, ...]
    node_of_rank: Mapping[int, int] = field(default_factory=dict)  # absent: node 0
    padded: frozenset[str] = frozenset()  # logical tensors

    @property
    def ranks(self) -> tuple[int, ...]:
        """List the ranks that hold something, ascending."""
        return tuple(sorted(self._by_rank))

    def pieces_of(self, rank: int) -> tuple[Piece, ...]:
        """List what one rank holds."""
        return tuple(self._by_rank.get(rank, ()))

    @cached_property
    def _by_rank(self) -> Mapping[int, list[Piece]]:
        pieces: dict[int, list[Piece]] = {}
        for piece in self.pieces:
            for rank in piece.ranks:
                pieces.setdefault(rank, []).append(piece)
        return pieces

    def restrict(self, names: Collection[str]) -> Layout:
        """Keep some tensors only; their parameters may then hold elements of others."""
        return Layout(
            self.name,
            {name: info for name, info in self.tensors.items() if name in names},
            tuple(piece for piece in self.pieces if piece.tensor in names),
            self.node_of_rank,
            frozenset(names),
        )


def whole(shape: Sequence[int]) -> Box:
    """Give the box of a full tensor."""
    return tuple((0, extent) for extent in shape)


def volume(box: Box) -> int:
    """Count the elements of a box."""
    count = 1
    for start, stop in box:
        count *= stop - start
    return count


def intersect(a: Box, b: Box) -> Box | None:
    """Give the common box, or None where there is none."""
    common = []
    for (a_start, a_stop), (b_start, b_stop) in zip(a, b, strict=True):
        start = a_start if a_start > b_start else b_start
        stop = a_stop if a_stop < b_stop else b_stop
        if start >= stop:
            return None
        common.append((start, stop))
    return tuple(common)


def take_rows(box: Box, start: int, stop: int) -> Box:
    """Give rows [start, stop) of a box, counted from its first row (a scalar is one row)."""
    if not box:
        return box
    first = box[0][0]
    return ((first + start, first + stop), *box[1:])


def num_rows(box: Box) -> int:
    """Count the rows of a box: its extent along the first dimension."""
    return box[0][1] - box[0][0] if box else 1


def subtract(box: Box, hole: Box) -> Iterator[Box]:
    """Yield disjoint boxes that make up `box` without `hole`."""
    common = intersect(box, hole)
    if common is None:
        yield box
        return
    rest = list(box)
    for dim, ((start, stop), (low, high)) in enumerate(zip(box, common, strict=True)):
        for side in ((start, low), (high, stop)):
            if side[0] < side[1]:
                yield (*rest[:dim], side, *box[dim + 1 :])
        rest[dim] = (low, high)


def subtract_all(box: Box, holes: Sequence[Box]) -> list[Box]:
    """List disjoint boxes that make up `box` without any of `holes`."""
    remaining = [box]
    for hole in holes:
        remaining = [part for piece in remaining for part in subtract(piece, hole)]
    return remaining


def translate(box: Box, outer: Box, local: Box) -> Box:
    """Move `box`, which lies inside `outer`, to where `local` puts `outer`."""
    return tuple(
        (start - base + target, stop - base + target)
        for (start, stop), (base, _), (target, _) in zip(box, outer, local, strict=True)
    )


def nodes(world_size: int, ranks_per_node: int) -> dict[int, int]:
    """Map each rank to its node when ranks fill nodes in order."""
    return {rank: rank // ranks_per_node for rank in range(world_size)}


def join(parts: Iterable[Layout], node_of_rank: Mapping[int, int]) -> Layout:
    """Make one layout of what each rank says of itself; equal pieces become one of many ranks.

    A rank that holds nothing has an empty layout. Raises ValueError where ranks hold a tensor in
    different shapes or dtypes.
    """
    tensors: dict[str, TensorInfo] = {}
    holders: dict[tuple[str, Box, str, Box], list[int]] = {}
    padded: set[str] = set()
    name = ""
    for part in parts:
        name = name or (part.name if part.pieces else "")
        padded |= part.padded
        for tensor, info in part.tensors.items():
            if tensors.setdefault(tensor, info) != info:
                raise ValueError(
                    f"ranks hold {tensor} as {tensors[tensor]} and as {info}: expected one"
                )
        for piece in part.pieces:
            key = (piece.tensor, piece.box, piece.param, piece.local)
            holders.setdefault(key, []).extend(piece.ranks)
    pieces = tuple(
        Piece(tensor, box, tuple(sorted(ranks)), param, local)
        for (tensor, box, param, local), ranks in holders.items()
    )
    return Layout(name, tensors, pieces, node_of_rank, frozenset(padded))
