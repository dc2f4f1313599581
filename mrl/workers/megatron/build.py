"""Megatron models from a Hugging Face shape: the one file that knows Megatron's model classes."""

from __future__ import annotations

import importlib.util
import logging
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from torch import Tensor, nn

from mrl.config.check_model import TRAINABLE_TYPES
from mrl.config.schema import MegatronConfig
from mrl.resharding.families import ModelShape
from mrl.resharding.vocab import padded_vocab
from mrl.workers.megatron.attention import PackedAttention, Rotary
from mrl.workers.megatron.fp8 import fp8_config, require_fp8
from mrl.workers.megatron.groups import ParallelGroups
from mrl.workers.megatron.heads import ValueHead
from mrl.workers.megatron.moe import expert_config, use_router
from mrl.workers.megatron.recompute import recompute_config


@dataclass(frozen=True, slots=True)
class Precision:
    """Where and in which dtype a role computes."""

    device: torch.device
    dtype: torch.dtype
    transformer_impl: str  # local | transformer_engine

    @staticmethod
    def of(layout: MegatronConfig, device: torch.device) -> Precision:
        """Resolve the `auto` settings for a device.

        Raises ValueError when Transformer Engine is asked for and cannot be had.
        """
        on_gpu = device.type == "cuda"
        dtype = layout.dtype
        if dtype == "auto":
            dtype = "bfloat16" if on_gpu else "float32"
        has_te = importlib.util.find_spec("transformer_engine") is not None
        impl = layout.transformer_impl
        if impl == "auto":
            # Transformer Engine's packed attention takes half precision alone
            use_te = on_gpu and has_te and dtype == "bfloat16"
            impl = "transformer_engine" if use_te else "local"
        if impl == "transformer_engine" and not (on_gpu and has_te):
            missing = "is not installed" if on_gpu else "needs a GPU"
            raise ValueError(
                f"megatron.transformer_impl=transformer_engine: Transformer Engine {missing}; "
                "use transformer_impl=local"
            )
        if impl == "transformer_engine" and dtype != "bfloat16":
            raise ValueError(
                f"megatron.dtype={dtype}: Transformer Engine's packed attention takes bfloat16; "
                "use transformer_impl=local"
            )
        if impl == "local" and layout.cp_comm_type != "a2a":
            raise ValueError(
                f"megatron.cp_comm_type={layout.cp_comm_type} runs through Transformer Engine, in "
                f"bfloat16 on a GPU; found {dtype} on {device.type}: use cp_comm_type=a2a"
            )
        require_fp8(layout, device, impl)
        return Precision(device, getattr(torch, dtype), impl)


class SequenceParallelRMSNorm(nn.Module):
    """Root-mean-square norm (Zhang and Sennrich 2019) that sequence parallelism accepts.

    Megatron's own torch norm refuses sequence parallelism; its weight only needs the mark that
    makes Megatron sum its gradient over the tensor-parallel ranks.
    """

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: object
    ) -> None:
        super().__init__()
        self.eps = eps
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        self.weight = nn.Parameter(
            torch.ones(hidden_size, dtype=config.params_dtype, device=device)
        )
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension of x [..., h] in float32."""
        scale = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + self.eps)
        return self.weight * (x.float() * scale).to(x.dtype)


def _chunks(layout: MegatronConfig) -> int:
    return layout.virtual_pipeline_model_parallel_size or 1


def transformer_config(
    shape: ModelShape, layout: MegatronConfig, precision: Precision
) -> TransformerConfig:
    """Translate a shape and a layout into Megatron's config; dropout is off, as in the source.

    Raises ValueError for a family that only has a table of its weights.
    """
    if shape.model_type not in TRAINABLE_TYPES:
        known = ", ".join(TRAINABLE_TYPES)
        raise ValueError(f"model_type {shape.model_type!r} cannot be computed yet, only {known}")
    on_gpu = precision.device.type == "cuda"
    uses_te = precision.transformer_impl == "transformer_engine"
    tp, pp = layout.tensor_model_parallel_size, layout.pipeline_model_parallel_size
    return TransformerConfig(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        ffn_hidden_size=shape.ffn_size,
        num_attention_heads=shape.num_heads,
        num_query_groups=shape.num_kv_heads,
        kv_channels=shape.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=shape.rms_norm_eps,
        add_bias_linear=False,
        add_qkv_bias=shape.qkv_bias,
        qk_layernorm=shape.qk_norm,
        gated_linear_unit=True,
        activation_func=F.silu,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        context_parallel_size=layout.context_parallel_size,
        cp_comm_type=layout.cp_comm_type,
        hierarchical_context_parallel_sizes=(
            list(layout.hierarchical_context_parallel_sizes)
            if layout.hierarchical_context_parallel_sizes
            else None
        ),
        sequence_parallel=layout.sequence_parallel and tp > 1,
        # Packed rows differ in length. Interleaved stages exchange activations and gradients at
        # once; between two stages Megatron 0.19 then swaps the shapes of the two, and batched
        # messages too, so rows have one length there and messages go one by one.
        variable_seq_lengths=pp > 1 and _chunks(layout) == 1,
        overlap_p2p_comm=_chunks(layout) > 1,
        batch_p2p_comm=_chunks(layout) == 1,
        virtual_pipeline_model_parallel_size=_chunks(layout) if _chunks(layout) > 1 else None,
        num_layers_in_first_pipeline_stage=layout.num_layers_in_first_pipeline_stage,
        num_layers_in_last_pipeline_stage=layout.num_layers_in_last_pipeline_stage,
        account_for_embedding_in_pipeline_split=layout.account_for_embedding_in_pipeline_split,
        account_for_loss_in_pipeline_split=layout.account_for_loss_in_pipeline_split,
        **expert_config(shape, layout, uses_te),
        **recompute_config(shape, layout, uses_te),
        params_dtype=precision.dtype,
        pipeline_dtype=precision.dtype,
        bf16=precision.dtype == torch.bfloat16,
        **fp8_config(shape, layout),
        deterministic_mode=torch.are_deterministic_algorithms_enabled(),
        use_cpu_initialization=not on_gpu,
        perform_initialization=False,  # every weight is loaded
        # Losses arrive with the global denominator in them: Megatron must not divide again.
        calculate_per_token_loss=True,
        bias_activation_fusion=on_gpu,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=uses_te,
        apply_rope_fusion=uses_te,
        gradient_accumulation_fusion=False,
    )


def _layers(config: TransformerConfig, impl: str, chunk: int) -> TransformerBlockSubmodules:
    """Give the layers of one model chunk of this rank's stage."""
    uses_te = impl == "transformer_engine"
    block = get_gpt_decoder_block_spec(
        config, use_transformer_engine=uses_te, normalization="RMSNorm", vp_stage=chunk
    )
    use_router(block)
    if uses_te:
        if config.context_parallel_size > 1 and "a2a" in str(config.cp_comm_type):
            from mrl.workers.megatron.te_attention import SpreadKVAttention

            for spec in block.layer_specs:
                spec.submodules.self_attention.submodules.core_attention = SpreadKVAttention
        return block
    for spec in block.layer_specs:
        layer = spec.submodules
        layer.input_layernorm = layer.pre_mlp_layernorm = SequenceParallelRMSNorm
        attention = layer.self_attention.submodules
        attention.core_attention = PackedAttention
        if config.qk_layernorm:
            attention.q_layernorm = attention.k_layernorm = SequenceParallelRMSNorm
    block.layer_norm = SequenceParallelRMSNorm
    return block


def forget_rotary_tables() -> None:
    """Drop the tables that Megatron keeps for the last 32 row widths: 32 MiB each at 64k."""
    RotaryEmbedding.forward.cache_clear()


def build_chunks(
    shape: ModelShape,
    layout: MegatronConfig,
    precision: Precision,
    groups: ParallelGroups,
    rotary: Rotary,
    head: str,
    initializer_range: float,
) -> list[GPTModel]:
    """Build this rank's part of a model with an `lm` or a `value` head, weights not yet loaded.

    Gives one model a chunk: several with interleaved pipeline stages, else one. A value head is
    drawn with std `initializer_range`. Call inside `groups.active()`.
    """
    config = transformer_config(shape, layout, precision)
    uses_te = precision.transformer_impl == "transformer_engine"
    logging.getLogger("megatron.core.models.gpt.gpt_model").setLevel(logging.ERROR)
    chunks = []
    for chunk in range(_chunks(layout)):
        has_head = groups.is_last_stage and chunk == _chunks(layout) - 1
        model = GPTModel(
            config=config,
            transformer_layer_spec=_layers(config, precision.transformer_impl, chunk),
            vocab_size=padded_vocab(shape.vocab_size, groups.tp),
            max_sequence_length=shape.max_position_embeddings,
            pre_process=groups.is_first_stage and chunk == 0,
            post_process=has_head,
            share_embeddings_and_output_weights=shape.tie_word_embeddings and head == "lm",
            # our attention rotates by position; Transformer Engine's takes Megatron's tables
            position_embedding_type="rope" if uses_te else "none",
            vp_stage=chunk if _chunks(layout) > 1 else None,
        )
        if uses_te:
            model.rotary_pos_emb.inv_freq = rotary.inv_freq.to(precision.device)
        if head == "value" and has_head:
            model.output_layer = ValueHead(
                shape.hidden_size,
                config.sequence_parallel,
                precision.device,
                initializer_range,
                groups.seed,
            )
        chunks.append(model.to(precision.device))
    return chunks
