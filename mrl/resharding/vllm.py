"""vLLM's placement of a model, traced from vLLM's own weight loader.

The live model's `load_weights` runs once on meta tensors while every `copy_` is recorded instead
of executed, so renames, fused projections, KV-head replicas and vocabulary shards are followed
without a table of them. Works on unquantised parameters that stay where the loader put them;
`refuse_relaid` says which do not.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from mrl.resharding.layout import Box, Layout, Piece, TensorInfo, volume

# Parameters that MLA computes from kv_b_proj after loading (vLLM 0.26, mla_attention.py).
DERIVED = frozenset({"W_UV", "W_UK_T"})


def live_params(model: nn.Module) -> dict[str, Tensor]:
    """Give the engine's parameters, as vLLM shards them, without autograd.

    A stack of experts is seen as a matrix: the rows of one expert follow those of another.
    What vLLM derives from parameters is left out. Raises ValueError where the engine repacked a
    weight and left an empty parameter.
    """
    params = {
        name: param.detach()
        for name, param in model.named_parameters()
        if name.rpartition(".")[2] not in DERIVED
    }
    empty = [name for name, param in params.items() if param.numel() == 0]
    if empty:
        raise ValueError(
            f"engine parameters were repacked after loading and cannot be written in place: "
            f"{', '.join(empty)}; on CPU set vllm._custom_ops._supports_onednn = False before "
            f"the engine is built"
        )
    return {
        name: param.view(-1, param.shape[-1]) if param.dim() > 2 else param
        for name, param in params.items()
    }


def trace(model: nn.Module, hf_tensors: Mapping[str, TensorInfo], rank: int) -> list[Piece]:
    """Record which box of each checkpoint tensor goes where on this rank.

    `hf_tensors` are the tensors that the trainer will send. Nothing is written, so that the
    engine may sleep meanwhile. Raises ValueError for a copy that cannot be attributed.
    """
    sources = {
        name: torch.empty(info.shape, dtype=getattr(torch, info.dtype), device="meta")
        for name, info in hf_tensors.items()
    }
    recorder = _CopyRecorder(sources, live_params(model), rank)
    with torch.no_grad(), recorder:
        model.load_weights(iter(sources.items()))
    return recorder.pieces


def engine_layout(model: nn.Module, hf_tensors: Mapping[str, TensorInfo], rank: int) -> Layout:
    """Trace what this rank's engine holds of `hf_tensors`, in the dtypes of its parameters.

    Raises ValueError for a model that `refuse_relaid` refuses.
    """
    refuse_relaid(model)
    pieces, params = trace(model, hf_tensors, rank), live_params(model)
    dtypes = {piece.tensor: str(params[piece.param].dtype)[len("torch.") :] for piece in pieces}
    held = {name: TensorInfo(hf_tensors[name].shape, dtype) for name, dtype in dtypes.items()}
    return Layout("vllm", held, tuple(pieces), padded=_padded(model, pieces))


def _padded(model: nn.Module, pieces: Sequence[Piece]) -> frozenset[str]:
    """List the tensors in parameters that vLLM pads: embedding and head."""
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    params = {
        f"{prefix}.weight"
        for prefix, module in model.named_modules()
        if isinstance(module, VocabParallelEmbedding)
    }
    return frozenset(piece.tensor for piece in pieces if piece.param in params)


def refuse_relaid(model: nn.Module) -> None:
    """Raise ValueError where bytes of the checkpoint's layout would be wrong in a live parameter.

    That is so for quantised layers, for kernels that swap, shuffle or pack experts after loading
    (vLLM 0.26, fused_moe/oracle/unquantized.py), for experts that move at run time, and for LoRA
    layers. Lists every module that is concerned, with its reason.
    """
    problems = [
        f"{name}: {reason}" for name, module in model.named_modules() for reason in _relaid(module)
    ]
    if problems:
        raise ValueError(
            "vLLM does not keep these modules as it loads them, so they cannot be written in "
            "place: " + "; ".join(problems)
        )


def _relaid(module: nn.Module) -> Iterator[str]:
    from vllm.lora.layers.base import BaseLayerWithLoRA
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
    from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import (
        UnquantizedEmbeddingMethod,
        VocabParallelEmbedding,
    )

    if isinstance(module, BaseLayerWithLoRA):
        yield "LoRA wraps the layer"
    elif isinstance(module, RoutedExperts):
        yield from _relaid_experts(module)
    elif isinstance(module, LinearBase | VocabParallelEmbedding) and not isinstance(
        module.quant_method, UnquantizedLinearMethod | UnquantizedEmbeddingMethod
    ):
        yield f"quantised ({type(module.quant_method).__name__})"
    if isinstance(module, VocabParallelEmbedding) and (
        module.num_embeddings != module.org_vocab_size
    ):
        added = module.num_embeddings - module.org_vocab_size
        yield f"{added} rows of LoRA vocabulary follow the model's {module.org_vocab_size}"


def _relaid_experts(experts: Any) -> Iterator[str]:
    from vllm.model_executor.layers.fused_moe.cpu_fused_moe import CPUFusedMOE
    from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
        UnquantizedFusedMoEMethod,
    )

    method = experts.quant_method
    if experts.moe_config.moe_parallel_config.enable_eplb:
        yield "expert load balancing (EPLB) moves and copies experts at run time"
    if not isinstance(method, UnquantizedFusedMoEMethod):
        yield f"quantised or wrapped experts ({type(method).__name__})"
        return
    backend = method.unquantized_backend
    if backend is UnquantizedMoeBackend.CPU:
        # absent until the weights were loaded
        kernel = vars(method).get("cpu_fused_moe")
        in_place = isinstance(kernel, CPUFusedMOE) and kernel.isa == "none"
        if kernel is not None and not in_place:
            yield (
                f"the CPU kernel {type(kernel).__name__} packed the experts; make "
                f"CPUFusedMOE.check_grouped_gemm answer (False, 'none') before the engine is built"
            )
    elif backend not in (UnquantizedMoeBackend.TRITON, UnquantizedMoeBackend.BATCHED_TRITON):
        yield f"the {backend.value} kernel lays experts out anew: build with moe_backend='triton'"


def addresses(model: nn.Module) -> dict[str, int]:
    """Give the address of every parameter, buffer and tensor attribute of the model's modules."""
    return {name: tensor.data_ptr() for name, tensor in _tensors(model)}


def check_addresses(model: nn.Module, before: Mapping[str, int]) -> None:
    """Raise RuntimeError naming tensors that are not where they were: CUDA graphs read there."""
    now = addresses(model)
    moved = [name for name, address in before.items() if now.get(name) != address]
    if moved:
        raise RuntimeError(f"engine tensors moved after CUDA graphs took them: {', '.join(moved)}")


def constants(model: nn.Module) -> dict[str, Tensor]:
    """Copy to the host what no weight update brings: buffers and tensor attributes.

    These are rotary tables, Gemma's normalizer, expert maps and scales. Sleep level 2 drops them
    with the weights, and vLLM brings only registered buffers back.
    """
    params = {id(param) for param in model.parameters()}
    return {name: t.detach().cpu().clone() for name, t in _tensors(model) if id(t) not in params}


@torch.no_grad()
def restore_constants(model: nn.Module, saved: Mapping[str, Tensor]) -> None:
    """Write back, in place, what `constants` saved."""
    for name, tensor in _tensors(model):
        if name in saved:
            tensor.copy_(saved[name])


@torch.no_grad()
def refresh_derived(model: nn.Module, dtype: torch.dtype) -> None:
    """Rebuild in place what vLLM computes from the weights after loading them.

    `dtype` is the engine's. Today these are MLA's up-projections: vLLM's own code does it.
    """
    from vllm.model_executor.layers.attention import MLAAttention

    for module in model.modules():
        if isinstance(module, MLAAttention):
            before = {k: v for k, v in vars(module).items() if isinstance(v, Tensor)}
            module.process_weights_after_loading(dtype)
            for name, tensor in before.items():
                made = vars(module)[name]
                if made is not tensor:  # bound anew, while captured graphs read the old one
                    tensor.copy_(made)
                    setattr(module, name, tensor)


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for prefix, module in model.named_modules():
        members = {**module._parameters, **module._buffers, **vars(module)}
        for name, value in members.items():
            if isinstance(value, Tensor) and name != "kv_cache":
                yield f"{prefix}.{name}" if prefix else name, value


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
        if func is torch.ops.aten.fill_.Scalar and not args[0].is_meta:
            return args[0]  # vocabulary padding, which a sync zeroes
        return func(*args, **(kwargs or {}))

    def _record(self, target: Tensor, source: Tensor) -> None:
        if target.numel() == 0:
            return
        tensor, box = _attribute(source, self._sources, "source")
        param, local = _attribute(target, self._params, "engine parameter")
        if volume(box) != volume(local) or len(box) != len(local):
            raise ValueError(f"vLLM copies {tensor}{box} to {param}{local}: extents differ")
        self.pieces.append(Piece(tensor, box, (self._rank,), param, local))


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
