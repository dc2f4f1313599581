"""Megatron-Core's partition of a model, in closed form from plain numbers.

Rules read from megatron-core 0.19: `transformer/attention.py` (fused QKV, interleaved by query
group), `transformer/mlp.py` (gated fc1 is [gate; up] inside each TP shard), `tensor_parallel/
layers.py` (padded vocabulary), `models/common/language_module/language_module.py` (the second
copy of a tied embedding under pipeline parallelism).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from mrl.resharding.families import Entry, ModelShape
from mrl.resharding.layout import Box, Layout, Piece, TensorInfo, whole

IMPLEMENTATIONS = ("local", "transformer_engine")

Shape = tuple[int, ...]
Cut = Iterator[tuple[int, Box, Box]]  # index of the logical tensor, its box, the local box


@dataclass(frozen=True, slots=True)
class MegatronLayout:
    """Where one Megatron role keeps its parameters (CP and DP replicate them).

    Ranks follow Megatron's default order tp-cp-ep-dp-pp, TP fastest. Raises ValueError listing
    every number that does not fit.
    """

    shape: ModelShape
    tp: int
    pp: int
    dp: int
    padded_vocab: int  # rows of the embedding over all TP ranks
    cp: int = 1
    transformer_impl: str = "local"  # a member of IMPLEMENTATIONS
    layers_of_stage: tuple[tuple[int, ...], ...] | None = None  # global indices; None: even split
    has_lm_head: bool = True  # False for critics: a value head is never exchanged
    dtype: str | None = None  # of the parameters; None: the checkpoint's
    first_rank: int = 0
    node_of_rank: Mapping[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        problems = list(self._problems())
        if problems:
            raise ValueError("megatron layout: " + "; ".join(problems))

    def _problems(self) -> Iterator[str]:
        shape, tp = self.shape, self.tp
        if self.transformer_impl not in IMPLEMENTATIONS:
            yield (
                f"transformer_impl is {self.transformer_impl!r}, "
                f"expected one of {', '.join(IMPLEMENTATIONS)}"
            )
        if shape.num_heads % tp:
            legal = [n for n in range(1, shape.num_heads + 1) if shape.num_heads % n == 0]
            nearest = min(legal, key=lambda n: abs(n - tp))
            yield f"tp {tp} does not divide {shape.num_heads} heads (nearest legal {nearest})"
        if shape.num_kv_heads % tp and tp % shape.num_kv_heads:
            yield f"tp {tp} neither divides nor is a multiple of {shape.num_kv_heads} KV heads"
        qkv_rows = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
        if qkv_rows % tp:
            yield f"tp {tp} does not divide the {qkv_rows} rows of the fused QKV projection"
        if shape.ffn_size % tp:
            yield f"tp {tp} does not divide the feed-forward size {shape.ffn_size}"
        if self.padded_vocab % tp or self.padded_vocab < shape.vocab_size:
            nearest = -(-shape.vocab_size // tp) * tp
            yield (
                f"padded_vocab {self.padded_vocab} must be a multiple of tp {tp} and at least "
                f"{shape.vocab_size} (nearest legal {nearest})"
            )
        if self.layers_of_stage is None:
            if shape.num_layers % self.pp:
                yield f"pp {self.pp} does not divide {shape.num_layers} layers"
        else:
            placed = sorted(layer for stage in self.layers_of_stage for layer in stage)
            if len(self.layers_of_stage) != self.pp or placed != list(range(shape.num_layers)):
                yield (
                    f"layers_of_stage {self.layers_of_stage} must place layers "
                    f"0..{shape.num_layers - 1} once each on {self.pp} stages"
                )

    @property
    def world_size(self) -> int:
        """Count the ranks of the role."""
        return self.tp * self.cp * self.dp * self.pp

    def coordinates(self, rank: int) -> tuple[int, int, int, int]:
        """Give (tp, cp, dp, pp) of a global rank."""
        index = rank - self.first_rank
        index, tp_rank = divmod(index, self.tp)
        index, cp_rank = divmod(index, self.cp)
        pp_rank, dp_rank = divmod(index, self.dp)
        return tp_rank, cp_rank, dp_rank, pp_rank

    def stage_layers(self, pp_rank: int) -> tuple[int, ...]:
        """List the global layer indices of a stage in local order."""
        if self.layers_of_stage is not None:
            return self.layers_of_stage[pp_rank]
        count = self.shape.num_layers // self.pp
        return tuple(range(pp_rank * count, (pp_rank + 1) * count))

    def tensors(self) -> dict[str, TensorInfo]:
        """List the logical tensors that the role holds."""
        return self.shape.tensors(self.dtype, lm_head=self.has_lm_head)

    def pieces_of(self, rank: int) -> tuple[Piece, ...]:
        """List the pieces of one global rank."""
        tp_rank, _, _, pp_rank = self.coordinates(rank)
        return tuple(
            Piece(tensor, box, rank, param, local)
            for tensor, box, param, local in self._stage_pieces(tp_rank, pp_rank)
        )

    def layout(self) -> Layout:
        """Build the layout of all ranks."""
        stages = {
            (tp_rank, pp_rank): tuple(self._stage_pieces(tp_rank, pp_rank))
            for tp_rank in range(self.tp)
            for pp_rank in range(self.pp)
        }
        pieces = []
        for rank in range(self.first_rank, self.first_rank + self.world_size):
            tp_rank, _, _, pp_rank = self.coordinates(rank)
            for tensor, box, param, local in stages[tp_rank, pp_rank]:
                pieces.append(Piece(tensor, box, rank, param, local))
        family = self.shape.family
        padded = frozenset(entry.logical[0].name for entry in (family.embedding, family.lm_head))
        return Layout("megatron", self.tensors(), tuple(pieces), self.node_of_rank, padded)

    def _stage_pieces(self, tp_rank: int, pp_rank: int) -> Iterator[tuple[str, Box, str, Box]]:
        for entry, local_layer, layer in self._stage_entries(pp_rank):
            param = entry.megatron[self.transformer_impl].format(layer=local_layer)
            dims = self.shape.dims
            shapes = [tuple(dims[dim] for dim in logical.dims) for logical in entry.logical]
            for index, box, local in CUTS[entry.kind](self, tp_rank, shapes):
                yield entry.logical[index].name.format(layer=layer), box, param, local

    def _stage_entries(self, pp_rank: int) -> Iterator[tuple[Entry, int, int]]:
        """Yield (entry, local layer, global layer) of one stage."""
        family, tied = self.shape.family, self.shape.tie_word_embeddings
        if pp_rank == 0:
            yield family.embedding, 0, 0
        for local_layer, layer in enumerate(self.stage_layers(pp_rank)):
            for entry in family.layer:
                yield entry, local_layer, layer
        if pp_rank == self.pp - 1:
            yield family.final_norm, 0, 0
            if self.has_lm_head and not tied:
                yield family.lm_head, 0, 0
            elif self.has_lm_head and self.pp > 1:
                # the head of a tied model is a second holder of the embedding
                yield (
                    Entry("vocab", family.embedding.logical, family.lm_head.megatron),
                    0,
                    0,
                )


def _replicated(layout: MegatronLayout, tp_rank: int, shapes: Sequence[Shape]) -> Cut:
    yield 0, whole(shapes[0]), whole(shapes[0])


def _even(layout: MegatronLayout, tp_rank: int, shape: Shape, dim: int) -> tuple[Box, Box]:
    count = shape[dim] // layout.tp
    box, local = list(whole(shape)), list(whole(shape))
    box[dim] = (tp_rank * count, (tp_rank + 1) * count)
    local[dim] = (0, count)
    return tuple(box), tuple(local)


def _column(layout: MegatronLayout, tp_rank: int, shapes: Sequence[Shape]) -> Cut:
    yield 0, *_even(layout, tp_rank, shapes[0], dim=0)


def _row(layout: MegatronLayout, tp_rank: int, shapes: Sequence[Shape]) -> Cut:
    yield 0, *_even(layout, tp_rank, shapes[0], dim=1)


def _vocab(layout: MegatronLayout, tp_rank: int, shapes: Sequence[Shape]) -> Cut:
    (rows, *inner), count = shapes[0], layout.padded_vocab // layout.tp
    start, stop = tp_rank * count, min((tp_rank + 1) * count, rows)
    if start < stop:
        rest = whole(inner)
        yield 0, ((start, stop), *rest), ((0, stop - start), *rest)


def _gated(layout: MegatronLayout, tp_rank: int, shapes: Sequence[Shape]) -> Cut:
    for index, shape in enumerate(shapes):  # gate, up
        box, local = _even(layout, tp_rank, shape, dim=0)
        count = local[0][1]
        yield index, box, ((index * count, (index + 1) * count), *local[1:])


def _qkv(layout: MegatronLayout, tp_rank: int, shapes: Sequence[Shape]) -> Cut:
    """Cut the fused rows: each KV head's group stacks its query heads, its key and its value.

    With fewer KV heads than TP ranks the cut is by plain rows and may fall inside a group.
    """
    model = layout.shape
    query_rows = model.num_heads // model.num_kv_heads * model.head_dim
    segments = (query_rows, model.head_dim, model.head_dim)
    total = model.num_kv_heads * sum(segments)
    first, last = tp_rank * total // layout.tp, (tp_rank + 1) * total // layout.tp
    row = 0  # in the fused parameter over all TP ranks
    for group in range(model.num_kv_heads):
        for index, rows in enumerate(segments):
            start, stop = max(row, first), min(row + rows, last)
            if start < stop:
                shift = group * rows - row
                rest = whole(shapes[index][1:])
                box = ((start + shift, stop + shift), *rest)
                yield index, box, ((start - first, stop - first), *rest)
            row += rows


CUTS: Mapping[str, Callable[[MegatronLayout, int, Sequence[Shape]], Cut]] = {
    "replicated": _replicated,
    "column": _column,
    "row": _row,
    "vocab": _vocab,
    "gated": _gated,
    "qkv": _qkv,
}
