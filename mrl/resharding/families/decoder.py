"""Entries that the dense pre-norm decoders share.

Megatron names and TP cuts follow megatron-core 0.19 `models/gpt/gpt_layer_specs.py`: Transformer
Engine fuses each norm into the linear layer that follows it.
"""

from __future__ import annotations

from mrl.resharding.families.table import Entry, Logical, same_name

_HF_LAYER = "model.layers.{layer}."
_MEGATRON_LAYER = "decoder.layers.{layer}."


def _logical(name: str, *dims: str) -> Logical:
    return Logical(_HF_LAYER + name, dims)


def _norm(hf: str, local: str, fused_into: str) -> Entry:
    names = {
        "local": f"{_MEGATRON_LAYER}{local}.weight",
        "transformer_engine": f"{_MEGATRON_LAYER}{fused_into}.layer_norm_weight",
    }
    return Entry("replicated", (_logical(f"{hf}.weight", "hidden"),), names)


EMBEDDING = Entry(
    "vocab",
    (Logical("model.embed_tokens.weight", ("vocab", "hidden")),),
    same_name("embedding.word_embeddings.weight"),
)
FINAL_NORM = Entry(
    "replicated",
    (Logical("model.norm.weight", ("hidden",)),),
    same_name("decoder.final_layernorm.weight"),
)
LM_HEAD = Entry(
    "vocab",
    (Logical("lm_head.weight", ("vocab", "hidden")),),
    same_name("output_layer.weight"),
)
INPUT_NORM = _norm("input_layernorm", "input_layernorm", "self_attention.linear_qkv")
MLP_NORM = _norm("post_attention_layernorm", "pre_mlp_layernorm", "mlp.linear_fc1")
QKV_WEIGHT = Entry(
    "qkv",
    (
        _logical("self_attn.q_proj.weight", "query", "hidden"),
        _logical("self_attn.k_proj.weight", "key", "hidden"),
        _logical("self_attn.v_proj.weight", "key", "hidden"),
    ),
    same_name(_MEGATRON_LAYER + "self_attention.linear_qkv.weight"),
)
QKV_BIAS = Entry(
    "qkv",
    (
        _logical("self_attn.q_proj.bias", "query"),
        _logical("self_attn.k_proj.bias", "key"),
        _logical("self_attn.v_proj.bias", "key"),
    ),
    same_name(_MEGATRON_LAYER + "self_attention.linear_qkv.bias"),
)
ATTENTION_OUT = Entry(
    "row",
    (_logical("self_attn.o_proj.weight", "hidden", "query"),),
    same_name(_MEGATRON_LAYER + "self_attention.linear_proj.weight"),
)
GATE_UP = Entry(
    "gated",
    (
        _logical("mlp.gate_proj.weight", "ffn", "hidden"),
        _logical("mlp.up_proj.weight", "ffn", "hidden"),
    ),
    same_name(_MEGATRON_LAYER + "mlp.linear_fc1.weight"),
)
DOWN = Entry(
    "row",
    (_logical("mlp.down_proj.weight", "hidden", "ffn"),),
    same_name(_MEGATRON_LAYER + "mlp.linear_fc2.weight"),
)
