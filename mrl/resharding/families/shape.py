"""The numbers of a model, read once from its Hugging Face config.json."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mrl.resharding.families.llama import LLAMA
from mrl.resharding.families.qwen2 import QWEN2
from mrl.resharding.families.table import Entry, Family
from mrl.resharding.layout import DTYPE_BYTES, TensorInfo

REGISTRY: Mapping[str, Family] = {family.model_type: family for family in (LLAMA, QWEN2)}

_REQUIRED = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "vocab_size",
)


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes and constants of a dense decoder, under their config.json meaning."""

    model_type: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    vocab_size: int  # unpadded: rows of the checkpoint's embedding
    tie_word_embeddings: bool
    qkv_bias: bool
    rms_norm_eps: float
    max_position_embeddings: int
    rope_theta: float
    rope_scaling: Mapping[str, Any] | None  # None for plain RoPE; else holds "rope_type"
    dtype: str  # of the checkpoint

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
        problems = list(_problems(config, REGISTRY[model_type]))
        if problems:
            raise ValueError(f"config.json ({model_type}): " + "; ".join(problems))
        heads = config["num_attention_heads"]
        theta, scaling = _rope(config)
        return cls(
            model_type=model_type,
            hidden_size=config["hidden_size"],
            num_layers=config["num_hidden_layers"],
            num_heads=heads,
            num_kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            ffn_size=config["intermediate_size"],
            vocab_size=config["vocab_size"],
            tie_word_embeddings=config.get("tie_word_embeddings", False),
            qkv_bias=REGISTRY[model_type].qkv_bias,
            rms_norm_eps=config.get("rms_norm_eps", 1e-6),  # the default of both config classes
            max_position_embeddings=config["max_position_embeddings"],
            rope_theta=theta,
            rope_scaling=scaling,
            dtype=_dtype(config),
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
    def dims(self) -> Mapping[str, int]:
        """Give the symbolic dimensions of the family tables."""
        return {
            "hidden": self.hidden_size,
            "ffn": self.ffn_size,
            "vocab": self.vocab_size,
            "query": self.num_heads * self.head_dim,
            "key": self.num_kv_heads * self.head_dim,
        }

    def tensors(self, dtype: str | None = None, lm_head: bool = True) -> dict[str, TensorInfo]:
        """List the logical tensors in model order.

        `dtype` is the checkpoint's unless given; `lm_head` False leaves the head out (critics).
        A tied model has no head of its own.
        """
        family, dims, dtype = self.family, self.dims, dtype or self.dtype
        tensors: dict[str, TensorInfo] = {}

        def add(entry: Entry, layer: int = 0) -> None:
            for logical in entry.logical:
                shape = tuple(dims[dim] for dim in logical.dims)
                tensors[logical.name.format(layer=layer)] = TensorInfo(shape, dtype)

        add(family.embedding)
        for layer in range(self.num_layers):
            for entry in family.layer:
                add(entry, layer)
        add(family.final_norm)
        if lm_head and not self.tie_word_embeddings:
            add(family.lm_head)
        return tensors


def _problems(config: Mapping[str, Any], family: Family) -> Iterator[str]:
    missing = [key for key in (*_REQUIRED, "max_position_embeddings") if key not in config]
    if missing:
        yield f"missing {', '.join(missing)}"
    for key, value in family.fixed.items():
        if key in config and config[key] != value:
            yield f"{key} is {config[key]!r}, only {value!r} is supported"
    if _dtype(config) not in DTYPE_BYTES:
        yield f"dtype is {_dtype(config)!r}, expected one of {', '.join(DTYPE_BYTES)}"
    if "quantization_config" in config:
        yield "quantization_config is set: only unquantised checkpoints are supported"
    heads, kv_heads = config.get("num_attention_heads"), config.get("num_key_value_heads")
    if heads and kv_heads and heads % kv_heads:
        yield f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}"


def _dtype(config: Mapping[str, Any]) -> str:
    # transformers 5 writes `dtype`, transformers 4 `torch_dtype`; without either it means float32
    return config.get("dtype") or config.get("torch_dtype") or "float32"


def _rope(config: Mapping[str, Any]) -> tuple[float, Mapping[str, Any] | None]:
    # transformers 5 keeps theta and scaling in `rope_parameters`, transformers 4 apart
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    theta = rope.pop("rope_theta", None) or config.get("rope_theta", 10000.0)
    kind = rope.pop("type", None) or rope.get("rope_type", "default")
    rope["rope_type"] = kind
    return float(theta), None if kind == "default" else rope
