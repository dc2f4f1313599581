"""vLLM's placement of a model, traced from vLLM's own weight loader.

The live model's `load_weights` runs once on meta tensors while every `copy_` is recorded instead
of executed, so renames, fused projections, KV-head replicas and vocabulary shards are followed
without a table of them. Works on unquantised parameters that stay where the loader put them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from mrl.resharding.layout import Box, Layout, Piece, TensorInfo, volume
from mrl.resharding.transports import Transport


def live_params(model: nn.Module) -> dict[str, Tensor]:
    """Give the engine's parameters, as vLLM shards them, without autograd.

    Raises ValueError where the engine repacked a weight and left an empty parameter.
    """
    params = {name: param.detach() for name, param in model.named_parameters()}
    empty = [name for name, param in params.items() if param.numel() == 0]
    if empty:
        raise ValueError(
            f"engine parameters were repacked after loading and cannot be written in place: "
            f"{', '.join(empty)}; on CPU set vllm._custom_ops._supports_onednn = False before "
            f"the engine is built"
        )
    return params


def trace(model: nn.Module, hf_tensors: Mapping[str, TensorInfo], rank: int) -> list[Piece]:
    """Record which box of each checkpoint tensor goes where on this rank.

    `hf_tensors` are the tensors that the trainer will send. Nothing is copied, except that the
    loader may zero vocabulary padding. Raises ValueError for a copy that cannot be attributed.
    """
    sources = {
        name: torch.empty(info.shape, dtype=getattr(torch, info.dtype), device="meta")
        for name, info in hf_tensors.items()
    }
    recorder = _CopyRecorder(sources, live_params(model), rank)
    with torch.no_grad(), recorder:
        model.load_weights(iter(sources.items()))
    return recorder.pieces


def engine_layout(
    model: nn.Module,
    hf_tensors: Mapping[str, TensorInfo],
    rank: int,
    transport: Transport,
    node_of_rank: Mapping[int, int],
) -> Layout:
    """Trace every rank and join the results; all ranks call it together.

    Raises ValueError naming tensors from which no rank takes anything.
    """
    pieces = [piece for part in transport.gather(trace(model, hf_tensors, rank)) for piece in part]
    held = {piece.tensor for piece in pieces}
    unused = [name for name in hf_tensors if name not in held]
    if unused:
        raise ValueError(f"vLLM's loader takes nothing from {', '.join(unused)}")
    padded = frozenset().union(*transport.gather(_padded(model, pieces, rank)))
    return Layout("vllm", hf_tensors, tuple(pieces), node_of_rank, padded)


def _padded(model: nn.Module, pieces: Sequence[Piece], rank: int) -> frozenset[str]:
    """List the tensors in parameters that vLLM pads: embedding and head."""
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    params = {
        f"{prefix}.weight"
        for prefix, module in model.named_modules()
        if isinstance(module, VocabParallelEmbedding)
    }
    return frozenset(piece.tensor for piece in pieces if piece.param in params)


@dataclass(frozen=True, slots=True)
class _Base:
    """A whole tensor, to which views are attributed by storage and offset."""

    name: str
    tensor: Tensor

    def box_of(self, view: Tensor) -> Box | None:
        """Find the box of a view, or None where it is not a box in the base's own order."""
        base = self.tensor
        if not base.is_contiguous():
            return None
        offset = view.storage_offset() - base.storage_offset()
        dims = zip(view.stride(), view.shape, strict=True)
        extents = {stride: size for stride, size in dims if size > 1}
        strides = list(extents)
        box = []
        for size, stride in zip(base.shape, base.stride(), strict=True):
            start, offset = divmod(offset, stride)
            extent = extents.pop(stride, 1) if size > 1 else 1
            if not 0 <= start <= start + extent <= size:
                return None
            box.append((start, start + extent))
        in_order = strides == sorted(strides, reverse=True)
        return tuple(box) if in_order and not extents else None


class _CopyRecorder(TorchDispatchMode):
    """Turn copies from source tensors into live parameters into pieces."""

    def __init__(
        self, sources: Mapping[str, Tensor], params: Mapping[str, Tensor], rank: int
    ) -> None:
        super().__init__()
        self.pieces: list[Piece] = []
        self._rank = rank
        self._sources = _by_storage(sources)
        self._params = _by_storage(params)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is torch.ops.aten.copy_.default and args[1].is_meta and not args[0].is_meta:
            self._record(target=args[0], source=args[1])
            return args[0]
        return func(*args, **(kwargs or {}))

    def _record(self, target: Tensor, source: Tensor) -> None:
        if target.numel() == 0:
            return
        tensor, box = _attribute(source, self._sources, "source")
        param, local = _attribute(target, self._params, "engine parameter")
        if volume(box) != volume(local) or len(box) != len(local):
            raise ValueError(f"vLLM copies {tensor}{box} to {param}{local}: extents differ")
        self.pieces.append(Piece(tensor, box, self._rank, param, local))


def _by_storage(tensors: Mapping[str, Tensor]) -> dict[int, list[_Base]]:
    bases: dict[int, list[_Base]] = defaultdict(list)
    for name, tensor in tensors.items():
        bases[tensor.untyped_storage()._cdata].append(_Base(name, tensor))
    return bases


def _attribute(view: Tensor, bases: Mapping[int, list[_Base]], what: str) -> tuple[str, Box]:
    for base in bases.get(view.untyped_storage()._cdata, []):
        box = base.box_of(view)
        if box is not None:
            return base.name, box
    raise ValueError(
        f"vLLM's loader copies a view of shape {tuple(view.shape)}, stride {view.stride()} that "
        f"is no box of a known {what}"
    )
