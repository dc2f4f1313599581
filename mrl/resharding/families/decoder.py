"""Entries that the decoder families share.

Megatron names and TP cuts follow megatron-core 0.19 `models/gpt/gpt_layer_specs.py` (Transformer
Engine fuses a norm into the linear layer that follows it), vLLM names and cuts vLLM 0.26
`model_executor/models`.
"""

from __future__ import annotations

from mrl.resharding.families.table import Entry, Logical, same_name

HF_LAYER = "model.layers.{layer}."
MEGATRON_LAYER = "decoder.layers.{layer}."


def logical(name: str, *dims: str, dtype: str = "model") -> Logical:
    """Name a tensor of a layer."""
    return Logical(HF_LAYER + name, dims, dtype)


def norm(hf: str, local: str, te: str | None = None, dim: str = "hidden", when: str = "") -> Entry:
    """Describe a norm of a layer; `te` is its whole name where Transformer Engine fuses it."""
    names = {
        "local": f"{MEGATRON_LAYER}{local}.weight",
        "transformer_engine": MEGATRON_LAYER + (te or f"{local}.weight"),
    }
    weight = logical(f"{hf}.weight", dim)
    return Entry("replicated", (weight,), names, weight.name, "replicated", when=when)


def linear(kind: str, weight: Logical, megatron: str, when: str = "") -> Entry:
    """Describe a matrix that both sides keep whole or cut along one dimension."""
    names = same_name(f"{MEGATRON_LAYER}{megatron}.weight")
    return Entry(kind, (weight,), names, weight.name, kind, when=when)


def gated(hf: str, megatron: str, ffn: str, when: str = "") -> tuple[Entry, Entry]:
    """Describe a gated MLP: gate and up share one parameter, down has its own."""
    gate = logical(f"{hf}.gate_proj.weight", ffn, "hidden")
    up = logical(f"{hf}.up_proj.weight", ffn, "hidden")
    down = logical(f"{hf}.down_proj.weight", "hidden", ffn)
    fc1 = same_name(f"{MEGATRON_LAYER}{megatron}.linear_fc1.weight")
    engine = f"{HF_LAYER}{hf}.gate_up_proj.weight"
    return (
        Entry("gated", (gate, up), fc1, engine, "gated", when=when),
        linear("row", down, f"{megatron}.linear_fc2", when),
    )


def experts(
    block: str, gate: str, up: str, down: str, ffn: str = "expert_ffn"
) -> tuple[Entry, ...]:
    """Describe the routed experts of a layer, by their checkpoint names."""
    hf, engine = block + ".experts.{expert}.", f"{HF_LAYER}{block}.experts.routed_experts."

    def entry(kind: str, tensors: tuple[Logical, ...], linear_name: str, stack: str) -> Entry:
        one = f"{MEGATRON_LAYER}mlp.experts.local_experts.{{expert}}.{linear_name}.weight"
        grouped = f"{MEGATRON_LAYER}mlp.experts.{linear_name}.weight{{expert}}"
        names = {**same_name(one), "grouped": grouped}
        return Entry(kind, tensors, names, engine + stack, kind, experts=True)

    gate_up = tuple(logical(f"{hf}{name}.weight", ffn, "hidden") for name in (gate, up))
    return (
        entry("gated", gate_up, "linear_fc1", "w13_weight"),
        entry("row", (logical(f"{hf}{down}.weight", "hidden", ffn),), "linear_fc2", "w2_weight"),
    )


def router(block: str) -> tuple[Entry, Entry]:
    """Describe a router: its weight and the float32 bias that balances the experts."""
    bias = logical(f"{block}.gate.e_score_correction_bias", "experts", dtype="float32")
    name = same_name(f"{MEGATRON_LAYER}mlp.router.expert_bias")  # a persistent buffer
    return (
        linear(
            "replicated",
            logical(f"{block}.gate.weight", "experts", "hidden", dtype="router"),
            "mlp.router",
        ),
        Entry("replicated", (bias,), name, bias.name, "replicated", when="expert_bias"),
    )


def _whole_model(kind: str, name: str, dims: tuple[str, ...], megatron: str) -> Entry:
    return Entry(kind, (Logical(name, dims),), same_name(megatron), name, kind)


def _qkv(part: str, *inner: str, when: str = "") -> Entry:
    rows = {"q_proj": "query", "k_proj": "key", "v_proj": "key"}
    tensors = tuple(logical(f"self_attn.{name}.{part}", dim, *inner) for name, dim in rows.items())
    names = same_name(f"{MEGATRON_LAYER}self_attention.linear_qkv.{part}")
    return Entry("qkv", tensors, names, f"{HF_LAYER}self_attn.qkv_proj.{part}", "qkv", when=when)


EMBEDDING = _whole_model(
    "vocab", "model.embed_tokens.weight", ("vocab", "hidden"), "embedding.word_embeddings.weight"
)
FINAL_NORM = _whole_model(
    "replicated", "model.norm.weight", ("hidden",), "decoder.final_layernorm.weight"
)
LM_HEAD = _whole_model("vocab", "lm_head.weight", ("vocab", "hidden"), "output_layer.weight")

INPUT_NORM = norm(
    "input_layernorm", "input_layernorm", "self_attention.linear_qkv.layer_norm_weight"
)
QKV_WEIGHT = _qkv("weight", "hidden")
QKV_BIAS = _qkv("bias", when="qkv_bias")
Q_NORM = norm("self_attn.q_norm", "self_attention.q_layernorm", dim="head", when="qk_norm")
K_NORM = norm("self_attn.k_norm", "self_attention.k_layernorm", dim="head", when="qk_norm")
ATTENTION_OUT = linear(
    "row", logical("self_attn.o_proj.weight", "hidden", "query"), "self_attention.linear_proj"
)
ATTENTION = (QKV_WEIGHT, QKV_BIAS, Q_NORM, K_NORM, ATTENTION_OUT)

MLP = gated("mlp", "mlp", "ffn")
SHARED_EXPERTS = gated("mlp.shared_experts", "mlp.shared_experts", "shared_ffn", "shared_experts")


def mlp_norm(hf: str) -> Entry:
    """Describe the norm before a dense MLP."""
    return norm(hf, "pre_mlp_layernorm", "mlp.linear_fc1.layer_norm_weight")


def moe_norm(hf: str) -> Entry:
    """Describe the norm before experts, which Transformer Engine leaves on its own."""
    return norm(hf, "pre_mlp_layernorm")


def attention_out_norm(hf: str) -> Entry:
    """Describe the norm of attention's output, before it joins the residual stream.

    Megatron-Core has no place for it: the name is Megatron-Bridge's, whose output projection
    carries the norm.
    """
    return norm(hf, "self_attention.linear_proj.post_layernorm")


def mlp_out_norm(hf: str) -> Entry:
    """Describe the norm of a dense MLP's output; see `attention_out_norm`."""
    return norm(hf, "mlp.linear_fc2.post_layernorm")
