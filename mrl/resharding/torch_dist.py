"""Where Megatron-Core's `torch_dist` checkpoints keep each tensor of a model; no torch.

Such a checkpoint does not depend on the layout that wrote it: every parameter has a key, and
layers and experts are further axes of it, or further keys. Read from megatron-core 0.19:
`transformer/transformer_block.py` and `transformer/moe/experts.py` (keys and axes),
`transformer/mlp.py` (the two halves of a gated fc1), `models/gpt/gpt_layer_specs.py` (norms of the
local spec go by Transformer Engine's names).
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace

from mrl.resharding.families import ModelShape
from mrl.resharding.layout import Box, Piece, volume, whole
from mrl.resharding.megatron import MegatronLayout

CONFIG_FILE = "metadata.json"  # written last: a checkpoint without it was cut short
FORMAT = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}  # what it holds
COMMON_STATE = "common_state/shard_0_1"  # the key of what is no tensor

# What `sharded_state_dict(metadata=...)` asks for to get each form; {} or None is `stacked`, and
# `per_layer` where dense and expert layers alternate.
KEY_FORMS: Mapping[str, Mapping[str, bool]] = {
    "stacked": {"non_homogeneous_layers": False, "singleton_local_shards": False},
    "per_layer": {"non_homogeneous_layers": True, "singleton_local_shards": False},
    "per_shard": {"non_homogeneous_layers": True, "singleton_local_shards": True},
}

_LAYER = re.compile(r"decoder\.layers\.(?P<layer>\d+)\.(?P<rest>.+)")
_EXPERT = re.compile(r"mlp\.experts\.local_experts\.(?P<expert>\d+)\.(?P<rest>.+)")
_GATED = (".linear_fc1.weight", ".linear_fc1.bias")
_LOCAL_NORMS = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}
_MODEL_KEYS = ("embedding.", "decoder.", "output_layer.", "mtp.")
_EXTRA_STATE = "._extra_state/"


@dataclass(frozen=True, slots=True)
class Part:
    """A box of a logical tensor, and where its slab holds it."""

    tensor: str
    box: Box
    local: Box  # same extents


@dataclass(frozen=True, slots=True)
class Slab:
    """One parameter of one layer and expert, at a place of a checkpoint key."""

    key: str
    axes: tuple[int, ...]  # extents of the axes before the parameter's own: layers, experts
    index: tuple[int, ...]  # place on those axes
    shape: tuple[int, ...]  # vocabularies are not padded: every reader pads them to its own size
    parts: tuple[Part, ...]
    cuts: tuple[Box, ...]  # the boxes in which it is stored
    is_vocab: bool = False

    @property
    def global_shape(self) -> tuple[int, ...]:
        """Give the shape of the whole key."""
        return (*self.axes, *self.shape)

    def offset(self, box: Box) -> tuple[int, ...]:
        """Give where a box of the slab begins in the key."""
        return (*self.index, *(start for start, _ in box))

    def extent(self, box: Box) -> tuple[int, ...]:
        """Give a box's sizes on all axes of the key."""
        return (*(1 for _ in self.index), *(stop - start for start, stop in box))


def slabs(
    shape: ModelShape, form: str | None = None, tp: int = 1, etp: int | None = None
) -> tuple[Slab, ...]:
    """List what a checkpoint holds of a model, in model order.

    `form` is a key of `KEY_FORMS` (None: what `sharded_state_dict()` gives). Each parameter is
    stored in the pieces that `tp` ranks hold (experts: `etp`). A norm that the local spec and
    Transformer Engine name differently is listed under both names.

    Raises ValueError when layers that differ are to be stacked, or `tp` does not fit the model.
    """
    groups = _parameters(shape)
    if form is None:
        form = "stacked" if _layers_are_alike(groups) else "per_layer"
    elif form == "stacked" and not _layers_are_alike(groups):
        raise ValueError(
            f"keys=stacked: the layers of this {shape.model_type} differ; use per_layer or auto"
        )
    etp = etp or tp
    dims = _cut_dims(shape, tp, etp)
    place = _Places(form, shape.num_layers, _count_experts(groups))
    found: list[Slab] = []
    for names, parts in groups.items():
        extents = tuple(max(stops) for stops in zip(*(_stops(part) for part in parts), strict=True))
        if sum(volume(part.box) for part in parts) != math.prod(extents):
            raise ValueError(f"{names[0]}: the family table leaves gaps in the parameter")
        width = etp if ".local_experts." in names[0] else tp
        cut = (dims[names[0]], width) if names[0] in dims else (0, 1)
        for name in dict.fromkeys(names):
            found += _slabs_of(name, extents, parts, cut, place)
    return tuple(found)


def form_of(keys: Collection[str]) -> str:
    """Tell the form of a checkpoint from its keys."""
    if any(key.endswith(("linear_fc1.weight_w", "linear_fc1.bias_w")) for key in keys):
        return "per_shard"
    return "per_layer" if any(_LAYER.match(key) for key in keys) else "stacked"


def model_keys(keys: Collection[str]) -> list[str]:
    """List the keys that are a model's parameters, not optimizer or quantiser state."""
    return [key for key in keys if key.startswith(_MODEL_KEYS) and _EXTRA_STATE not in key]


def extra_states(stored: Collection[Slab]) -> list[str]:
    """List the empty `_extra_state` objects that readers ask for, as unique keys.

    Every linear layer of Megatron asks for one; Transformer Engine's norms and attention too.
    """
    names: dict[str, None] = {}
    for slab in stored:
        if not slab.key.startswith("decoder."):
            continue
        module = slab.key.rpartition(".")[0]
        place = ".".join(map(str, slab.index)) or "0"
        extent = ".".join(map(str, slab.axes)) or "1"
        names[f"{module}{_EXTRA_STATE}shard_{place}_{extent}"] = None
        if module.endswith(".linear_proj"):
            core = f"{module.removesuffix('linear_proj')}core_attention"
            names[f"{core}{_EXTRA_STATE}shard_{place}_{extent}"] = None
    return list(names)


def _pieces(shape: ModelShape, impl: str, tp: int = 1, etp: int = 1) -> tuple[Piece, ...]:
    layout = MegatronLayout(
        shape,
        tp=tp,
        pp=1,
        dp=math.lcm(tp, etp) // tp,
        padded_vocab=-(-shape.vocab_size // tp) * tp,
        transformer_impl=impl,
        etp=etp,
    )
    return layout.layout().pieces


def _parameters(shape: ModelShape) -> dict[tuple[str, str], list[Part]]:
    """Group the pieces of one rank by parameter: (Transformer Engine's key, local spec's key)."""
    te, local = _pieces(shape, "transformer_engine"), _pieces(shape, "local")
    has_mla = any(".linear_kv_down_proj." in piece.param for piece in te)  # keeps its own names
    groups: dict[tuple[str, str], list[Part]] = {}
    for a, b in zip(te, local, strict=True):
        assert (a.tensor, a.box) == (b.tensor, b.box), "both specs list the same pieces"
        names = (a.param, b.param if has_mla else _local_key(b.param))
        groups.setdefault(names, []).append(Part(a.tensor, a.box, a.local))
    return groups


def _local_key(param: str) -> str:
    found = _LAYER.fullmatch(param)
    if found is None:
        return param
    rest = found["rest"]
    for old, new in _LOCAL_NORMS.items():
        if rest.startswith(old):
            return f"decoder.layers.{found['layer']}.{new}{rest.removeprefix(old)}"
    return param


def _layers_are_alike(groups: Collection[tuple[str, str]]) -> bool:
    names: dict[str, set[str]] = {}
    for te_name, _ in groups:
        found = _LAYER.fullmatch(te_name)
        if found is not None:
            names.setdefault(found["layer"], set()).add(found["rest"])
    return len({frozenset(rests) for rests in names.values()}) <= 1


def _cut_dims(shape: ModelShape, tp: int, etp: int) -> dict[str, int]:
    """Give the dimension in which ranks cut each parameter that they cut."""
    alone = _extents(_pieces(shape, "transformer_engine"))
    return {
        name: dim
        for name, extents in _extents(_pieces(shape, "transformer_engine", tp, etp)).items()
        for dim, (size, whole_size) in enumerate(zip(extents, alone[name], strict=True))
        if size != whole_size
    }


def _extents(pieces: Collection[Piece]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for piece in pieces:
        extents = found.setdefault(piece.param, [0] * len(piece.local))
        for dim, (_, stop) in enumerate(piece.local):
            extents[dim] = max(extents[dim], stop)
    return found


def _stops(part: Part) -> tuple[int, ...]:
    return tuple(stop for _, stop in part.local)


def _count_experts(groups: Collection[tuple[str, str]]) -> int:
    rests = (found["rest"] for name, _ in groups if (found := _LAYER.fullmatch(name)))
    return 1 + max(
        (int(found["expert"]) for rest in rests if (found := _EXPERT.fullmatch(rest))), default=-1
    )


def _slabs_of(
    name: str,
    extents: tuple[int, ...],
    parts: list[Part],
    cut: tuple[int, int],
    places: _Places,
) -> Iterator[Slab]:
    key, axes, index = places.of(name)
    is_gated = name.endswith(_GATED) and len({part.tensor for part in parts}) == 2
    is_vocab = name in ("embedding.word_embeddings.weight", "output_layer.weight")
    if not is_gated:
        yield Slab(key, axes, index, extents, tuple(parts), _cut(extents, *cut), is_vocab)
        return
    rows = extents[0] // 2
    half = (rows, *extents[1:])
    if places.form != "per_shard":
        boxes = [_shifted(box, first) for first in (0, rows) for box in _cut(half, *cut)]
        yield Slab(key, axes, index, extents, tuple(parts), tuple(boxes))
        return
    for suffix, first in (("_w", 0), ("_v", rows)):
        own = [part for part in parts if first <= part.local[0][0] < first + rows]
        moved = tuple(replace(part, local=_shifted(part.local, -first)) for part in own)
        yield Slab(key + suffix, axes, index, half, moved, _cut(half, *cut))


def _shifted(box: Box, rows: int) -> Box:
    (start, stop), *rest = box
    return ((start + rows, stop + rows), *rest)


def _cut(shape: tuple[int, ...], dim: int, count: int) -> tuple[Box, ...]:
    step = -(-shape[dim] // count)
    boxes = []
    for start in range(0, shape[dim], step):
        box = list(whole(shape))
        box[dim] = (start, min(start + step, shape[dim]))
        boxes.append(tuple(box))
    return tuple(boxes)


@dataclass(frozen=True, slots=True)
class _Places:
    """How a form names parameters."""

    form: str
    num_layers: int
    num_experts: int

    def of(self, name: str) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
        """Give the key of a parameter, its further axes and its place on them."""
        found = _LAYER.fullmatch(name)
        if found is None:
            return name, (), ()
        prefix, axes, index = f"decoder.layers.{found['layer']}.", [], []
        if self.form == "stacked":
            prefix, axes, index = "decoder.layers.", [self.num_layers], [int(found["layer"])]
        expert = _EXPERT.fullmatch(found["rest"])
        if expert is None:
            return prefix + found["rest"], tuple(axes), tuple(index)
        prefix += "mlp.experts.experts."
        if self.form == "per_shard":
            prefix += f"{expert['expert']}."
        else:
            axes.append(self.num_experts)
            index.append(int(expert["expert"]))
        return prefix + expert["rest"], tuple(axes), tuple(index)
