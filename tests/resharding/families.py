"""A tiny config of every family, the way its config.json is written."""

from __future__ import annotations

from transformers import AutoConfig, PretrainedConfig

from mrl.resharding import ModelShape

_SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "intermediate_size": 24,
    "vocab_size": 13,
    "max_position_embeddings": 64,
    "pad_token_id": None,
    "sliding_window": None,
}
_EXPERTS = {"moe_intermediate_size": 6, "num_experts_per_tok": 2}
_SHARED = _EXPERTS | {"n_routed_experts": 4, "n_shared_experts": 2, "first_k_dense_replace": 1}
_MLA = {"kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 6}
_V3 = _SHARED | _MLA | {"n_group": 2, "topk_group": 1}
_V3 |= {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}

# name -> model_type, config.json keys that differ from the sizes above
CASES: dict[str, tuple[str, dict[str, object]]] = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "mistral": ("mistral", {}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "qwen3_moe": ("qwen3_moe", _EXPERTS | {"num_experts": 4}),
    "qwen3_moe-some": ("qwen3_moe", _EXPERTS | {"num_experts": 4, "mlp_only_layers": [1]}),
    "qwen3_moe-step": ("qwen3_moe", _EXPERTS | {"num_experts": 4, "decoder_sparse_step": 2}),
    "mixtral": ("mixtral", {"num_local_experts": 4}),
    "deepseek_v2": ("deepseek_v2", _SHARED | _MLA | {"q_lora_rank": 8}),
    "deepseek_v2-lite": ("deepseek_v2", _SHARED | _MLA | {"q_lora_rank": None}),
    "deepseek_v3": ("deepseek_v3", _V3 | {"q_lora_rank": 8}),
    "gemma2": ("gemma2", {}),
    "gemma3_text": ("gemma3_text", {}),
    "glm4": ("glm4", {}),
    "glm4_moe": ("glm4_moe", _SHARED),
    "glm4_moe-all": ("glm4_moe", _SHARED | {"use_qk_norm": True, "attention_bias": True}),
}


def tiny_config(case: str, **changes: object) -> PretrainedConfig:
    model_type, own = CASES[case]
    return AutoConfig.for_model(model_type, **_SIZES | own | changes)


def tiny_model(case: str, **changes: object) -> ModelShape:
    return ModelShape.from_hf(tiny_config(case, **changes).to_dict())
