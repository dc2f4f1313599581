"""Mistral, which is Llama's arrangement, and Mixtral, which adds experts in every layer."""

from __future__ import annotations

from mrl.resharding.families import decoder
from mrl.resharding.families.table import Family, MoEKeys

# with a sliding window the models attend to less than mrl's do
_FIXED = {"hidden_act": "silu", "sliding_window": None}

MISTRAL = Family(
    model_type="mistral",
    embedding=decoder.EMBEDDING,
    attention=(decoder.INPUT_NORM, *decoder.ATTENTION),
    mlp=(decoder.mlp_norm("post_attention_layernorm"), *decoder.MLP),
    final_norm=decoder.FINAL_NORM,
    lm_head=decoder.LM_HEAD,
    defaults={"num_key_value_heads": 8},
    fixed=_FIXED,
)

MIXTRAL = Family(
    model_type="mixtral",
    embedding=decoder.EMBEDDING,
    attention=(decoder.INPUT_NORM, *decoder.ATTENTION),
    mlp=(),
    moe=(
        decoder.moe_norm("post_attention_layernorm"),
        *decoder.router("block_sparse_moe"),
        *decoder.experts("block_sparse_moe", "w1", "w3", "w2"),
    ),
    final_norm=decoder.FINAL_NORM,
    lm_head=decoder.LM_HEAD,
    moe_keys=MoEKeys(("num_local_experts",), ffn_size="intermediate_size"),
    defaults={"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "norm_topk_prob": True},
    fixed=_FIXED | {"norm_topk_prob": True},
)
