"""DeepSeek-V2 and V3: latent attention, shared experts beside the routed ones.

Layers after the last one are for multi-token prediction: neither trained nor served.
"""

from __future__ import annotations

from dataclasses import replace

from mrl.resharding.families import decoder
from mrl.resharding.families.decoder import HF_LAYER, MEGATRON_LAYER, linear, logical, norm
from mrl.resharding.families.table import Entry, Family, MoEKeys, same_name

_ENGINE_DOWN = HF_LAYER + "self_attn.fused_qkv_a_proj.weight"


def _down(hf: str, rows: str, megatron: str, engine: str, after: str = "", when: str = "") -> Entry:
    weight = logical(f"self_attn.{hf}.weight", rows, "hidden")
    names = same_name(f"{MEGATRON_LAYER}self_attention.{megatron}.weight")
    before = (after,) if after else ()
    return Entry("mla_down", (weight,), names, engine, "replicated", before, when=when)


_ATTENTION = (
    norm("input_layernorm", "input_layernorm"),  # Transformer Engine does not fuse it either
    linear(
        "column",
        logical("self_attn.q_proj.weight", "query", "hidden"),
        "self_attention.linear_q_proj",
        when="direct_query",
    ),
    _down("q_a_proj", "q_lora", "linear_q_down_proj", _ENGINE_DOWN, when="latent_query"),
    norm(
        "self_attn.q_a_layernorm",
        "self_attention.q_layernorm",
        "self_attention.linear_q_up_proj.layer_norm_weight",
        dim="q_lora",
        when="latent_query",
    ),
    linear(
        "column",
        logical("self_attn.q_b_proj.weight", "query", "q_lora"),
        "self_attention.linear_q_up_proj",
        when="latent_query",
    ),
    _down(
        "kv_a_proj_with_mqa",
        "kv_lora_and_rope",
        "linear_kv_down_proj",
        _ENGINE_DOWN,
        after="q_lora",
        when="latent_query",
    ),
    _down(
        "kv_a_proj_with_mqa",
        "kv_lora_and_rope",
        "linear_kv_down_proj",
        HF_LAYER + "self_attn.kv_a_proj_with_mqa.weight",
        when="direct_query",
    ),
    norm(
        "self_attn.kv_a_layernorm",
        "self_attention.kv_layernorm",
        "self_attention.linear_kv_up_proj.layer_norm_weight",
        dim="kv_lora",
    ),
    linear(
        "column",
        logical("self_attn.kv_b_proj.weight", "latent_key_value", "kv_lora"),
        "self_attention.linear_kv_up_proj",
    ),
    linear(
        "row", logical("self_attn.o_proj.weight", "hidden", "value"), "self_attention.linear_proj"
    ),
)
_MLP = (decoder.mlp_norm("post_attention_layernorm"), *decoder.MLP)
_MOE = (
    decoder.moe_norm("post_attention_layernorm"),
    *decoder.router("mlp"),
    *decoder.SHARED_EXPERTS,
    *decoder.experts("mlp", "gate_proj", "up_proj", "down_proj"),
)
_MOE_KEYS = MoEKeys(
    ("n_routed_experts",), num_shared="n_shared_experts", dense_layers=("first_k_dense_replace",)
)
_FIXED = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "moe_layer_freq": 1}

DEEPSEEK_V2 = Family(
    model_type="deepseek_v2",
    embedding=decoder.EMBEDDING,
    attention=_ATTENTION,
    mlp=_MLP,
    moe=_MOE,
    final_norm=decoder.FINAL_NORM,
    lm_head=decoder.LM_HEAD,
    moe_keys=_MOE_KEYS,
    mla=True,
    defaults={"norm_topk_prob": False},
    fixed=_FIXED | {"scoring_func": "softmax"},
)

DEEPSEEK_V3 = Family(
    model_type="deepseek_v3",
    embedding=decoder.EMBEDDING,
    attention=_ATTENTION,
    mlp=_MLP,
    moe=_MOE,
    final_norm=decoder.FINAL_NORM,
    lm_head=decoder.LM_HEAD,
    moe_keys=replace(_MOE_KEYS, score_function="sigmoid"),
    mla=True,
    features={"expert_bias": True},
    defaults={"norm_topk_prob": True, "first_k_dense_replace": 3},
    fixed=_FIXED,
    # without them vLLM takes the softmax of V2 and has no correction bias
    required={"topk_method": "noaux_tc", "scoring_func": "sigmoid"},
)
