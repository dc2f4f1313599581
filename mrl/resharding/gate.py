"""Whether two layouts can be planned at all: same tensors, sound pieces, nothing written twice."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise

from mrl.resharding.layout import Layout, Piece, intersect


def check_layouts(src: Layout, dst: Layout) -> None:
    """Raise ValueError unless `dst` can be filled from `src`, as far as single pieces tell.

    That every element has a source is seen when the boxes are intersected (`geometry`).
    """
    check_same_tensors(src, dst)
    check_pieces(src)
    check_pieces(dst)
    check_written_once(dst)


def check_same_tensors(src: Layout, dst: Layout) -> None:
    """Raise ValueError unless both layouts have the same tensors with the same shapes."""
    only_src = sorted(src.tensors.keys() - dst.tensors.keys())
    only_dst = sorted(dst.tensors.keys() - src.tensors.keys())
    problems = []
    if only_src:
        problems.append(f"only {src.name} has {', '.join(only_src)}")
    if only_dst:
        problems.append(f"only {dst.name} has {', '.join(only_dst)}")
    for name in src.tensors.keys() & dst.tensors.keys():
        a, b = src.tensors[name].shape, dst.tensors[name].shape
        if a != b:
            problems.append(f"{name} is {a} in {src.name} and {b} in {dst.name}")
    if problems:
        raise ValueError(f"plan {src.name} to {dst.name}: " + "; ".join(sorted(problems)))


def check_pieces(layout: Layout) -> None:
    """Raise ValueError for pieces outside their tensor, of unequal extents or without ranks."""
    problems = [
        f"{p.tensor}{p.box} in {p.param}{p.local} of ranks {brief(p.ranks)}: {problem}"
        for p in layout.pieces
        for problem in _problems(layout, p)
    ]
    if problems:
        raise ValueError(f"{layout.name}: " + "; ".join(problems))


def _problems(layout: Layout, piece: Piece) -> Iterator[str]:
    if piece.tensor not in layout.tensors:
        yield "no such tensor"
        return
    shape = layout.tensors[piece.tensor].shape
    if len(piece.box) != len(shape) or not all(
        0 <= start < stop <= extent for (start, stop), extent in zip(piece.box, shape, strict=True)
    ):
        yield f"shape is {shape}"
    if [stop - start for start, stop in piece.box] != [b - a for a, b in piece.local]:
        yield "extents differ"
    ranks = piece.ranks
    if not ranks or any(a >= b for a, b in pairwise(ranks)):
        yield "ranks must be ascending, each once, and at least one"


def check_written_once(layout: Layout) -> None:
    """Raise ValueError where two pieces of a layout share an element of a rank's parameter."""
    by_param: dict[str, dict[tuple[int, ...], list[Piece]]] = defaultdict(dict)
    for piece in layout.pieces:
        by_param[piece.param].setdefault(piece.ranks, []).append(piece)
    for groups in by_param.values():
        ranks = {rank for group in groups for rank in group}
        if len(ranks) < sum(map(len, groups)):  # some rank is in several groups: look at each
            groups = {
                (rank,): [p for group in groups if rank in group for p in groups[group]]
                for rank in sorted(ranks)
            }
        for group, pieces in groups.items():
            _check_disjoint(layout.name, group, pieces)


def _check_disjoint(name: str, ranks: tuple[int, ...], pieces: Sequence[Piece]) -> None:
    open_pieces: list[Piece] = []  # those that reach past the start of the next one
    for piece in sorted(pieces, key=lambda piece: piece.local):
        if piece.local:
            row = piece.local[0][0]
            open_pieces = [other for other in open_pieces if other.local[0][1] > row]
        for other in open_pieces:
            if intersect(piece.local, other.local) is not None:
                raise ValueError(
                    f"{name}: {piece.param} of ranks {brief(ranks)} is written twice: "
                    f"{other.tensor}{other.box} and {piece.tensor}{piece.box} overlap"
                )
        open_pieces.append(piece)


def brief(ranks: Sequence[int]) -> str:
    """Write a list of ranks, the first eight of a long one."""
    shown = ", ".join(map(str, ranks[:8]))
    return shown if len(ranks) <= 8 else f"{shown}, ... ({len(ranks)} in all)"
