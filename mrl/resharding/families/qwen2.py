"""Qwen2 and Qwen2.5: biases on q, k and v only; embeddings tied in the small models."""

from __future__ import annotations

from mrl.resharding.families import decoder
from mrl.resharding.families.table import Family

QWEN2 = Family(
    model_type="qwen2",
    embedding=decoder.EMBEDDING,
    attention=(decoder.INPUT_NORM, *decoder.ATTENTION),
    mlp=(decoder.mlp_norm("post_attention_layernorm"), *decoder.MLP),
    final_norm=decoder.FINAL_NORM,
    lm_head=decoder.LM_HEAD,
    features={"qkv_bias": True},
    fixed={"hidden_act": "silu", "use_sliding_window": False},
)
