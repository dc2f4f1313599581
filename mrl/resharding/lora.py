"""Low-rank adapters as a layout: PEFT's tensors, in the boxes that Megatron's ranks hold.

An adapter of a fused matrix has one A for all that is fused (q, k and v; gate and up), and a B
whose rows are those of the matrix. In PEFT's terms the layers that are fused then have equal A's.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from mrl.resharding.families import ModelShape
from mrl.resharding.layout import Box, Layout, Piece, TensorInfo, whole

# Megatron's linear layers that can be adapted, and which side of them TP cuts.
COLUMN_CUT = ("linear_qkv", "linear_fc1")  # the output
ROW_CUT = ("linear_proj", "linear_fc2")  # the input
ADAPTABLE = (*COLUMN_CUT, *ROW_CUT)
ADAPTER = "lora"  # the submodule of an adapted layer that holds its A and B
PEFT_PREFIX = "base_model.model."
_WEIGHT = ".weight"


def linear_of(param: str) -> str:
    """Give the Megatron linear layer whose weight `param` is, "" where it is no such weight."""
    layer = param.removesuffix(_WEIGHT).rpartition(".")[2]
    known = param.endswith(_WEIGHT) and layer in ADAPTABLE
    return layer if known and ".experts." not in param else ""


def adapted_modules(shape: ModelShape, targets: Collection[str]) -> tuple[str, ...]:
    """List the Hugging Face layers (`q_proj`, ...) that an adapter of Megatron's `targets` adapts.

    The order is the model's.
    """
    names = (
        logical.name.removesuffix(_WEIGHT).rpartition(".")[2]
        for layer in range(shape.num_layers)
        for entry in shape.layer_entries(layer)
        if linear_of(entry.megatron["local"]) in targets
        for logical in entry.logical
    )
    return tuple(dict.fromkeys(names))


def adapter_layout(model: Layout, rank: int, targets: Collection[str]) -> Layout:
    """Lay out the adapters of rank `rank` (the low one) on a Megatron model's `targets`.

    Tensors have PEFT's names: `lora_A` [rank, in] and `lora_B` [out, rank]. Parameters are those
    of `mrl.workers.megatron.lora`.
    """
    tensors: dict[str, TensorInfo] = {}
    holders: dict[tuple[str, Box, str, Box], set[int]] = {}
    low = (0, rank)
    for piece in model.pieces:
        if linear_of(piece.param) not in targets:
            continue
        info = model.tensors[piece.tensor]
        rows, columns = info.shape
        stem = PEFT_PREFIX + piece.tensor.removesuffix(_WEIGHT)
        param = f"{piece.param.removesuffix(_WEIGHT)}.{ADAPTER}"
        a, b = f"{stem}.lora_A.weight", f"{stem}.lora_B.weight"
        tensors[a] = TensorInfo((rank, columns), info.dtype)
        tensors[b] = TensorInfo((rows, rank), info.dtype)
        for key in (
            (a, (low, piece.box[1]), f"{param}.lora_A", (low, piece.local[1])),
            (b, (piece.box[0], low), f"{param}.lora_B", (piece.local[0], low)),
        ):
            holders.setdefault(key, set()).update(piece.ranks)
    pieces = tuple(
        Piece(tensor, box, tuple(sorted(ranks)), param, local)
        for (tensor, box, param, local), ranks in holders.items()
    )
    return Layout("adapter", tensors, pieces, model.node_of_rank)


def whole_on(adapter: Layout, ranks: tuple[int, ...], dtype: str | None = None) -> Layout:
    """Lay every tensor of an adapter out whole, under its own name, on each of `ranks`.

    `dtype` None keeps the adapter's.
    """
    tensors = {
        name: TensorInfo(info.shape, dtype or info.dtype) for name, info in adapter.tensors.items()
    }
    pieces = tuple(
        Piece(name, whole(info.shape), ranks, name, whole(info.shape))
        for name, info in tensors.items()
    )
    return Layout("whole adapter", tensors, pieces, adapter.node_of_rank)


def shared_a(adapter: Layout) -> Iterator[tuple[str, str]]:
    """Yield pairs of `lora_A` tensors that are one parameter, so must be equal."""
    first: dict[tuple[str, str], str] = {}
    for piece in adapter.pieces:
        if piece.param.endswith(".lora_A"):
            block = piece.tensor.removesuffix(".lora_A.weight").rpartition(".")[0]
            other = first.setdefault((block, piece.param.split(".")[-3]), piece.tensor)
            if other != piece.tensor:
                yield other, piece.tensor
