"""The numbers of a model, read once from its Hugging Face config.json."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mrl.resharding.families.deepseek import DEEPSEEK_V2, DEEPSEEK_V3
from mrl.resharding.families.gemma import GEMMA2, GEMMA3_TEXT
from mrl.resharding.families.glm import GLM4, GLM4_MOE
from mrl.resharding.families.llama import LLAMA
from mrl.resharding.families.mistral import MISTRAL, MIXTRAL
from mrl.resharding.families.numbers import MLA_KEYS, MLAShape, MoEShape
from mrl.resharding.families.qwen2 import QWEN2
from mrl.resharding.families.qwen3 import QWEN3, QWEN3_MOE
from mrl.resharding.families.table import Entry, Family
from mrl.resharding.layout import DTYPE_BYTES, TensorInfo

REGISTRY: Mapping[str, Family] = {
    family.model_type: family
    for family in (
        LLAMA,
        MISTRAL,
        MIXTRAL,
        QWEN2,
        QWEN3,
        QWEN3_MOE,
        DEEPSEEK_V2,
        DEEPSEEK_V3,
        GEMMA2,
        GEMMA3_TEXT,
        GLM4,
        GLM4_MOE,
    )
}

_REQUIRED = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "vocab_size",
    "max_position_embeddings",
)
_LAYER_NAME = re.compile(r"model\.layers\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes and constants of a decoder, under their config.json meaning."""

    model_type: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int  # num_heads with latent attention
    head_dim: int  # of a query head
    ffn_size: int  # of a dense layer
    vocab_size: int  # unpadded: rows of the checkpoint's embedding
    tie_word_embeddings: bool
    features: frozenset[str]  # what the `when` of the table's entries may ask for
    rms_norm_eps: float
    max_position_embeddings: int
    rope_theta: float  # of full attention, where a model has sliding windows too
    rope_scaling: Mapping[str, Any] | None  # None for plain RoPE; else holds "rope_type"
    dtype: str  # of the checkpoint
    moe: MoEShape | None = None
    mla: MLAShape | None = None

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> ModelShape:
        """Read a config.json mapping (transformers 4 or 5 spelling).

        Raises ValueError, listing every violation, for an unknown `model_type`, missing sizes,
        and settings that would make a different model from the one that mrl builds.
        """
        model_type = str(config.get("model_type"))
        if model_type not in REGISTRY:
            known = ", ".join(sorted(REGISTRY))
            raise ValueError(f"config.json: model_type {model_type!r} is not supported ({known})")
        family = REGISTRY[model_type]
        config = {**family.defaults, **config}
        problems = list(_problems(config, family))
        if problems:
            raise ValueError(f"config.json ({model_type}): " + "; ".join(problems))
        heads = config["num_attention_heads"]
        theta, scaling = _rope(config)
        moe = MoEShape.read(config, family.moe_keys) if family.moe_keys else None
        mla = MLAShape.read(config) if family.mla else None
        head_dim = config.get("head_dim") or config["hidden_size"] // heads
        return cls(
            model_type=model_type,
            hidden_size=config["hidden_size"],
            num_layers=config["num_hidden_layers"],
            num_heads=heads,
            num_kv_heads=heads if mla else config.get("num_key_value_heads") or heads,
            head_dim=mla.qk_head_dim if mla else head_dim,
            ffn_size=config["intermediate_size"],
            vocab_size=config["vocab_size"],
            tie_word_embeddings=config.get("tie_word_embeddings", False),
            features=frozenset(_features(config, family, moe, mla)),
            rms_norm_eps=config.get("rms_norm_eps", 1e-6),
            max_position_embeddings=config["max_position_embeddings"],
            rope_theta=theta,
            rope_scaling=scaling,
            dtype=_dtype(config),
            moe=moe,
            mla=mla,
        )

    @classmethod
    def from_folder(cls, folder: Path) -> ModelShape:
        """Read `folder`/config.json; raises FileNotFoundError where there is none."""
        path = Path(folder) / "config.json"
        if not path.is_file():
            raise FileNotFoundError(f"{path}: a Hugging Face model folder has a config.json")
        return cls.from_hf(json.loads(path.read_text()))

    @property
    def family(self) -> Family:
        """Give the family's table."""
        return REGISTRY[self.model_type]

    @property
    def qkv_bias(self) -> bool:
        """Tell whether q, k and v have biases."""
        return "qkv_bias" in self.features

    @property
    def qk_norm(self) -> bool:
        """Tell whether each query and key head is normalised."""
        return "qk_norm" in self.features

    @property
    def dims(self) -> Mapping[str, int]:
        """Give the symbolic dimensions of the family tables."""
        return {
            "hidden": self.hidden_size,
            "ffn": self.ffn_size,
            "gate_and_up": 2 * self.ffn_size,
            "vocab": self.vocab_size,
            "head": self.head_dim,
            "query": self.num_heads * self.head_dim,
            "key": self.num_kv_heads * self.head_dim,
            **(self.moe.dims if self.moe else {}),
            **(self.mla.dims(self.num_heads) if self.mla else {}),
        }

    def has_experts(self, layer: int) -> bool:
        """Tell whether a layer (its global index) has experts instead of a dense MLP."""
        return self.moe is not None and layer in self.moe.layers

    def layer_entries(self, layer: int) -> tuple[Entry, ...]:
        """List the entries of a layer (its global index), those of this model only."""
        family = self.family
        mlp = family.moe if self.has_experts(layer) else family.mlp
        return tuple(
            entry
            for entry in (*family.attention, *mlp)
            if not entry.when or entry.when in self.features
        )

    def tensors(
        self, dtype: str | None = None, lm_head: bool = True, router_dtype: str | None = None
    ) -> dict[str, TensorInfo]:
        """List the logical tensors in model order.

        `dtype` is the checkpoint's unless given, `router_dtype` the routers' if it is another;
        what a table fixes to float32 stays so. `lm_head` False leaves the head out (critics).
        A tied model has no head of its own.
        """
        family, dims = self.family, self.dims
        dtype = dtype or self.dtype
        dtypes = {"model": dtype, "router": router_dtype or dtype}
        tensors: dict[str, TensorInfo] = {}

        def add(entry: Entry, **indices: int) -> None:
            for tensor in entry.logical:
                shape = tuple(dims[dim] for dim in tensor.dims)
                info = TensorInfo(shape, dtypes.get(tensor.dtype, tensor.dtype))
                tensors[tensor.name.format(**indices)] = info

        add(family.embedding)
        for layer in range(self.num_layers):
            for entry in self.layer_entries(layer):
                for expert in range(dims["experts"] if entry.experts else 1):
                    add(entry, layer=layer, expert=expert)
        add(family.final_norm)
        if lm_head and not self.tie_word_embeddings:
            add(family.lm_head)
        return tensors

    def ignores(self, name: str) -> bool:
        """Tell whether a checkpoint tensor is none of the model's that mrl trains.

        These are derived buffers, and the layers after the last one (multi-token prediction).
        """
        layer = _LAYER_NAME.match(name)
        is_extra = layer is not None and int(layer[1]) >= self.num_layers
        return is_extra or name.endswith(self.family.ignorable)


def _problems(config: Mapping[str, Any], family: Family) -> Iterator[str]:
    needed = (*_REQUIRED, *(MLA_KEYS if family.mla else ()))
    missing = [key for key in needed if key not in config]
    missing += MoEShape.missing(config, family.moe_keys) if family.moe_keys else []
    if missing:
        yield f"missing {', '.join(missing)}"
    for key, value in family.fixed.items():
        if key in config and config[key] != value:
            yield f"{key} is {config[key]!r}, only {value!r} is supported"
    for key, value in family.required.items():
        if config.get(key) != value:
            yield f"{key} is {config.get(key)!r}, vLLM builds this family with {value!r} only"
    if _dtype(config) not in DTYPE_BYTES:
        yield f"dtype is {_dtype(config)!r}, expected one of {', '.join(DTYPE_BYTES)}"
    if "quantization_config" in config:
        yield "quantization_config is set: only unquantised checkpoints are supported"
    heads, kv_heads = config.get("num_attention_heads"), config.get("num_key_value_heads")
    if heads and kv_heads and not family.mla and heads % kv_heads:
        yield f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}"


def _features(
    config: Mapping[str, Any], family: Family, moe: MoEShape | None, mla: MLAShape | None
) -> Iterator[str]:
    for feature, source in family.features.items():
        if source is True or config.get(str(source)):
            yield feature
    if moe and moe.shared_ffn_size:
        yield "shared_experts"
    if mla:
        yield "direct_query" if mla.q_lora_rank is None else "latent_query"


def _dtype(config: Mapping[str, Any]) -> str:
    # transformers 5 writes `dtype`, transformers 4 `torch_dtype`; without either it means float32
    return config.get("dtype") or config.get("torch_dtype") or "float32"


def _rope(config: Mapping[str, Any]) -> tuple[float, Mapping[str, Any] | None]:
    # transformers 5 keeps theta and scaling in `rope_parameters`, transformers 4 apart
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    rope = dict(rope.get("full_attention", rope))  # Gemma 3: one for each kind of attention
    theta = rope.pop("rope_theta", None) or config.get("rope_theta", 10000.0)
    kind = rope.pop("type", None) or rope.get("rope_type", "default")
    rope["rope_type"] = kind
    return float(theta), None if kind == "default" else rope
