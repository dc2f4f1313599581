"""vLLM's placement of a model, in closed form from plain numbers.

What `mrl.resharding.vllm` traces from a live engine, without one: for planning ahead. Rules read
from vLLM 0.26 under `model_executor/layers`: `linear.py` (q, k and v stacked on each rank, KV
heads replicated where TP has more ranks; [gate; up] on each rank), `vocab_parallel_embedding.py`
(padded vocabulary), `fused_moe/expert_map_manager.py` (whole experts on the ranks of an expert
parallel group, the remainder on the first ones).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from mrl.resharding.families import Entry, ModelShape
from mrl.resharding.layout import Box, Layout, Piece, TensorInfo, whole

VOCAB_MULTIPLE = 64  # vocab_parallel_embedding.DEFAULT_VOCAB_PADDING_SIZE

# model type -> dtype that vLLM's model class gives its routers, where it is not the engine's
ROUTER_DTYPES: Mapping[str, str] = {"glm4_moe": "float32"}

Shape = tuple[int, ...]
Cut = Iterator[tuple[int, Box, Box]]  # index of the logical tensor, its box, the local box


@dataclass(frozen=True, slots=True)
class VLLMLayout:
    """Where vLLM's replicas keep their parameters, TP fastest.

    Slot `replica * tp + tp_rank` is on rank `first_rank` + i where `slots[i]` names it. With `ep`
    the TP ranks hold whole experts instead of shards of all. A stack of experts is seen as a
    matrix: the rows of one expert follow those of another. Raises ValueError listing every
    number that does not fit.
    """

    shape: ModelShape
    tp: int
    replicas: int = 1
    ep: bool = False
    dtype: str = "bfloat16"
    first_rank: int = 0
    slots: tuple[int, ...] | None = None  # None: slot i on the i-th rank
    node_of_rank: Mapping[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        problems = list(self._problems())
        if problems:
            raise ValueError("vllm layout: " + "; ".join(problems))

    def _problems(self) -> Iterator[str]:
        shape, tp = self.shape, self.tp
        divided = {"attention heads": shape.num_heads, "vocabulary rows": self.padded_vocab}
        if shape.moe is None or len(shape.moe.layers) < shape.num_layers:
            divided["rows of the feed-forward size"] = shape.ffn_size
        if shape.moe is not None:
            divided["rows of the shared experts"] = shape.moe.shared_ffn_size
            if not self.ep:
                divided["rows of an expert"] = shape.moe.ffn_size
        for what, count in divided.items():
            if count % tp:
                nearest = min(
                    (n for n in range(1, count + 1) if count % n == 0), key=lambda n: abs(n - tp)
                )
                yield f"tp {tp} does not divide {count} {what} (nearest legal {nearest})"
        if shape.num_kv_heads % tp and tp % shape.num_kv_heads:
            yield f"tp {tp} neither divides nor is a multiple of {shape.num_kv_heads} KV heads"
        if self.ep and shape.moe is None:
            yield f"ep is set, but {shape.model_type} has no experts"
        elif self.ep and shape.moe is not None and shape.moe.num_experts < tp:
            yield f"ep over {tp} ranks leaves some without any of {shape.moe.num_experts} experts"
        if self.slots is not None and sorted(self.slots) != list(range(self.world_size)):
            yield f"slots {self.slots} must be a permutation of 0..{self.world_size - 1}"

    @property
    def world_size(self) -> int:
        """Count the ranks of all replicas."""
        return self.tp * self.replicas

    @property
    def padded_vocab(self) -> int:
        """Count the rows of the embedding over the TP ranks of a replica."""
        return -(-self.shape.vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE

    def tensors(self) -> dict[str, TensorInfo]:
        """List the logical tensors with the dtypes that vLLM keeps them in."""
        return self.shape.tensors(
            self.dtype, router_dtype=ROUTER_DTYPES.get(self.shape.model_type, self.dtype)
        )

    def layout(self) -> Layout:
        """Build the layout of all ranks."""
        family = self.shape.family
        padded = frozenset(entry.logical[0].name for entry in (family.embedding, family.lm_head))
        pieces = tuple(self._pieces(self.tensors()))
        return Layout("vllm", self.tensors(), pieces, self.node_of_rank, padded)

    def _pieces(self, tensors: Mapping[str, TensorInfo]) -> Iterator[Piece]:
        ranks = self._ranks_of_shards()
        family, shape = self.shape.family, self.shape
        yield from self._place(family.embedding, ranks, (0,))
        dense = [layer for layer in range(shape.num_layers) if not shape.has_experts(layer)]
        sparse = [layer for layer in range(shape.num_layers) if shape.has_experts(layer)]
        for layers in (dense, sparse):
            if layers:
                for entry in shape.layer_entries(layers[0]):
                    yield from self._place(entry, ranks, layers)
        yield from self._place(family.final_norm, ranks, (0,))
        if family.lm_head.logical[0].name in tensors:
            yield from self._place(family.lm_head, ranks, (0,))

    def _ranks_of_shards(self) -> list[tuple[int, ...]]:
        """List the ranks of each TP rank, over all replicas."""
        slots = self.slots or tuple(range(self.world_size))
        ranks: list[list[int]] = [[] for _ in range(self.tp)]
        for index, slot in enumerate(slots):
            ranks[slot % self.tp].append(self.first_rank + index)
        return [tuple(shard) for shard in ranks]

    def _place(
        self, entry: Entry, ranks: Sequence[tuple[int, ...]], layers: Sequence[int]
    ) -> Iterator[Piece]:
        """Place an entry in each of some layers that are alike; shards held alike share pieces."""
        dims = self.shape.dims
        shapes = [tuple(dims[dim] for dim in tensor.dims) for tensor in entry.logical]
        held: dict[tuple[int, int, Box, Box], list[int]] = {}
        for tp_rank, holders in enumerate(ranks):
            for key in self._shard(entry, tp_rank, shapes):
                held.setdefault(key, []).extend(holders)
        parts: dict[tuple[int, int], list[tuple[Box, Box, tuple[int, ...]]]] = {}
        for (expert, index, box, local), found in held.items():
            parts.setdefault((expert, index), []).append((box, local, tuple(sorted(found))))
        for layer in layers:
            param = entry.engine.format(layer=layer)
            for (expert, index), boxes in parts.items():
                tensor = entry.logical[index].name.format(layer=layer, expert=expert)
                for box, local, at in boxes:
                    yield Piece(tensor, box, at, param, local)

    def _shard(
        self, entry: Entry, tp_rank: int, shapes: Sequence[Shape]
    ) -> Iterator[tuple[int, int, Box, Box]]:
        """Cut an entry for a TP rank: expert, index of the logical tensor, box, local box."""
        cut, dims = ENGINE_CUTS[entry.engine_kind], self.shape.dims
        if not entry.experts:
            before = sum(dims[dim] for dim in entry.engine_after)
            for index, box, local in cut(self, tp_rank, self.tp, shapes):
                yield 0, index, box, _down(local, before)
            return
        first, count = self._experts(tp_rank) if self.ep else (0, dims["experts"])
        rank, size = (0, 1) if self.ep else (tp_rank, self.tp)
        parts = list(cut(self, rank, size, shapes))
        rows = max(local[0][1] for _, _, local in parts)  # of one expert in the stack
        for position in range(count):
            for index, box, local in parts:
                yield first + position, index, box, _down(local, position * rows)

    def _experts(self, ep_rank: int) -> tuple[int, int]:
        """Give the first expert of a rank and how many it holds."""
        share, rest = divmod(self.shape.dims["experts"], self.tp)
        return ep_rank * share + min(ep_rank, rest), share + (ep_rank < rest)


def _down(box: Box, rows: int) -> Box:
    (start, stop), *inner = box
    return ((start + rows, stop + rows), *inner)


def _replicated(layout: VLLMLayout, rank: int, size: int, shapes: Sequence[Shape]) -> Cut:
    yield 0, whole(shapes[0]), whole(shapes[0])


def _even(rank: int, size: int, shape: Shape, dim: int) -> tuple[Box, Box]:
    count = shape[dim] // size
    box, local = list(whole(shape)), list(whole(shape))
    box[dim], local[dim] = (rank * count, (rank + 1) * count), (0, count)
    return tuple(box), tuple(local)


def _column(layout: VLLMLayout, rank: int, size: int, shapes: Sequence[Shape]) -> Cut:
    yield 0, *_even(rank, size, shapes[0], dim=0)


def _row(layout: VLLMLayout, rank: int, size: int, shapes: Sequence[Shape]) -> Cut:
    yield 0, *_even(rank, size, shapes[0], dim=1)


def _vocab(layout: VLLMLayout, rank: int, size: int, shapes: Sequence[Shape]) -> Cut:
    (rows, *inner), count = shapes[0], layout.padded_vocab // size
    start, stop = rank * count, min((rank + 1) * count, rows)
    if start < stop:
        rest = whole(inner)
        yield 0, ((start, stop), *rest), ((0, stop - start), *rest)


def _gated(layout: VLLMLayout, rank: int, size: int, shapes: Sequence[Shape]) -> Cut:
    for index, shape in enumerate(shapes):  # gate, up
        box, local = _even(rank, size, shape, dim=0)
        yield index, box, _down(local, index * (shape[0] // size))


def _fused_gated(layout: VLLMLayout, rank: int, size: int, shapes: Sequence[Shape]) -> Cut:
    (rows, *inner), count = shapes[0], shapes[0][0] // 2 // size
    for half in range(2):  # gate, up: halves of one tensor
        start, rest = half * (rows // 2) + rank * count, whole(inner)
        yield 0, ((start, start + count), *rest), ((half * count, (half + 1) * count), *rest)


def _qkv(layout: VLLMLayout, rank: int, size: int, shapes: Sequence[Shape]) -> Cut:
    row = 0
    for index, shape in enumerate(shapes):  # q, k, v
        heads = shape[0] // layout.shape.head_dim
        shards = min(size, heads)  # fewer heads than ranks: each goes to size // heads ranks
        box, local = _even(rank * shards // size, shards, shape, dim=0)
        yield index, box, _down(local, row)
        row += local[0][1]


ENGINE_CUTS: Mapping[str, Callable[[VLLMLayout, int, int, Sequence[Shape]], Cut]] = {
    "replicated": _replicated,
    "column": _column,
    "row": _row,
    "vocab": _vocab,
    "gated": _gated,
    "fused_gated": _fused_gated,
    "qkv": _qkv,
}
