"""Linear layers in FP8, through Transformer Engine; embedding, attention and head stay bfloat16."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from megatron.core.transformer import TransformerConfig

from mrl.config.schema import MegatronConfig
from mrl.resharding.families import ModelShape

# Transformer Engine 2.20's name for a layer's quantized weights, which it keeps between runs
_CACHE = "_fp8_workspaces"
_ALIGN = 16  # what each side of an FP8 matrix product divides by
_BLOCK = 128  # of the blockwise recipe: tokens that one scale covers
# compute capability and what has it
_OLDEST = {"blockwise": ((9, 0), "Hopper")}
_OLDEST_OTHERWISE = ((8, 9), "Ada")


def require_fp8(layout: MegatronConfig, device: torch.device, transformer_impl: str) -> None:
    """Refuse FP8 where it cannot run; raises ValueError with the reason."""
    if layout.fp8 is None:
        return
    found = f"megatron.fp8={layout.fp8}"
    if device.type != "cuda":
        raise ValueError(f"{found} needs a GPU, found device {device.type}: set fp8=null")
    if transformer_impl != "transformer_engine":
        raise ValueError(
            f"{found} runs through Transformer Engine, found transformer_impl={transformer_impl}: "
            "install Transformer Engine and use transformer_impl=auto and dtype=auto, or fp8=null"
        )
    oldest, name = _OLDEST.get(layout.fp8_recipe, _OLDEST_OTHERWISE)
    capability = torch.cuda.get_device_capability(device)
    if capability < oldest:
        raise ValueError(
            f"{found} with fp8_recipe={layout.fp8_recipe} needs compute capability "
            f"{oldest[0]}.{oldest[1]} ({name}) or newer, found {capability[0]}.{capability[1]} "
            f"({torch.cuda.get_device_name(device)}): set fp8=null"
        )


def fp8_config(shape: ModelShape, layout: MegatronConfig) -> dict[str, Any]:
    """Give Megatron's FP8 settings; raises ValueError for widths that FP8 products cannot take."""
    if layout.fp8 is None:
        return {}
    tp = layout.tensor_model_parallel_size
    widths = {
        "the hidden size": shape.hidden_size,
        "the query, key and value width of a rank": (
            (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim // tp
        ),
        "the attention width of a rank": shape.num_heads * shape.head_dim // tp,
        "the intermediate size of a rank": shape.ffn_size // tp,
    }
    if shape.moe is not None:
        expert_tp = layout.expert_tensor_parallel_size or tp
        widths["the intermediate size of an expert"] = shape.moe.ffn_size // expert_tp
    wrong = [f"{name} is {width}" for name, width in widths.items() if width % _ALIGN]
    if wrong:
        raise ValueError(
            f"megatron.fp8={layout.fp8}: {', '.join(wrong)}, expected multiples of {_ALIGN}: "
            "set fp8=null, or a smaller tensor_model_parallel_size where that helps"
        )
    return {
        "fp8": layout.fp8,
        "fp8_recipe": layout.fp8_recipe,
        "fp8_param": False,  # weights stay bfloat16: loading, export and sync see them so
        # of the delayed recipe: the largest of the last steps, so that one quiet step cannot
        # make the next one overflow
        "fp8_amax_history_len": 1024,
        "fp8_amax_compute_algo": "max",
    }


def forget_quantized(chunks: Iterable[torch.nn.Module]) -> None:
    """Free the quantized copies of the weights; not between a forward and its backward pass.

    A layer that finds none makes one from its weight, in any micro-batch; those that it finds it
    fills anew in the first one of every run.
    """
    for chunk in chunks:
        for module in chunk.modules():
            if hasattr(module, _CACHE):
                getattr(module, _CACHE).clear()


def row_multiple(config: TransformerConfig) -> int:
    """Give what a rank's tokens of a packed row divide by, for sequence parallelism and FP8."""
    parts = config.tensor_model_parallel_size if config.sequence_parallel else 1
    if not config.fp8:
        return parts
    # sequence parallelism gathers tokens that are quantized already: each part is whole blocks
    return parts * (_BLOCK if config.fp8_recipe == "blockwise" else _ALIGN)
