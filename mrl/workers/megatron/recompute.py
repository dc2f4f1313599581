"""Activations that are computed again in the backward pass instead of being kept."""

from __future__ import annotations

from typing import Any

from mrl.config.schema import MegatronConfig
from mrl.resharding.families import ModelShape


def recompute_config(shape: ModelShape, layout: MegatronConfig, uses_te: bool) -> dict[str, Any]:
    """Say in Megatron's terms what is computed again; `full` is every layer unless it says less.

    Raises ValueError for a part that a layer of this model and implementation does not have.
    """
    granularity, modules = layout.recompute_granularity, layout.recompute_modules
    if granularity is None:
        return {}
    if granularity == "full":
        return {
            "recompute_granularity": "full",
            "recompute_method": layout.recompute_method or "uniform",
            "recompute_num_layers": layout.recompute_num_layers or 1,
        }
    for module in modules:
        if reason := _missing(module, shape, uses_te):
            raise ValueError(
                f"megatron.recompute_modules: {module} {reason}; found {', '.join(modules)}"
            )
    return {"recompute_granularity": "selective", "recompute_modules": list(modules)}


def _missing(module: str, shape: ModelShape, uses_te: bool) -> str:
    """Say why a layer has no such part, "" where one has."""
    if module == "shared_experts":
        return "needs a model with shared experts, none of which can be trained"
    if module in ("moe", "moe_act", "layernorm") and shape.moe is None:
        fused = ": other norms are kept or part of a linear layer" if module == "layernorm" else ""
        return f"needs a model with experts{fused}"
    if module == "moe_act" and not (uses_te and shape.moe):
        return "needs grouped experts, which are Transformer Engine's"
    # Megatron 0.19 asks Transformer Engine's FP8 state there, with FP8 or without
    if module == "layernorm" and not uses_te:
        return "needs transformer_impl=transformer_engine"
    return ""
