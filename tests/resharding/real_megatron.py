"""Megatron-Core's own modules for any rank of any layout, without that many processes.

The process groups are torch's fake ones: modules only ask them for ranks and sizes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.distributed as dist

# isort: split (before megatron: torch keeps its own pickling)
import mrl.workers.megatron  # noqa: F401

# isort: split
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.tensor_parallel import RowParallelLinear
from megatron.core.transformer import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from mrl.resharding import MegatronLayout
from mrl.workers.megatron.cpu import cuda_on_cpu

# names of `stages.layers_of_chunk` and of Megatron's config
SPLIT_KEYS = {
    "first": "num_layers_in_first_pipeline_stage",
    "last": "num_layers_in_last_pipeline_stage",
    "account_for_embedding": "account_for_embedding_in_pipeline_split",
    "account_for_loss": "account_for_loss_in_pipeline_split",
}


class RowParallelLinearNorm(RowParallelLinear):
    """A row-parallel layer with a norm of its output, as Megatron-Bridge's Gemma has."""

    def __init__(self, input_size: int, output_size: int, **kwargs) -> None:
        super().__init__(input_size, output_size, **kwargs)
        self.post_layernorm = WrappedTorchNorm(kwargs["config"], output_size)


class DirectQueryMLA(MLASelfAttention):
    """Latent attention whose queries are projected at once, without a norm of their own.

    With norms on, Megatron-Core 0.19 normalises the input of that projection again, which
    DeepSeek-V2-Lite does not.
    """

    def _resolve_qk_norm_config(self, submodules):
        return {
            "linear_q_proj": submodules.linear_q_proj,
            "linear_q_up_proj": IdentityOp,
            "linear_kv_up_proj": submodules.linear_kv_up_proj,
            "q_layernorm": IdentityOp,
            "kv_layernorm": submodules.kv_layernorm,
        }


class NoAttention(nn.Module):
    """The attention between the projections, which has no parameters.

    Megatron's own for CPUs takes neither latent attention nor context parallelism.
    """

    def __init__(self, **_: object) -> None:
        super().__init__()


@contextmanager
def megatron_rank(layout: MegatronLayout, rank: int) -> Iterator[None]:
    """Act as one rank of a layout."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=layout.world_size)
    try:
        parallel_state.initialize_model_parallel(
            layout.tp,
            layout.pp,
            layout.vpp if layout.vpp > 1 else None,
            context_parallel_size=layout.cp,
            expert_model_parallel_size=layout.ep,
            expert_tensor_parallel_size=layout.expert_tp,
            create_gloo_process_groups=False,
        )
        with cuda_on_cpu():
            yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def megatron_config(layout: MegatronLayout, split: Mapping[str, object]) -> TransformerConfig:
    shape, moe, mla = layout.shape, layout.shape.moe, layout.shape.mla
    settings: dict[str, object] = {
        "num_layers": shape.num_layers,
        "hidden_size": shape.hidden_size,
        "ffn_hidden_size": shape.ffn_size,
        "num_attention_heads": shape.num_heads,
        "gated_linear_unit": True,
        "add_bias_linear": False,
        "add_qkv_bias": shape.qkv_bias,
        "qk_layernorm": shape.qk_norm or mla is not None,
        "normalization": "RMSNorm",
        "transformer_impl": "local",
        "use_cpu_initialization": True,
        "perform_initialization": False,
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "virtual_pipeline_model_parallel_size": layout.vpp if layout.vpp > 1 else None,
        "pipeline_dtype": torch.float32,
        "moe_token_dispatcher_type": "alltoall",
    }
    settings |= {SPLIT_KEYS[key]: value for key, value in split.items()}
    if mla:
        settings |= {"q_lora_rank": mla.q_lora_rank, "kv_lora_rank": mla.kv_lora_rank}
        settings |= {"qk_head_dim": mla.qk_nope_head_dim, "v_head_dim": mla.v_head_dim}
        settings |= {"qk_pos_emb_head_dim": mla.qk_rope_head_dim, "rope_type": "rope"}
        settings |= {"multi_latent_attention": True}
    else:
        settings |= {"num_query_groups": shape.num_kv_heads, "kv_channels": shape.head_dim}
    if moe:
        settings |= {
            "num_moe_experts": moe.num_experts,
            "moe_ffn_hidden_size": moe.ffn_size,
            "moe_router_topk": moe.top_k,
            "moe_layer_freq": [int(layer in moe.layers) for layer in range(shape.num_layers)],
            "moe_shared_expert_intermediate_size": moe.shared_ffn_size or None,
            "moe_router_score_function": moe.score_function,
            "moe_router_enable_expert_bias": "expert_bias" in shape.features,
            "expert_model_parallel_size": layout.ep,
            "expert_tensor_parallel_size": layout.expert_tp,
        }
    return (MLATransformerConfig if mla else TransformerConfig)(**settings)


def build_chunks(layout: MegatronLayout, split: Mapping[str, object]) -> list[GPTModel]:
    """Build the model chunks of the rank that `megatron_rank` acts as."""
    config = megatron_config(layout, split)
    entries = layout.shape.layer_entries(0)
    has_output_norms = any("post_layernorm" in entry.megatron["local"] for entry in entries)
    models = []
    for chunk in range(layout.vpp):
        vp_stage = chunk if layout.vpp > 1 else None
        block = get_gpt_decoder_block_spec(
            config, use_transformer_engine=False, normalization="RMSNorm", vp_stage=vp_stage
        )
        for layer in block.layer_specs:
            attention = layer.submodules.self_attention.submodules
            attention.core_attention = NoAttention
            if config.multi_latent_attention and config.q_lora_rank is None:
                layer.submodules.self_attention.module = DirectQueryMLA
            if has_output_norms:
                attention.linear_proj = RowParallelLinearNorm
                layer.submodules.mlp.keywords["submodules"].linear_fc2 = RowParallelLinearNorm
        where = {"ignore_virtual": False, "vp_stage": vp_stage}
        models.append(
            GPTModel(
                config,
                block,
                vocab_size=layout.padded_vocab,
                max_sequence_length=8,
                pre_process=parallel_state.is_pipeline_first_stage(**where),
                post_process=parallel_state.is_pipeline_last_stage(**where),
                position_embedding_type="rope",
                share_embeddings_and_output_weights=layout.shape.tie_word_embeddings,
                vp_stage=vp_stage,
            )
        )
    return models


def parameters_of(models: list[GPTModel]) -> dict[str, Tensor]:
    """Name parameters and persistent buffers as the layout does."""
    params = {}
    for chunk, model in enumerate(models):
        prefix = f"model{chunk}." if len(models) > 1 else ""
        for name, value in model.state_dict().items():
            if not name.endswith("_extra_state"):
                params[prefix + name] = value
    return params
