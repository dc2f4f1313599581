"""Gemma 2 and 3: a norm before and after attention and MLP; the norms store weight - 1."""

from __future__ import annotations

from mrl.resharding.families import decoder
from mrl.resharding.families.table import Family

_ATTENTION = (
    decoder.INPUT_NORM,
    *decoder.ATTENTION,
    decoder.attention_out_norm("post_attention_layernorm"),
)
_MLP = (
    decoder.mlp_norm("pre_feedforward_layernorm"),
    *decoder.MLP,
    decoder.mlp_out_norm("post_feedforward_layernorm"),
)
_DEFAULTS = {"tie_word_embeddings": True, "num_key_value_heads": 4, "head_dim": 256}
_FIXED = {
    "hidden_activation": "gelu_pytorch_tanh",
    "attention_bias": False,
    "tie_word_embeddings": True,  # vLLM's Gemma 2 has no head of its own
}

GEMMA2 = Family(
    model_type="gemma2",
    embedding=decoder.EMBEDDING,
    attention=_ATTENTION,
    mlp=_MLP,
    final_norm=decoder.FINAL_NORM,
    lm_head=decoder.LM_HEAD,
    activation="gelu_pytorch_tanh",
    features={"zero_centered_norm": True},
    defaults=_DEFAULTS,
    fixed=_FIXED,
)

GEMMA3_TEXT = Family(
    model_type="gemma3_text",
    embedding=decoder.EMBEDDING,
    attention=_ATTENTION,
    mlp=_MLP,
    final_norm=decoder.FINAL_NORM,
    lm_head=decoder.LM_HEAD,
    activation="gelu_pytorch_tanh",
    features={"zero_centered_norm": True, "qk_norm": True},
    defaults=_DEFAULTS,
    fixed=_FIXED,
)
