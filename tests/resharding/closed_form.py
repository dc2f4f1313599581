"""Reference placements for the tests, made by torch operations on whole tensors.

They share no code with the box algebra under test: fused projections by `view` and `cat`, shards
by `chunk`.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from mrl.resharding import Layout, MegatronLayout, ModelShape, TensorInfo
from mrl.resharding.vllm_layout import VLLMLayout

LAYER = "model.layers.{}."
MOE = {"moe_intermediate_size": 8, "num_experts_per_tok": 2}
SHARED = MOE | {"n_routed_experts": 6, "n_shared_experts": 2, "first_k_dense_replace": 1}
MLA = {"kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}
NOAUX = {"n_group": 2, "topk_group": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid"}

# A tiny model of every family: what its config.json adds to `tiny_shape`'s.
FAMILIES: Mapping[str, tuple[str, Mapping[str, object]]] = {
    "llama": ("llama", {}),
    "mistral": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "gemma2": ("gemma2", {"tie_word_embeddings": True}),
    "gemma3": ("gemma3_text", {"tie_word_embeddings": True}),
    "glm4": ("glm4", {"attention_bias": True, "pad_token_id": 0}),
    "qwen3_moe": ("qwen3_moe", MOE | {"num_experts": 6, "mlp_only_layers": [1]}),
    "mixtral": ("mixtral", MOE | {"num_local_experts": 6, "sliding_window": None}),
    "glm4_moe": ("glm4_moe", SHARED | {"use_qk_norm": True, "attention_bias": True}),
    "deepseek_v2": ("deepseek_v2", SHARED | MLA | {"q_lora_rank": 16, "scoring_func": "softmax"}),
    "deepseek_v2_lite": ("deepseek_v2", SHARED | MLA | {"q_lora_rank": None}),
    "deepseek_v3": ("deepseek_v3", SHARED | MLA | NOAUX | {"q_lora_rank": 16}),
}


def tiny_shape(
    model_type: str = "qwen2",
    kv_heads: int = 2,
    tied: bool = False,
    layers: int = 4,
    vocab: int = 13,
    **changes: object,
) -> ModelShape:
    config = {
        "model_type": model_type,
        "hidden_size": 8,
        "num_hidden_layers": layers,
        "num_attention_heads": 8,
        "num_key_value_heads": kv_heads,
        "head_dim": 4,
        "intermediate_size": 8,
        "vocab_size": vocab,
        "max_position_embeddings": 64,
        "tie_word_embeddings": tied,
        "dtype": "float32",
    }
    return ModelShape.from_hf(config | changes)


def logical_values(shape: ModelShape, lm_head: bool = True) -> dict[str, Tensor]:
    """Number all elements of the model: every element has a value of its own."""
    values, base = {}, 1
    for name, info in shape.tensors(lm_head=lm_head).items():
        count = torch.Size(info.shape).numel()
        values[name] = torch.arange(base, base + count, dtype=torch.float32).view(info.shape)
        base += count
    assert base < 2**24  # exact in float32
    return values


def pad_rows(weight: Tensor, rows: int) -> Tensor:
    return torch.cat([weight, weight.new_zeros(rows - weight.shape[0], *weight.shape[1:])])


def megatron_params(
    layout: MegatronLayout, values: Mapping[str, Tensor], rank: int
) -> dict[str, Tensor]:
    shape, tp = layout.shape, layout.tp
    tp_rank, _, _, pp_rank = layout.coordinates(rank)
    fused = layout.transformer_impl == "transformer_engine"
    params: dict[str, Tensor] = {}

    def column(weight: Tensor) -> Tensor:
        return weight.chunk(tp, 0)[tp_rank].clone()

    def row(weight: Tensor) -> Tensor:
        return weight.chunk(tp, 1)[tp_rank].clone()

    def qkv(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        groups, inner = shape.num_kv_heads, q.shape[1:]
        parts = [part.view(groups, -1, *inner) for part in (q, k, v)]
        return column(torch.cat(parts, 1).reshape(-1, *inner))

    if pp_rank == 0:
        embedding = pad_rows(values["model.embed_tokens.weight"], layout.padded_vocab)
        params["embedding.word_embeddings.weight"] = column(embedding)
    for local, layer in enumerate(layout.stage_layers(pp_rank)):
        hf, mine = LAYER.format(layer), f"decoder.layers.{local}."
        norm_1 = (
            "self_attention.linear_qkv.layer_norm_weight" if fused else "input_layernorm.weight"
        )
        norm_2 = "mlp.linear_fc1.layer_norm_weight" if fused else "pre_mlp_layernorm.weight"
        params[mine + norm_1] = values[hf + "input_layernorm.weight"].clone()
        params[mine + norm_2] = values[hf + "post_attention_layernorm.weight"].clone()
        for kind in ("weight", "bias") if shape.qkv_bias else ("weight",):
            params[mine + f"self_attention.linear_qkv.{kind}"] = qkv(
                *(values[hf + f"self_attn.{name}_proj.{kind}"] for name in "qkv")
            )
        params[mine + "self_attention.linear_proj.weight"] = row(
            values[hf + "self_attn.o_proj.weight"]
        )
        params[mine + "mlp.linear_fc1.weight"] = torch.cat(
            [column(values[hf + f"mlp.{name}_proj.weight"]) for name in ("gate", "up")]
        )
        params[mine + "mlp.linear_fc2.weight"] = row(values[hf + "mlp.down_proj.weight"])
    if pp_rank == layout.pp - 1:
        params["decoder.final_layernorm.weight"] = values["model.norm.weight"].clone()
        tied = shape.tie_word_embeddings
        if layout.has_lm_head and (not tied or layout.pp > 1):
            head = values["model.embed_tokens.weight" if tied else "lm_head.weight"]
            params["output_layer.weight"] = column(pad_rows(head, layout.padded_vocab))
    return params


def vllm_vocab(shape: ModelShape) -> int:
    return -(-shape.vocab_size // 64) * 64


def vllm_params(
    shape: ModelShape,
    tp: int,
    values: Mapping[str, Tensor],
    tp_rank: int,
    ep: bool = False,
) -> dict[str, Tensor]:
    """Build one rank's parameters as vLLM 0.26 does, by checkpoint names alone."""
    params: dict[str, Tensor] = {}
    for name, value in values.items():
        module, _, kind = name.rpartition(".")
        parent, _, leaf = module.rpartition(".")

        def beside(other: str, parent: str = parent, kind: str = kind) -> Tensor:
            return values[f"{parent}.{other}.{kind}"]

        if ".experts." in name:
            block, _, _ = name.partition(".experts.")
            gate, up, down = (
                ("w1", "w3", "w2") if leaf[0] == "w" else ("gate_proj", "up_proj", "down_proj")
            )
            if leaf == gate:
                rows = _column(value, tp, tp_rank, ep), _column(beside(up), tp, tp_rank, ep)
                _stack(params, f"{block}.experts.routed_experts.w13_weight", torch.cat(rows))
            elif leaf == down:
                part = value if ep else value.chunk(tp, 1)[tp_rank]
                _stack(params, f"{block}.experts.routed_experts.w2_weight", part)
        elif leaf in ("embed_tokens", "lm_head"):
            params[name] = _column(pad_rows(value, vllm_vocab(shape)), tp, tp_rank)
        elif leaf == "q_proj" and f"{parent}.k_proj.{kind}" in values:
            kv_shards = min(tp, shape.num_kv_heads)
            kv = (
                beside(other).chunk(kv_shards)[tp_rank * kv_shards // tp]
                for other in ("k_proj", "v_proj")
            )
            params[f"{parent}.qkv_proj.{kind}"] = torch.cat([_column(value, tp, tp_rank), *kv])
        elif leaf in ("q_proj", "q_b_proj", "kv_b_proj"):
            params[name] = _column(value, tp, tp_rank)
        elif leaf == "q_a_proj":
            params[f"{parent}.fused_qkv_a_proj.{kind}"] = torch.cat(
                [value, beside("kv_a_proj_with_mqa")]
            )
        elif leaf in ("gate_proj", "gate_up_proj"):
            halves = (value, beside("up_proj")) if leaf == "gate_proj" else value.chunk(2)
            params[f"{parent}.gate_up_proj.{kind}"] = torch.cat(
                [_column(half, tp, tp_rank) for half in halves]
            )
        elif leaf in ("o_proj", "down_proj"):
            params[name] = value.chunk(tp, 1)[tp_rank].clone()
        elif leaf not in ("k_proj", "v_proj", "up_proj") and not (
            leaf == "kv_a_proj_with_mqa" and f"{parent}.q_a_proj.{kind}" in values
        ):
            params[name] = value.clone()
    if ep:
        for name in [name for name in params if "routed_experts" in name]:
            rows = params[name].chunk(shape.moe.num_experts)
            params[name] = torch.cat(torch.tensor_split(torch.stack(rows), tp)[tp_rank].unbind())
    return params


def _column(weight: Tensor, tp: int, tp_rank: int, replicated: bool = False) -> Tensor:
    return weight.clone() if replicated else weight.chunk(tp)[tp_rank].clone()


def _stack(params: dict[str, Tensor], name: str, expert: Tensor) -> None:
    params[name] = torch.cat([params[name], expert]) if name in params else expert.clone()


def vllm_layout(
    shape: ModelShape, tp: int, world: int, node_of_rank: Mapping[int, int] | None = None
) -> Layout:
    """Place world / tp replicas, TP fastest."""
    return VLLMLayout(
        shape, tp, world // tp, dtype=shape.dtype, node_of_rank=node_of_rank or {}
    ).layout()


def like(params: Mapping[str, Tensor], dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """Make parameters of the same shapes that hold garbage."""
    return {
        name: torch.full_like(param, float("nan"), dtype=dtype) for name, param in params.items()
    }


def tensor_info(*shape: int, dtype: str = "float32") -> TensorInfo:
    return TensorInfo(shape, dtype)
