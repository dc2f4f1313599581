"""Who holds what, read from layouts for pictures: layers, shards, slices, and words for ranks."""

from __future__ import annotations

import difflib
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

from mrl.resharding.estimate import stage_of
from mrl.resharding.layout import Box, Layout, whole
from mrl.resharding.megatron import MegatronLayout
from mrl.resharding.report import ReshardReport

_LAYER = re.compile(r"\.layers\.(\d+)\.")


def layer_of(tensor: str) -> int | None:
    """Give the layer in a checkpoint name, None for embeddings, final norm and head."""
    found = _LAYER.search(tensor)
    return int(found[1]) if found else None


def expert_rank(source: MegatronLayout, rank: int) -> int:
    """Give a trainer rank's place in its expert-parallel group."""
    return (rank - source.first_rank) % source.stage_size // source.expert_tp % source.ep


def replica_and_shard(report: ReshardReport, rank: int) -> tuple[int, int]:
    """Give an engine rank's replica and its shard in it."""
    return divmod(report.slots[rank - report.target.first_rank], report.target.tp)


def stages(report: ReshardReport) -> list[str]:
    """Say what each pipeline stage holds, e.g. `embed_tokens, layers 0-19`."""
    layers: list[set[int]] = [set() for _ in range(report.source.pp)]
    others: list[dict[str, None]] = [{} for _ in range(report.source.pp)]
    for piece in report.plan.src.pieces:
        stage, layer = stage_of(report.source, piece.ranks[0]), layer_of(piece.tensor)
        if layer is None:
            name = piece.tensor.removeprefix("model.").removesuffix(".weight")
            others[stage][name] = None
        else:
            layers[stage].add(layer)
    return [
        ", ".join([*names, f"layers {span(sorted(held))}"] if held else names)
        for names, held in zip(others, layers, strict=True)
    ]


def shown_tensor(report: ReshardReport, name: str | None) -> str:
    """Resolve the tensor to draw; None: the first of a layer that is cut on either side."""
    tensors = report.plan.src.tensors
    if name is None:
        inner = [tensor for tensor in tensors if layer_of(tensor) is not None]
        cut = {
            piece.tensor
            for layout in (report.plan.src, report.plan.dst)
            for piece in layout.pieces
            if piece.box != whole(tensors[piece.tensor].shape)
        }
        return next((tensor for tensor in inner if tensor in cut), inner[0])
    if name not in tensors:
        close = difflib.get_close_matches(name, tensors, n=3, cutoff=0.0)
        raise ValueError(f"--tensor {name}: the model has none such; nearest: {', '.join(close)}")
    return name


def held_boxes(layout: Layout, tensor: str) -> Mapping[int, Sequence[Box]]:
    """Map each rank to the boxes of a tensor that it holds."""
    held: dict[int, set[Box]] = defaultdict(set)
    for piece in layout.pieces:
        if piece.tensor == tensor:
            for rank in piece.ranks:
                held[rank].add(piece.box)
    return {rank: sorted(boxes) for rank, boxes in sorted(held.items())}


def cut_dim(layout: Layout, tensor: str) -> int:
    """Give the first dimension along which a tensor is cut; 0 where it is whole."""
    full = whole(layout.tensors[tensor].shape)
    boxes = [piece.box for piece in layout.pieces if piece.tensor == tensor]
    return next((dim for dim, ends in enumerate(full) if any(b[dim] != ends for b in boxes)), 0)


def extents_of(boxes: Iterable[Box], dim: int) -> tuple[tuple[int, int], ...]:
    """Join the ranges of boxes along one dimension, ascending."""
    joined: list[tuple[int, int]] = []
    for start, stop in sorted(box[dim] for box in boxes):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(stop, joined[-1][1]))
        else:
            joined.append((start, stop))
    return tuple(joined)


def span(numbers: Sequence[int]) -> str:
    """Write ascending integers briefly: `0-7`, `0, 8 .. 56`, `0-9, 40-49`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    if len(runs) > 2 and all(run[1] - run[0] == runs[0][1] - runs[0][0] for run in runs):
        steps = {later[0] - run[0] for run, later in pairwise(runs)}
        if len(steps) == 1:
            return f"{_run(runs[0])}, {_run(runs[1])} .. {_run(runs[-1])}"
    return ", ".join(map(_run, runs))


def _run(run: Sequence[int]) -> str:
    return str(run[0]) if run[0] == run[1] else f"{run[0]}-{run[1]}"
