"""The words of a family table: the tensors of a model, and which parameters hold them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Logical:
    """A checkpoint tensor: its name and symbolic dimensions.

    In the name `{layer}` is the layer's global index and `{expert}` the expert's. A dimension is
    a key of `ModelShape.dims`. `dtype` is "model" (the role's), "router" (the router's, which may
    be kept more exact) or the only dtype that the tensor may have, such as "float32".
    """

    name: str
    dims: tuple[str, ...]
    dtype: str = "model"


@dataclass(frozen=True, slots=True)
class Entry:
    """Logical tensors that share one Megatron parameter and one vLLM parameter.

    `kind` says how Megatron cuts it over TP (a key of `mrl.resharding.cuts.CUTS`) and
    `engine_kind` how vLLM does. `megatron` gives the parameter's name for each transformer
    implementation and, for experts, for "grouped" ones; `{layer}` is the index inside the model
    chunk and `{expert}` the index on the rank. `engine` is the vLLM parameter. An entry of
    experts stands for one parameter an expert, cut over expert TP; vLLM stacks its experts in
    dimension 0.
    """

    kind: str
    logical: tuple[Logical, ...]  # in the order in which the kind stacks them
    megatron: Mapping[str, str]
    engine: str
    engine_kind: str
    engine_after: tuple[str, ...] = ()  # dimensions of what is stacked before it in the engine
    experts: bool = False
    when: str = ""  # a member of `ModelShape.features`; empty: always there


@dataclass(frozen=True, slots=True)
class MoEKeys:
    """The config.json keys of a family's experts; None where the family has no such number."""

    num_experts: tuple[str, ...]  # any of these spellings
    top_k: str = "num_experts_per_tok"
    ffn_size: str = "moe_intermediate_size"
    num_shared: str | None = None  # shared experts, each as wide as a routed one
    dense_layers: tuple[str, ...] = ()  # keys of `numbers.DENSE_LAYERS`: which layers keep MLPs
    score_function: str = "softmax"  # or sigmoid


@dataclass(frozen=True, slots=True)
class Family:
    """All parameters of a model family, by place in the pipeline, and how its config reads."""

    model_type: str
    embedding: Entry  # first stage
    attention: tuple[Entry, ...]  # every layer, with its norms
    mlp: tuple[Entry, ...]  # dense layers, with its norms
    final_norm: Entry  # last stage
    lm_head: Entry  # last stage; absent when tied
    moe: tuple[Entry, ...] = ()  # mixture-of-experts layers, with its norms
    moe_keys: MoEKeys | None = None
    mla: bool = False  # multi-head latent attention
    activation: str = "silu"
    # feature -> True, or the config.json key that switches it on
    features: Mapping[str, str | bool] = field(default_factory=dict)
    # what an absent config.json key means, where the config classes of the families differ
    defaults: Mapping[str, object] = field(default_factory=dict)
    # config.json keys that must have this value where present: other values change the model
    # in a way that the table does not describe
    fixed: Mapping[str, object] = field(default_factory=dict)
    # config.json keys that must be there with this value: vLLM builds another model without
    required: Mapping[str, object] = field(default_factory=dict)
    ignorable: tuple[str, ...] = ("rotary_emb.inv_freq",)  # endings of checkpoint names


def same_name(name: str) -> Mapping[str, str]:
    """Use one Megatron name for every transformer implementation."""
    return {"local": name, "transformer_engine": name}
