"""Qwen3: norms of queries and keys, no biases; Qwen3-MoE: experts in all layers or some."""

from __future__ import annotations

from mrl.resharding.families import decoder
from mrl.resharding.families.table import Family, MoEKeys

# transformers puts `attention_bias` on the output projection too, vLLM does not
_FIXED = {"hidden_act": "silu", "attention_bias": False, "use_sliding_window": False}

QWEN3 = Family(
    model_type="qwen3",
    embedding=decoder.EMBEDDING,
    attention=(decoder.INPUT_NORM, *decoder.ATTENTION),
    mlp=(decoder.mlp_norm("post_attention_layernorm"), *decoder.MLP),
    final_norm=decoder.FINAL_NORM,
    lm_head=decoder.LM_HEAD,
    features={"qk_norm": True},
    defaults={"head_dim": 128},
    fixed=_FIXED,
)

QWEN3_MOE = Family(
    model_type="qwen3_moe",
    embedding=decoder.EMBEDDING,
    attention=(decoder.INPUT_NORM, *decoder.ATTENTION),
    mlp=(decoder.mlp_norm("post_attention_layernorm"), *decoder.MLP),
    moe=(
        decoder.moe_norm("post_attention_layernorm"),
        *decoder.router("mlp"),
        *decoder.experts("mlp", "gate_proj", "up_proj", "down_proj"),
    ),
    final_norm=decoder.FINAL_NORM,
    lm_head=decoder.LM_HEAD,
    # transformers 5 writes `num_local_experts`
    moe_keys=MoEKeys(
        ("num_experts", "num_local_experts"),
        dense_layers=("mlp_only_layers", "decoder_sparse_step"),
    ),
    features={"qk_norm": True},
    defaults={"norm_topk_prob": False},
    fixed=_FIXED,
)
