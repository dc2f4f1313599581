"""Qwen2 and Qwen2.5: biases on q, k and v only; embeddings tied in the small models."""

from __future__ import annotations

from mrl.resharding.families import decoder
from mrl.resharding.families.table import Family

QWEN2 = Family(
    model_type="qwen2",
    embedding=decoder.EMBEDDING,
    layer=(
        decoder.INPUT_NORM,
        decoder.QKV_WEIGHT,
        decoder.QKV_BIAS,
        decoder.ATTENTION_OUT,
        decoder.MLP_NORM,
        decoder.GATE_UP,
        decoder.DOWN,
    ),
    final_norm=decoder.FINAL_NORM,
    lm_head=decoder.LM_HEAD,
    qkv_bias=True,
    fixed={"hidden_act": "silu", "use_sliding_window": False},
)
