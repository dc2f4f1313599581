"""Reference placements for the tests, made by torch operations on whole tensors.

They share no code with the box algebra under test: fused projections by `view` and `cat`, shards
by `chunk`. The vLLM layout in closed form is the cross-check of the traced one.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from mrl.resharding import Layout, MegatronLayout, ModelShape, Piece, TensorInfo
from mrl.resharding.layout import whole

LAYER = "model.layers.{}."


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
    shape: ModelShape, tp: int, values: Mapping[str, Tensor], tp_rank: int
) -> dict[str, Tensor]:
    params: dict[str, Tensor] = {}
    kv_shards = min(tp, shape.num_kv_heads)

    def column(weight: Tensor, shards: int = tp) -> Tensor:
        return weight.chunk(shards, 0)[tp_rank * shards // tp]

    params["model.embed_tokens.weight"] = column(
        pad_rows(values["model.embed_tokens.weight"], vllm_vocab(shape))
    ).clone()
    for layer in range(shape.num_layers):
        hf = LAYER.format(layer)
        for kind in ("weight", "bias") if shape.qkv_bias else ("weight",):
            q, k, v = (values[hf + f"self_attn.{name}_proj.{kind}"] for name in "qkv")
            params[hf + f"self_attn.qkv_proj.{kind}"] = torch.cat(
                [column(q), column(k, kv_shards), column(v, kv_shards)]
            )
        params[hf + "self_attn.o_proj.weight"] = (
            values[hf + "self_attn.o_proj.weight"].chunk(tp, 1)[tp_rank].clone()
        )
        params[hf + "mlp.gate_up_proj.weight"] = torch.cat(
            [column(values[hf + f"mlp.{name}_proj.weight"]) for name in ("gate", "up")]
        )
        params[hf + "mlp.down_proj.weight"] = (
            values[hf + "mlp.down_proj.weight"].chunk(tp, 1)[tp_rank].clone()
        )
        for norm in ("input_layernorm", "post_attention_layernorm"):
            params[hf + norm + ".weight"] = values[hf + norm + ".weight"].clone()
    params["model.norm.weight"] = values["model.norm.weight"].clone()
    if not shape.tie_word_embeddings:
        params["lm_head.weight"] = column(
            pad_rows(values["lm_head.weight"], vllm_vocab(shape))
        ).clone()
    return params


def vllm_pieces(shape: ModelShape, tp: int, tp_rank: int, rank: int) -> list[Piece]:
    """Give vLLM's placement on one rank (0.26, linear.py and vocab_parallel_embedding.py)."""
    hd, heads = shape.head_dim, shape.num_heads // tp
    kv_heads = max(1, shape.num_kv_heads // tp)
    kv_first = (
        tp_rank * kv_heads if shape.num_kv_heads >= tp else (tp_rank // (tp // shape.num_kv_heads))
    )
    ffn, vocab = shape.ffn_size // tp, vllm_vocab(shape) // tp
    q, k = (tp_rank * heads * hd, heads * hd), (kv_first * hd, kv_heads * hd)
    stacked = {  # logical suffix: parameter, first row and rows in the tensor, row in the parameter
        "self_attn.q_proj": ("self_attn.qkv_proj", *q, 0),
        "self_attn.k_proj": ("self_attn.qkv_proj", *k, q[1]),
        "self_attn.v_proj": ("self_attn.qkv_proj", *k, q[1] + k[1]),
        "mlp.gate_proj": ("mlp.gate_up_proj", tp_rank * ffn, ffn, 0),
        "mlp.up_proj": ("mlp.gate_up_proj", tp_rank * ffn, ffn, ffn),
    }
    pieces = []
    for name, info in shape.tensors().items():
        full = whole(info.shape)
        module, kind = name.rsplit(".", 1)
        suffix = ".".join(module.split(".")[-2:])
        if suffix in stacked:
            param, first, rows, row = stacked[suffix]
            box = ((first, first + rows), *full[1:])
            local = ((row, row + rows), *full[1:])
            param = f"{module.removesuffix(suffix)}{param}.{kind}"
            pieces.append(Piece(name, box, rank, param, local))
        elif suffix in ("self_attn.o_proj", "mlp.down_proj"):
            count = info.shape[1] // tp
            box = (full[0], (tp_rank * count, (tp_rank + 1) * count))
            pieces.append(Piece(name, box, rank, name, (full[0], (0, count))))
        elif name in ("model.embed_tokens.weight", "lm_head.weight"):
            start, stop = tp_rank * vocab, min((tp_rank + 1) * vocab, shape.vocab_size)
            if start < stop:
                box, local = ((start, stop), full[1]), ((0, stop - start), full[1])
                pieces.append(Piece(name, box, rank, name, local))
        else:
            pieces.append(Piece(name, full, rank, name, full))
    return pieces


def vllm_layout(
    shape: ModelShape, tp: int, world: int, node_of_rank: Mapping[int, int] | None = None
) -> Layout:
    """Place world / tp replicas, TP fastest."""
    pieces = [p for rank in range(world) for p in vllm_pieces(shape, tp, rank % tp, rank)]
    padded = frozenset({"model.embed_tokens.weight", "lm_head.weight"})
    return Layout("vllm", shape.tensors(), tuple(pieces), node_of_rank or {}, padded)


def like(params: Mapping[str, Tensor], dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """Make parameters of the same shapes that hold garbage."""
    return {
        name: torch.full_like(param, float("nan"), dtype=dtype) for name, param in params.items()
    }


def tensor_info(*shape: int, dtype: str = "float32") -> TensorInfo:
    return TensorInfo(shape, dtype)
