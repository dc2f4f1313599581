"""The numbers that only some families have: experts, and latent attention."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mrl.resharding.families.table import MoEKeys

# config.json key -> whether a layer keeps a dense MLP, from the key's value and the layer's index
DENSE_LAYERS: Mapping[str, Callable[[Any, int], bool]] = {
    "first_k_dense_replace": lambda value, layer: layer < (value or 0),
    "mlp_only_layers": lambda value, layer: layer in (value or ()),
    "decoder_sparse_step": lambda value, layer: (layer + 1) % (value or 1) != 0,
}
MLA_KEYS = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


@dataclass(frozen=True, slots=True)
class MoEShape:
    """Sizes and routing of the experts of a model."""

    num_experts: int
    top_k: int
    ffn_size: int  # of one routed expert
    shared_ffn_size: int  # of all shared experts, which work as one MLP; 0: none
    layers: tuple[int, ...]  # those that have experts, ascending; the others keep a dense MLP
    score_function: str  # softmax | sigmoid
    norm_top_k: bool  # the weights of the chosen experts sum to 1
    scaling_factor: float  # of those weights
    num_groups: int  # of experts, for a choice limited to some groups
    top_k_groups: int

    @classmethod
    def read(cls, config: Mapping[str, Any], keys: MoEKeys) -> MoEShape:
        """Read a config.json mapping in which `missing` finds nothing missing."""
        rules = [(DENSE_LAYERS[key], config.get(key)) for key in keys.dense_layers]
        ffn_size = config[keys.ffn_size]
        num_shared = (config.get(keys.num_shared) or 0) if keys.num_shared else 0
        return cls(
            num_experts=next(config[key] for key in keys.num_experts if key in config),
            top_k=config[keys.top_k],
            ffn_size=ffn_size,
            shared_ffn_size=num_shared * ffn_size,
            layers=tuple(
                layer
                for layer in range(config["num_hidden_layers"])
                if not any(is_dense(value, layer) for is_dense, value in rules)
            ),
            score_function=keys.score_function,
            norm_top_k=config["norm_topk_prob"],
            scaling_factor=config.get("routed_scaling_factor") or 1.0,
            num_groups=config.get("n_group") or 1,
            top_k_groups=config.get("topk_group") or 1,
        )

    @staticmethod
    def missing(config: Mapping[str, Any], keys: MoEKeys) -> list[str]:
        """List the keys that `read` needs and does not find."""
        sizes = [key for key in (keys.top_k, keys.ffn_size) if config.get(key) is None]
        has_experts = any(key in config for key in keys.num_experts)
        return sizes if has_experts else [" or ".join(keys.num_experts), *sizes]

    @property
    def dims(self) -> Mapping[str, int]:
        """Give the symbolic dimensions of the family tables."""
        return {
            "experts": self.num_experts,
            "expert_ffn": self.ffn_size,
            "shared_ffn": self.shared_ffn_size,
        }


@dataclass(frozen=True, slots=True)
class MLAShape:
    """Sizes of multi-head latent attention (DeepSeek-V2, arXiv 2405.04434)."""

    q_lora_rank: int | None  # None: queries are projected directly
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> MLAShape:
        """Read a config.json mapping that has every one of `MLA_KEYS`."""
        return cls(**{key: config[key] for key in MLA_KEYS})

    @property
    def qk_head_dim(self) -> int:
        """Give the width of a query head."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    def dims(self, num_heads: int) -> Mapping[str, int]:
        """Give the symbolic dimensions of the family tables."""
        return {
            "q_lora": self.q_lora_rank or 0,
            "kv_lora": self.kv_lora_rank,
            "kv_lora_and_rope": self.kv_lora_rank + self.qk_rope_head_dim,
            "latent_key_value": num_heads * (self.qk_nope_head_dim + self.v_head_dim),
            "value": num_heads * self.v_head_dim,
        }
