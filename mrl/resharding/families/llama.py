"""Llama 2 and 3: no biases; embeddings tied in Llama 3.2 1B and 3B."""

from __future__ import annotations

from mrl.resharding.families import decoder
from mrl.resharding.families.table import Family

LLAMA = Family(
    model_type="llama",
    embedding=decoder.EMBEDDING,
    attention=(decoder.INPUT_NORM, *decoder.ATTENTION),
    mlp=(decoder.mlp_norm("post_attention_layernorm"), *decoder.MLP),
    final_norm=decoder.FINAL_NORM,
    lm_head=decoder.LM_HEAD,
    fixed={"hidden_act": "silu", "attention_bias": False, "mlp_bias": False},
)
