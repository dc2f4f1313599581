"""Tensors that two layouts cut alike, and the cells into which their pieces cut them.

The layers of a pipeline stage share boxes and ranks, so a plan is worked out once for all of
them: a 70B model on 512 ranks has 723 tensors and some thirty geometries.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from mrl.resharding.gate import brief
from mrl.resharding.layout import Box, Layout, Piece, intersect, num_rows, subtract, volume, whole


@dataclass(frozen=True, slots=True)
class Cell:
    """A box that no piece of either layout cuts, and the pieces that contain it.

    A piece is named by its place among the pieces of its tensor.
    """

    box: Box
    holders: Mapping[int, int]  # rank: source piece, ranks ascending
    takers: tuple[tuple[int, int], ...]  # (rank, destination piece), ascending


@dataclass(frozen=True, slots=True)
class Geometry:
    """Tensors of one element size whose pieces have the same boxes and ranks in both layouts."""

    tensors: tuple[str, ...]
    places: tuple[int, ...]  # of the tensors in model order
    src: tuple[tuple[Piece, ...], ...]  # pieces of each tensor
    dst: tuple[tuple[Piece, ...], ...]
    item_bytes: int  # in the destination
    cells: tuple[Cell, ...]

    def row_bytes(self, cell: Cell) -> int:
        """Give the bytes of one row of a cell of one tensor."""
        return volume(cell.box) // num_rows(cell.box) * self.item_bytes


def geometries(src: Layout, dst: Layout) -> list[Geometry]:
    """Group the tensors of two layouts that hold the same ones, and cut each group into cells.

    Raises ValueError naming tensor, box and ranks where an element is needed and nobody holds it,
    or is held and nobody takes it.
    """
    sources, targets = _by_tensor(src), _by_tensor(dst)
    numbers: dict[tuple[int, ...], int] = {}  # of rank tuples: cheaper to compare

    def cut(pieces: Sequence[Piece]) -> Hashable:
        return tuple((p.box, numbers.setdefault(p.ranks, len(numbers))) for p in pieces)

    groups: dict[Hashable, list[int]] = defaultdict(list)
    names = list(dst.tensors)
    for place, name in enumerate(names):
        info = dst.tensors[name]
        key = (info.shape, info.item_bytes, cut(sources[name]), cut(targets[name]))
        groups[key].append(place)
    found = []
    for places in groups.values():
        tensors = tuple(names[place] for place in places)
        info = dst.tensors[tensors[0]]
        cells = _cells(info.shape, sources[tensors[0]], targets[tensors[0]])
        _check_covered(tensors[0], cells, src, dst)
        found.append(
            Geometry(
                tensors,
                tuple(places),
                tuple(tuple(sources[name]) for name in tensors),
                tuple(tuple(targets[name]) for name in tensors),
                info.item_bytes,
                cells,
            )
        )
    return found


def _by_tensor(layout: Layout) -> Mapping[str, list[Piece]]:
    pieces: dict[str, list[Piece]] = {name: [] for name in layout.tensors}
    for piece in layout.pieces:
        pieces[piece.tensor].append(piece)
    return pieces


def _cells(shape: Sequence[int], src: Sequence[Piece], dst: Sequence[Piece]) -> tuple[Cell, ...]:
    sources, targets = _by_box(src), _by_box(dst)
    parts: list[tuple[Box, list[Box]]] = [(whole(shape), [])]  # each with the boxes around it
    for box in dict.fromkeys((*sources, *targets)):
        refined: list[tuple[Box, list[Box]]] = []
        for part, around in parts:
            common = intersect(part, box)
            if common is None:
                refined.append((part, around))
            else:
                refined.append((common, [*around, box]))
                refined.extend((rest, around) for rest in subtract(part, box))
        parts = refined
    return tuple(
        Cell(part, _holders(sources, around), _takers(targets, around))
        for part, around in sorted(parts, key=lambda item: item[0])
    )


def _by_box(pieces: Iterable[Piece]) -> dict[Box, list[tuple[int, Piece]]]:
    boxes: dict[Box, list[tuple[int, Piece]]] = defaultdict(list)
    for index, piece in enumerate(pieces):
        boxes[piece.box].append((index, piece))
    return boxes


def _holders(
    sources: Mapping[Box, list[tuple[int, Piece]]], around: Sequence[Box]
) -> dict[int, int]:
    held: dict[int, int] = {}
    for box in around:
        for index, piece in sources.get(box, ()):
            for rank in piece.ranks:
                held.setdefault(rank, index)  # a rank that holds it twice reads the first
    return dict(sorted(held.items()))


def _takers(
    targets: Mapping[Box, list[tuple[int, Piece]]], around: Sequence[Box]
) -> tuple[tuple[int, int], ...]:
    return tuple(
        sorted(
            (rank, index)
            for box in around
            for index, piece in targets.get(box, ())
            for rank in piece.ranks
        )
    )


def _check_covered(tensor: str, cells: Iterable[Cell], src: Layout, dst: Layout) -> None:
    for cell in cells:
        if not cell.takers:
            raise ValueError(f"{dst.name}: no rank holds {tensor}{cell.box}")
        if not cell.holders:
            ranks = sorted({rank for rank, _ in cell.takers})
            raise ValueError(
                f"{tensor}{cell.box}: needed by ranks {brief(ranks)} of {dst.name}, "
                f"no rank of {src.name} holds it"
            )
