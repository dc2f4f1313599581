"""GLM-4: norms around attention and MLP, gate and up in one tensor; GLM-4.5 and 4.6: experts.

GLM-4's `post_attention_layernorm` is the norm before the MLP, as in Llama and not as in Gemma.
"""

from __future__ import annotations

from mrl.resharding.families import decoder
from mrl.resharding.families.decoder import HF_LAYER, MEGATRON_LAYER, logical
from mrl.resharding.families.table import Entry, Family, MoEKeys, same_name

_GATE_UP = Entry(
    "fused_gated",
    (logical("mlp.gate_up_proj.weight", "gate_and_up", "hidden"),),
    same_name(MEGATRON_LAYER + "mlp.linear_fc1.weight"),
    HF_LAYER + "mlp.gate_up_proj.weight",
    "fused_gated",
)
_DOWN = decoder.MLP[1]

GLM4 = Family(
    model_type="glm4",
    embedding=decoder.EMBEDDING,
    attention=(
        decoder.INPUT_NORM,
        *decoder.ATTENTION,
        decoder.attention_out_norm("post_self_attn_layernorm"),
    ),
    mlp=(
        decoder.mlp_norm("post_attention_layernorm"),
        _GATE_UP,
        _DOWN,
        decoder.mlp_out_norm("post_mlp_layernorm"),
    ),
    final_norm=decoder.FINAL_NORM,
    lm_head=decoder.LM_HEAD,
    features={"qkv_bias": "attention_bias"},
    defaults={
        "attention_bias": True,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "rms_norm_eps": 1.5625e-7,
    },
    fixed={"hidden_act": "silu"},
)

GLM4_MOE = Family(
    model_type="glm4_moe",
    embedding=decoder.EMBEDDING,
    attention=(decoder.INPUT_NORM, *decoder.ATTENTION),
    mlp=(decoder.mlp_norm("post_attention_layernorm"), *decoder.MLP),
    moe=(
        decoder.moe_norm("post_attention_layernorm"),
        *decoder.router("mlp"),
        *decoder.SHARED_EXPERTS,
        *decoder.experts("mlp", "gate_proj", "up_proj", "down_proj"),
    ),
    final_norm=decoder.FINAL_NORM,
    lm_head=decoder.LM_HEAD,
    moe_keys=MoEKeys(
        ("n_routed_experts",),
        num_shared="n_shared_experts",
        dense_layers=("first_k_dense_replace",),
        score_function="sigmoid",
    ),
    features={"qkv_bias": "attention_bias", "qk_norm": "use_qk_norm", "expert_bias": True},
    defaults={
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "norm_topk_prob": True,
        "first_k_dense_replace": 1,
    },
    fixed={"hidden_act": "silu"},
)
