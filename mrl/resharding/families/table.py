"""The words of a family table: logical tensors and the Megatron parameter that holds them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Logical:
    """A checkpoint tensor: its name (`{layer}` is the global index) and symbolic dimensions.

    A dimension is a key of `ModelShape.dims`.
    """

    name: str
    dims: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Entry:
    """Logical tensors stored together in one Megatron parameter, cut over TP by `kind`.

    `kind` is a key of `mrl.resharding.megatron.CUTS`; `megatron` gives the parameter's name for
    each transformer implementation (`{layer}` is the stage's own index).
    """

    kind: str
    logical: tuple[Logical, ...]  # in the order in which the kind stacks them
    megatron: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Family:
    """All parameters of a model family, by place in the pipeline."""

    model_type: str
    embedding: Entry  # first stage
    layer: tuple[Entry, ...]  # the stage that owns the layer
    final_norm: Entry  # last stage
    lm_head: Entry  # last stage; absent when tied
    qkv_bias: bool
    # config.json keys that must have this value where present: other values change the model
    # in a way that the table does not describe
    fixed: Mapping[str, object]
    ignorable: tuple[str, ...] = field(default=("rotary_emb.inv_freq",))  # name endings


def same_name(name: str) -> Mapping[str, str]:
    """Use one Megatron name for every transformer implementation."""
    return {"local": name, "transformer_engine": name}
