"""Megatron-Core's own GPTModel on CPU ranks, of any family that a table describes."""

from __future__ import annotations

import json
import math
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from mrl.resharding.families import ModelShape
from mrl.resharding.hf import hf_layout
from mrl.resharding.hf_files import load_into
from mrl.resharding.megatron import MegatronLayout
from mrl.resharding.planner import plan

BASE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 50,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3_moe": {"model_type": "qwen3_moe", "num_experts": 4, **EXPERTS},
    "qwen3_moe_mixed": {
        "model_type": "qwen3_moe",
        "num_experts": 4,
        "mlp_only_layers": [1],
        **EXPERTS,
    },
    "deepseek_v3": {
        "model_type": "deepseek_v3",
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "q_lora_rank": 16,
        "kv_lora_rank": 8,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 8,
        **EXPERTS,
    },
}


def write_folder(folder: Path, name: str, **changes: Any) -> Path:
    """Write a random model of a family in two files, with an index and a tokenizer's file."""
    config = BASE | CONFIGS[name] | changes
    if config["model_type"] == "deepseek_v3":
        config.pop("head_dim")
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "generation_config.json").write_text('{"temperature": 0.6}\n')
    (folder / "tokenizer.json").write_text("{}\n")
    generator = torch.Generator().manual_seed(3)
    tensors = {
        key: torch.randn(info.shape, generator=generator).to(getattr(torch, info.dtype))
        for key, info in ModelShape.from_folder(folder).tensors().items()
    }
    names = sorted(tensors)  # an order of its own, as many checkpoints have
    weight_map = {}
    for part, file in enumerate(("model-00001-of-00002.safetensors",
                                 "model-00002-of-00002.safetensors")):  # fmt: skip
        own = {key: tensors[key] for key in names[part::2]}
        save_file(own, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(own, file)
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    return folder


@contextmanager
def gpt(source: Path, tp: int = 1, pp: int = 1, ep: int = 1, etp: int | None = None) -> Any:
    """Hold this rank's GPTModel of the local spec; gives it with its shape."""
    from megatron.core import parallel_state, tensor_parallel

    from mrl.workers.megatron.cpu import cuda_on_cpu

    shape = ModelShape.from_folder(source)
    with cuda_on_cpu(), torch.no_grad():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=tp,
            pipeline_model_parallel_size=pp,
            expert_model_parallel_size=ep,
            expert_tensor_parallel_size=etp,
            create_gloo_process_groups=True,
        )
        tensor_parallel.model_parallel_cuda_manual_seed(1, force_reset_rng=True)
        yield _build(shape, tp, pp, ep, etp), shape


def _build(shape: ModelShape, tp: int, pp: int, ep: int, etp: int | None) -> Any:
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_decoder_block_spec,
        get_gpt_layer_local_spec,
    )
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig

    kinds: dict[str, Any] = {}
    if shape.moe:
        layers = [int(shape.has_experts(i)) for i in range(shape.num_layers)]
        kinds = {
            "num_moe_experts": shape.moe.num_experts,
            "moe_ffn_hidden_size": shape.moe.ffn_size,
            "moe_router_topk": shape.moe.top_k,
            "moe_token_dispatcher_type": "alltoall",
            "expert_model_parallel_size": ep,
            "expert_tensor_parallel_size": etp,
            "moe_layer_freq": 1 if all(layers) else layers,
            "moe_shared_expert_intermediate_size": shape.moe.shared_ffn_size or None,
        }
    if "expert_bias" in shape.features:
        kinds |= {
            "moe_router_enable_expert_bias": True,
            "moe_router_score_function": "sigmoid",
        }
    make = TransformerConfig
    if shape.mla:
        make = MLATransformerConfig
        kinds |= {
            "multi_latent_attention": True,
            "q_lora_rank": shape.mla.q_lora_rank,
            "kv_lora_rank": shape.mla.kv_lora_rank,
            "qk_head_dim": shape.mla.qk_nope_head_dim,
            "qk_pos_emb_head_dim": shape.mla.qk_rope_head_dim,
            "v_head_dim": shape.mla.v_head_dim,
            "rope_type": "rope",
        }
    config = make(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        ffn_hidden_size=shape.ffn_size,
        num_attention_heads=shape.num_heads,
        num_query_groups=None if shape.mla else shape.num_kv_heads,
        kv_channels=shape.head_dim,
        normalization="RMSNorm",
        add_bias_linear=False,
        add_qkv_bias=shape.qkv_bias,
        qk_layernorm=shape.qk_norm or shape.mla is not None,
        gated_linear_unit=True,
        activation_func=F.silu,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        apply_rope_fusion=False,
        **kinds,
    )
    if shape.moe:
        spec = get_gpt_decoder_block_spec(
            config, use_transformer_engine=False, normalization="RMSNorm"
        )
    else:
        spec = get_gpt_layer_local_spec(qk_layernorm=shape.qk_norm, normalization="RMSNorm")
    if shape.mla:
        for layer in spec.layer_specs:
            layer.submodules.self_attention.submodules.core_attention = _NoAttention
    return GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=_padded(shape, tp),
        max_sequence_length=64,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=shape.tie_word_embeddings,
        position_embedding_type="rope",
    )


class _NoAttention(torch.nn.Module):
    """Stands in for Megatron's own, which refuses latent attention; it has no weights."""

    def __init__(self, *arguments: Any, **names: Any) -> None:
        super().__init__()


def _padded(shape: ModelShape, tp: int) -> int:
    return -(-shape.vocab_size // (16 * tp)) * 16 * tp


def _fill(model: Any, shape: ModelShape, source: Path, **where: Any) -> None:
    """Load the Hugging Face folder by mrl's own plan."""
    tp = where.get("tp", 1)
    experts = (where.get("etp") or tp) * where.get("ep", 1)
    layout = MegatronLayout(
        shape,
        dp=math.lcm(tp, experts) // tp,
        padded_vocab=_padded(shape, tp),
        **({"tp": 1, "pp": 1} | where),
    ).layout()
    rank = torch.distributed.get_rank()
    load_into(source, plan(hf_layout(source, shape), layout), rank, _tensors(model))


def _tensors(model: Any) -> dict[str, torch.Tensor]:
    found = dict(model.named_parameters())
    return found | {name: b for name, b in model.named_buffers() if name.endswith("expert_bias")}


def differing(
    source: Path,
    checkpoint: Path,
    metadata: dict[str, Any] | None = None,
    saved: Path | None = None,
    **where: Any,
) -> list[str]:
    """Load a checkpoint and list what differs from mrl's own loading of the folder.

    `saved` is where the model is then saved, as Megatron does.
    """
    from megatron.core import dist_checkpointing

    with gpt(source, **where) as (model, shape):
        _fill(model, shape, source, **where)
        wanted = {name: tensor.clone() for name, tensor in _tensors(model).items()}
        for tensor in _tensors(model).values():
            tensor.fill_(7.0)
        state = {"model": model.sharded_state_dict(metadata=metadata)}
        loaded = dist_checkpointing.load(state, str(checkpoint), strict="raise_unexpected")
        model.load_state_dict(loaded["model"])
        if saved is not None:
            state = model.sharded_state_dict(metadata=metadata)
            dist_checkpointing.save(state, str(saved))
        found = _tensors(model)
        return [name for name, value in wanted.items() if not torch.equal(found[name], value)]
