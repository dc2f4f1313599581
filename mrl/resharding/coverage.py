"""Whether live parameters and a layout agree: nothing missing, nothing unknown, all covered."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from torch import Tensor

from mrl.resharding.layout import Box, Layout, intersect, subtract_all, whole


def view_of(param: Tensor, box: Box) -> Tensor:
    """Give the view of a box of a parameter."""
    view = param.detach()
    for dim, (start, stop) in enumerate(box):
        if stop - start != view.shape[dim]:
            view = view.narrow(dim, start, stop - start)
    return view


def padding_of(layout: Layout, rank: int, params: Mapping[str, Tensor]) -> list[Tensor]:
    """Give views of the elements of a rank's parameters that belong to no logical tensor.

    Raises ValueError listing parameters that the layout does not know, parameters that it expects
    and that are absent, boxes outside a parameter, and uncovered elements other than padding.
    """
    boxes: dict[str, list[Box]] = defaultdict(list)
    may_pad: set[str] = set()
    known: set[str] = set()
    for piece in layout.pieces:
        known.add(piece.param)
        if piece.tensor in layout.padded:
            may_pad.add(piece.param)
        if rank in piece.ranks:
            boxes[piece.param].append(piece.local)
    problems = [f"parameter {name} is not in the layout" for name in params if name not in known]
    problems += [f"parameter {name} is absent" for name in boxes if name not in params]
    padding = []
    for name in sorted(params.keys() & known):
        full = whole(params[name].shape)
        if any(len(box) != len(full) or intersect(box, full) != box for box in boxes[name]):
            problems.append(f"parameter {name} {full} is smaller than its pieces {boxes[name]}")
            continue
        uncovered = subtract_all(full, boxes[name])
        if uncovered and name not in may_pad:
            problems.append(f"nothing covers {name}{uncovered[0]}")
        padding += [view_of(params[name], box) for box in uncovered]
    if problems:
        raise ValueError(f"rank {rank}, layout {layout.name}: " + "; ".join(problems))
    return padding
