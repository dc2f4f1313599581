"""Which boxes of a checkpoint's keys the parameters of a rank are, whatever its layout."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from mrl.resharding.layout import Box, Layout, intersect, translate, whole
from mrl.resharding.torch_dist import Part, Slab


@dataclass(frozen=True, slots=True)
class Place:
    """A box of a parameter, and the box of a slab that it is."""

    local: Box
    slab: Slab
    box: Box  # same extents as `local`
    holder: int  # the first of all ranks that hold it


Places = Mapping[str, Sequence[Place]]  # by the parameter's name on this rank


def alone(key: str, shape: Sequence[int]) -> Slab:
    """Give the slab of a tensor that has a key of its own."""
    box = whole(shape)
    return Slab(key, (), (), tuple(shape), (Part(key, box, box),), (box,))


def places(layout: Layout, slabs: Sequence[Slab], rank: int) -> dict[str, list[Place]]:
    """Find the places of everything that `rank` holds of a layout.

    Of a parameter that has two keys the first counts. Neighbours are one place.
    """
    parts: dict[str, list[tuple[Slab, Part]]] = {}
    taken: set[tuple[str, Box]] = set()
    for slab in slabs:
        for part in slab.parts:
            if (part.tensor, part.box) not in taken:
                taken.add((part.tensor, part.box))
                parts.setdefault(part.tensor, []).append((slab, part))
    holders: dict[tuple[str, Box], int] = {}
    for piece in layout.pieces:  # a tied embedding has two
        held = (piece.tensor, piece.box)
        holders[held] = min(piece.ranks[0], holders.get(held, piece.ranks[0]))
    found: dict[str, list[Place]] = {}
    for piece in layout.pieces_of(rank):
        for slab, part in parts[piece.tensor]:
            common = intersect(piece.box, part.box)
            if common is not None:
                local = translate(common, piece.box, piece.local)
                box = translate(common, part.box, part.local)
                holder = holders[piece.tensor, piece.box]
                found.setdefault(piece.param, []).append(Place(local, slab, box, holder))
    return {param: list(_joined(own)) for param, own in found.items()}


def flat_boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """Cut the range [start, stop) of a tensor's elements, in order, into boxes."""
    if len(shape) <= 1:
        if start < stop:
            yield ((start, stop),) if shape else ()
        return
    rows, inner = list(shape[1:]), math.prod(shape[1:])
    (first, low), (last, high) = divmod(start, inner), divmod(stop, inner)
    if first == last:
        yield from (((first, first + 1), *box) for box in flat_boxes(rows, low, high))
        return
    if low:
        yield from (((first, first + 1), *box) for box in flat_boxes(rows, low, inner))
        first += 1
    if first < last:
        yield ((first, last), *whole(rows))
    yield from (((last, last + 1), *box) for box in flat_boxes(rows, 0, high))


def _joined(own: list[Place]) -> Iterator[Place]:
    """Join places that follow each other in the parameter as in their slab."""
    last: Place | None = None
    for place in sorted(own, key=lambda place: place.local):
        if last is not None and _continues(last, place):
            last = replace(last, local=_spanned(last.local, place.local),
                           box=_spanned(last.box, place.box))  # fmt: skip
            continue
        if last is not None:
            yield last
        last = place
    if last is not None:
        yield last


def _continues(one: Place, other: Place) -> bool:
    return (
        one.slab is other.slab
        and one.holder == other.holder
        and one.local[1:] == other.local[1:]
        and one.box[1:] == other.box[1:]
        and one.local[0][1] == other.local[0][0]
        and one.box[0][1] == other.box[0][0]
    )


def _spanned(one: Box, other: Box) -> Box:
    return ((one[0][0], other[0][1]), *one[1:])
