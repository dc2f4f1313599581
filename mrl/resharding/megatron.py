"""Megatron-Core's partition of a model, in closed form from plain numbers.

Tensor-parallel cuts are in `cuts.py`, layers of stages in `stages.py`. Rules read from
megatron-core 0.19: `core/parallel_state.py` (rank order), `transformer/moe/experts.py` (experts
of a rank), `models/common/language_module/language_module.py` (the second copy of a tied
embedding under pipeline parallelism).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from mrl.config import stages
from mrl.resharding.cuts import CUTS, Shard
from mrl.resharding.families import Entry, ModelShape
from mrl.resharding.layout import Layout, Piece, TensorInfo

IMPLEMENTATIONS = ("local", "transformer_engine")

Ranks = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class MegatronLayout:
    """Where one Megatron role keeps its parameters (CP and DP replicate them).

    Ranks follow Megatron's default order tp-cp-ep-dp-pp, TP fastest. Experts have an order of
    their own inside a pipeline stage: expert TP, then EP, then expert data parallel. With more
    than one model chunk a stage, the parameters of chunk c are named `model{c}.` and so on.
    Raises ValueError listing every number that does not fit.
    """

    shape: ModelShape
    tp: int
    pp: int
    dp: int
    padded_vocab: int  # rows of the embedding over all TP ranks
    cp: int = 1
    transformer_impl: str = "local"  # a member of IMPLEMENTATIONS
    layers_of_chunk: stages.Chunks | None = None  # None: an even split
    has_lm_head: bool = True  # False for critics: a value head is never exchanged
    dtype: str | None = None  # of the parameters; None: the checkpoint's
    first_rank: int = 0
    node_of_rank: Mapping[int, int] = field(default_factory=dict)
    vpp: int = 1  # model chunks of a stage
    ep: int = 1
    etp: int | None = None  # TP inside an expert; None: tp
    grouped_experts: bool = False  # names of TEGroupedMLP, else of SequentialMLP
    router_dtype: str | None = None  # of the routers' weights; None: dtype

    def __post_init__(self) -> None:
        problems = list(_problems(self))
        if problems:
            raise ValueError("megatron layout: " + "; ".join(problems))

    @property
    def stage_size(self) -> int:
        """Count the ranks of a pipeline stage."""
        return self.tp * self.cp * self.dp

    @property
    def world_size(self) -> int:
        """Count the ranks of the role."""
        return self.stage_size * self.pp

    @property
    def expert_tp(self) -> int:
        """Give the TP size inside an expert."""
        return self.tp if self.etp is None else self.etp

    @property
    def expert_dp(self) -> int:
        """Count the copies of each expert."""
        return self.stage_size // (self.expert_tp * self.ep)

    def coordinates(self, rank: int) -> tuple[int, int, int, int]:
        """Give (tp, cp, dp, pp) of a global rank."""
        rest, tp_rank = divmod(rank - self.first_rank, self.tp)
        rest, cp_rank = divmod(rest, self.cp)
        pp_rank, dp_rank = divmod(rest, self.dp)
        return tp_rank, cp_rank, dp_rank, pp_rank

    def stage_layers(self, pp_rank: int, chunk: int = 0) -> tuple[int, ...]:
        """List the global layer indices of a chunk of a stage in local order."""
        return self.chunks[pp_rank][chunk]

    @property
    def chunks(self) -> stages.Chunks:
        """List the global layer indices of each chunk of each stage."""
        if self.layers_of_chunk is not None:
            return self.layers_of_chunk
        return stages.layers_of_chunk(self.shape.num_layers, self.pp, self.vpp)

    def tensors(self) -> dict[str, TensorInfo]:
        """List the logical tensors that the role holds."""
        return self.shape.tensors(self.dtype, self.has_lm_head, self.router_dtype)

    def pieces_of(self, rank: int) -> tuple[Piece, ...]:
        """List the pieces of one global rank."""
        pieces = self._stage_pieces(self.coordinates(rank)[-1])
        return tuple(piece for piece in pieces if rank in piece.ranks)

    def layout(self) -> Layout:
        """Build the layout of all ranks."""
        pieces = tuple(piece for stage in range(self.pp) for piece in self._stage_pieces(stage))
        family = self.shape.family
        padded = frozenset(entry.logical[0].name for entry in (family.embedding, family.lm_head))
        return Layout("megatron", self.tensors(), pieces, self.node_of_rank, padded)

    def _stage_pieces(self, pp_rank: int) -> Iterator[Piece]:
        holders = _Holders(self, pp_rank)
        for chunk in range(self.vpp):
            prefix = f"model{chunk}." if self.vpp > 1 else ""
            for entry, local_layer, layer in self._chunk_entries(pp_rank, chunk):
                yield from holders.pieces(entry, prefix, local_layer, layer)

    def _chunk_entries(self, pp_rank: int, chunk: int) -> Iterator[tuple[Entry, int, int]]:
        """Yield (entry, local layer, global layer) of one model chunk."""
        family, tied = self.shape.family, self.shape.tie_word_embeddings
        if (pp_rank, chunk) == (0, 0):
            yield family.embedding, 0, 0
        for local_layer, layer in enumerate(self.stage_layers(pp_rank, chunk)):
            for entry in self.shape.layer_entries(layer):
                yield entry, local_layer, layer
        if (pp_rank, chunk) == (self.pp - 1, self.vpp - 1):
            yield family.final_norm, 0, 0
            if self.has_lm_head and not tied:
                yield family.lm_head, 0, 0
            elif self.has_lm_head and self.pp > 1:
                # the head of a tied model is a second holder of the embedding
                yield replace(family.embedding, megatron=family.lm_head.megatron), 0, 0


class _Holders:
    """The ranks of a pipeline stage, by what share of a parameter they hold."""

    def __init__(self, layout: MegatronLayout, pp_rank: int) -> None:
        self._layout = layout
        self._dims = layout.shape.dims
        first = layout.first_rank + pp_rank * layout.stage_size
        stop, tp = first + layout.stage_size, layout.tp
        self._dense = [tuple(range(first + rank, stop, tp)) for rank in range(tp)]
        etp, ep = layout.expert_tp, layout.ep
        self._experts = [
            [tuple(range(first + part * etp + rank, stop, etp * ep)) for rank in range(etp)]
            for part in range(ep)
        ]

    def pieces(self, entry: Entry, prefix: str, local_layer: int, layer: int) -> Iterator[Piece]:
        """Yield the pieces of one entry of one layer, or one of the model's own."""
        layout = self._layout
        param = prefix + self._param(entry)
        if not entry.experts:
            for index, box, local, ranks in self._shares(entry, self._dense):
                name = entry.logical[index].name.format(layer=layer)
                yield Piece(name, box, ranks, param.format(layer=local_layer), local)
            return
        count = self._dims["experts"] // layout.ep
        for part, holders in enumerate(self._experts):
            shares = list(self._shares(entry, holders))
            for expert in range(count):
                local_param = param.format(layer=local_layer, expert=expert)
                for index, box, local, ranks in shares:
                    name = entry.logical[index].name
                    name = name.format(layer=layer, expert=part * count + expert)
                    yield Piece(name, box, ranks, local_param, local)

    def _param(self, entry: Entry) -> str:
        layout = self._layout
        grouped = entry.experts and layout.grouped_experts
        return entry.megatron["grouped" if grouped else layout.transformer_impl]

    def _shares(self, entry: Entry, holders: list[Ranks]) -> Iterator[tuple]:
        """Yield (index of the logical tensor, its box, the local box, who holds it alike)."""
        layout = self._layout
        shapes = [tuple(self._dims[dim] for dim in logical.dims) for logical in entry.logical]
        held: dict[tuple, Ranks] = {}
        for rank, ranks in enumerate(holders):
            shard = Shard(
                rank,
                len(holders),
                layout.shape.num_kv_heads,
                layout.shape.head_dim,
                layout.padded_vocab,
                down_is_cut=layout.transformer_impl == "local",
            )
            for share in CUTS[entry.kind](shard, shapes):
                held[share] = held.get(share, ()) + ranks
        for share, ranks in held.items():
            yield *share, tuple(sorted(ranks))


def _problems(layout: MegatronLayout) -> Iterator[str]:
    shape, impl = layout.shape, layout.transformer_impl
    if impl not in IMPLEMENTATIONS:
        yield f"transformer_impl is {impl!r}, expected one of {', '.join(IMPLEMENTATIONS)}"
    sizes = {name: getattr(layout, name) for name in ("tp", "pp", "dp", "cp", "vpp", "ep")}
    small = [f"{name} is {size}, below 1" for name, size in sizes.items() if size < 1]
    if layout.expert_tp < 1:
        small.append(f"etp is {layout.etp}, below 1")
    if small:
        yield from small
        return
    yield from _axis("tp", layout.tp, shape.num_heads, lambda tp: _tp_problems(layout, tp))
    if layout.padded_vocab % layout.tp or layout.padded_vocab < shape.vocab_size:
        nearest = -(-shape.vocab_size // layout.tp) * layout.tp
        yield (
            f"padded_vocab {layout.padded_vocab} must be a multiple of tp {layout.tp} and at least "
            f"{shape.vocab_size} (nearest legal {nearest})"
        )
    yield from _chunk_problems(layout)
    most = shape.moe.num_experts if shape.moe else 1
    yield from _axis("ep", layout.ep, most, lambda ep: _ep_problems(layout, ep))
    if layout.etp is not None or shape.moe:
        most = shape.moe.ffn_size if shape.moe else layout.tp
        yield from _axis("etp", layout.expert_tp, most, lambda etp: _etp_problems(layout, etp))
    if layout.grouped_experts and impl == "local":
        yield (
            "grouped_experts need transformer_impl transformer_engine: the local specification "
            "builds sequential experts"
        )


def _axis(
    name: str, size: int, most: int, problems_of: Callable[[int], Iterator[str]]
) -> Iterator[str]:
    problems = list(problems_of(size))
    if problems:
        legal = [n for n in range(1, most + 1) if not list(problems_of(n))]
        nearest = min(legal, key=lambda n: abs(n - size), default="none")
        yield f"{name} {size} {' and '.join(problems)} (nearest legal {nearest})"


def _tp_problems(layout: MegatronLayout, tp: int) -> Iterator[str]:
    shape, local = layout.shape, layout.transformer_impl == "local"
    divided = {"heads": shape.num_heads}
    if not shape.moe or len(shape.moe.layers) < shape.num_layers:
        divided["columns of the feed-forward layers"] = shape.ffn_size
    if shape.moe and shape.moe.shared_ffn_size:
        divided["columns of the shared experts"] = shape.moe.shared_ffn_size
    if shape.mla and local:
        dims = shape.mla.dims(shape.num_heads)
        divided["rows of the latent query projection"] = dims["q_lora"]
        divided["rows of the latent key-value projection"] = dims["kv_lora_and_rope"]
    if not shape.mla:
        rows = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
        divided["rows of the fused QKV projection"] = rows
    for what, extent in divided.items():
        if extent % tp:
            yield f"does not divide the {extent} {what}"
    if not shape.mla and shape.num_kv_heads % tp and tp % shape.num_kv_heads:
        yield f"neither divides nor is a multiple of the {shape.num_kv_heads} KV heads"


def _chunk_problems(layout: MegatronLayout) -> Iterator[str]:
    num_layers, chunks = layout.shape.num_layers, layout.layers_of_chunk
    if chunks is None:
        try:
            stages.layers_of_chunk(num_layers, layout.pp, layout.vpp)
        except ValueError as error:
            yield str(error)
        return
    sizes = [len(stage) for stage in chunks]
    if sizes != [layout.vpp] * layout.pp:
        yield (
            f"layers_of_chunk has chunks {sizes} a stage, expected {layout.vpp} in each of "
            f"pp {layout.pp} stages"
        )
    listed = sorted(layer for stage in chunks for chunk in stage for layer in chunk)
    if listed != list(range(num_layers)):
        yield f"layers_of_chunk has layers {listed}, expected 0..{num_layers - 1} once each"


def _ep_problems(layout: MegatronLayout, ep: int) -> Iterator[str]:
    moe = layout.shape.moe
    if moe is None:
        if ep > 1:
            yield "needs a model with experts"
    elif moe.num_experts % ep:
        yield f"does not divide the {moe.num_experts} experts"
    elif layout.stage_size % (layout.expert_tp * ep):
        yield (
            f"x etp {layout.expert_tp} does not divide the {layout.stage_size} ranks of a "
            "pipeline stage"
        )


def _etp_problems(layout: MegatronLayout, etp: int) -> Iterator[str]:
    moe = layout.shape.moe
    if moe is None:
        if etp != layout.tp:
            yield "needs a model with experts"
        return
    if moe.ffn_size % etp:
        yield f"does not divide the {moe.ffn_size} columns of an expert"
    if layout.stage_size % etp:
        yield f"does not divide the {layout.stage_size} ranks of a pipeline stage"
