"""How Megatron-Core cuts one parameter over tensor-parallel ranks.

Rules read from megatron-core 0.19: `transformer/attention.py` (fused QKV, interleaved by query
group), `transformer/mlp.py` (gated fc1 is [gate; up] inside each TP shard), `tensor_parallel/
layers.py` (padded vocabulary), `models/gpt/gpt_layer_specs.py` (latent attention's down
projections are cut in the local specification and whole with Transformer Engine).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from mrl.resharding.layout import Box, whole

Shape = tuple[int, ...]
Boxes = Iterator[tuple[int, Box, Box]]  # index of the logical tensor, its box, the local box


@dataclass(frozen=True, slots=True)
class Shard:
    """Which share of a parameter is meant, and the numbers that some cuts need."""

    rank: int
    size: int
    num_kv_heads: int
    head_dim: int
    padded_vocab: int
    down_is_cut: bool  # of latent attention

    def span(self, extent: int) -> tuple[int, int]:
        """Give this rank's range of an extent that divides evenly."""
        count = extent // self.size
        return self.rank * count, (self.rank + 1) * count


def _replicated(shard: Shard, shapes: Sequence[Shape]) -> Boxes:
    yield 0, whole(shapes[0]), whole(shapes[0])


def _column(shard: Shard, shapes: Sequence[Shape]) -> Boxes:
    (rows, *inner) = shapes[0]
    start, stop = shard.span(rows)
    yield 0, ((start, stop), *whole(inner)), ((0, stop - start), *whole(inner))


def _row(shard: Shard, shapes: Sequence[Shape]) -> Boxes:
    rows, columns = shapes[0]
    start, stop = shard.span(columns)
    yield 0, ((0, rows), (start, stop)), ((0, rows), (0, stop - start))


def _vocab(shard: Shard, shapes: Sequence[Shape]) -> Boxes:
    (rows, *inner) = shapes[0]
    first, last = shard.span(shard.padded_vocab)
    start, stop = first, min(last, rows)
    if start < stop:
        yield 0, ((start, stop), *whole(inner)), ((0, stop - start), *whole(inner))


def _gated(shard: Shard, shapes: Sequence[Shape]) -> Boxes:
    for index, (rows, *inner) in enumerate(shapes):  # gate, up
        start, stop = shard.span(rows)
        count = stop - start
        local = (index * count, (index + 1) * count)
        yield index, ((start, stop), *whole(inner)), (local, *whole(inner))


def _fused_gated(shard: Shard, shapes: Sequence[Shape]) -> Boxes:
    """Cut a checkpoint tensor that stacks gate and up itself."""
    (rows, *inner) = shapes[0]
    half = rows // 2
    for index, (start, stop), local in (
        (part, box[0], local[0]) for part, box, local in _gated(shard, [(half, *inner)] * 2)
    ):
        shift = index * half
        yield 0, ((start + shift, stop + shift), *whole(inner)), (local, *whole(inner))


def _qkv(shard: Shard, shapes: Sequence[Shape]) -> Boxes:
    """Cut the fused rows: each KV head's group stacks its query heads, its key and its value.

    With fewer KV heads than TP ranks the cut is by plain rows and may fall inside a group.
    """
    segments = (shapes[0][0] // shard.num_kv_heads, shard.head_dim, shard.head_dim)
    first, last = shard.span(shard.num_kv_heads * sum(segments))
    row = 0  # in the fused parameter over all TP ranks
    for group in range(shard.num_kv_heads):
        for index, rows in enumerate(segments):
            start, stop = max(row, first), min(row + rows, last)
            if start < stop:
                shift = group * rows - row
                rest = whole(shapes[index][1:])
                box = ((start + shift, stop + shift), *rest)
                yield index, box, ((start - first, stop - first), *rest)
            row += rows


def _mla_down(shard: Shard, shapes: Sequence[Shape]) -> Boxes:
    yield from (_column if shard.down_is_cut else _replicated)(shard, shapes)


CUTS: Mapping[str, Callable[[Shard, Sequence[Shape]], Boxes]] = {
    "replicated": _replicated,
    "column": _column,
    "row": _row,
    "vocab": _vocab,
    "gated": _gated,
    "fused_gated": _fused_gated,
    "qkv": _qkv,
    "mla_down": _mla_down,
}
