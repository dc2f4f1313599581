"""What becomes of verl's keys of the Megatron engine and its optimizer; see `verl`."""

from __future__ import annotations

from mrl.config.outcomes import Ignored, Outcome, Refused, needs, only

_KERNEL = Ignored("kernels are chosen by what is installed (megatron.transformer_impl)")
_DISPATCH = Ignored("tokens reach their experts by Megatron's all-to-all; no number depends on it")
_LINEAR_ATTENTION = Ignored("of linear attention layers, which no model here has")
_DIST_CHECKPOINT = Ignored("weights to start from are read from the folder model.path")
_BRIDGE = Ignored("weights are converted between Hugging Face and Megatron-Core by mrl itself")
_PACKED = Ignored("sequences are always packed without padding")
_FUSED_HEAD = Ignored("see megatron.use_fused_kernels")
_RESHARDABLE = Ignored("checkpoints open on any layout")
_ON_HOST = Ignored(
    "Adam steps on the GPU; for less memory: megatron.optimizer_offload=true (on the host between "
    "updates), optim.use_precision_aware_optimizer=true with exp_avg_dtype=bf16 and "
    "exp_avg_sq_dtype=bf16",
    off=(None, False, 0),
)
_ADAM = "the optimizer is Adam"
_WARMUP = Ignored("see lr_warmup_steps, lr_decay_style and min_lr")

# Below `megatron`; `override_transformer_config` and `override_ddp_config` are dropped before.
_ENGINE: dict[str, Outcome] = {
    "use_mbridge": _BRIDGE,
    "vanilla_mbridge": _BRIDGE,
    "use_dist_checkpointing": _DIST_CHECKPOINT,
    "dist_checkpointing_path": _DIST_CHECKPOINT,
    "dist_checkpointing_prefix": _DIST_CHECKPOINT,
    "dist_ckpt_optim_fully_reshardable": _RESHARDABLE,
    "distrib_optim_fully_reshardable_mem_efficient": _RESHARDABLE,
    "use_megatron_fsdp": only(False, "parameters are cut by TP, PP and EP; see param_offload"),
    "dynamic_context_parallel": only(False, "the context-parallel size is one for the run"),
    "max_seqlen_per_dp_cp_rank": needs("dynamic_context_parallel=true"),
    "use_remove_padding": _PACKED,
    "pad_bshd_to_minibatch_max": _PACKED,
    "pad_to_length": _PACKED,
    "pad_to_length_bucket": _PACKED,
    "variable_seq_lengths": _PACKED,
    "entropy_from_logits_with_chunking": _FUSED_HEAD,
    "entropy_from_logits_chunk_size": _FUSED_HEAD,
    "forward_only": Ignored("the reference alone is never trained"),
    "seed": Ignored("nothing is drawn but adapters, from trainer.seed"),
    "qat.enable": only(False, "weights are not quantized"),
    "qat": needs("qat.enable=true"),
    "extra": Refused("name Megatron-Core's own keys under megatron"),
    "override_model_config": Refused("edit config.json in the model's folder"),
    "override_mcore_model_config": Refused("edit config.json in the model's folder"),
    # Megatron-Core's own, of override_transformer_config
    "apply_rope_fusion": _KERNEL,
    "attention_backend": _KERNEL,
    "use_flash_attn": _KERNEL,
    "bias_activation_fusion": _KERNEL,
    "bias_dropout_fusion": _KERNEL,
    "masked_softmax_fusion": _KERNEL,
    "persist_layer_norm": _KERNEL,
    "cross_entropy_loss_fusion": _FUSED_HEAD,
    "cross_entropy_fusion_impl": _FUSED_HEAD,
    "deallocate_pipeline_outputs": Ignored("always done"),
    "tp_comm_overlap": _KERNEL,
    "use_ascend_gdn": _LINEAR_ATTENTION,
    "use_triton_gdn": _LINEAR_ATTENTION,
    "use_naive_l2norm": _LINEAR_ATTENTION,
    "attention_dropout": only(0, "nothing drops out: log-probs of two passes must agree"),
    "hidden_dropout": only(0, "nothing drops out: log-probs of two passes must agree"),
    "moe_router_dtype": only("fp32", "routers always compute in float32"),
    "moe_router_bias_update_rate": only(0, "experts' biases stay as they are"),
    "moe_permute_fusion": _KERNEL,
    "moe_router_fusion": _KERNEL,
    "moe_shared_expert_overlap": _DISPATCH,
    "moe_token_dispatcher_type": _DISPATCH,
    "moe_enable_deepep": _DISPATCH,
    "moe_flex_dispatcher_backend": _DISPATCH,
    "mtp_num_layers": only(0, "multi-token prediction is not trained"),
}

# Below `optim`; `override_optimizer_config` is dropped before.
_OPTIM: dict[str, Outcome] = {
    "optimizer": only("adam", _ADAM),
    "total_training_steps": Ignored("follows trainer.total_training_steps"),
    "lr_warmup_init": only(0, "the rate rises from 0"),
    "lr_decay_steps": Refused("the rate decays to the last step"),
    "lr_wsd_decay_style": _WARMUP,
    "lr_wsd_decay_steps": _WARMUP,
    "min_lr_ratio": Ignored("of the FSDP engine; see min_lr"),
    "num_cycles": Ignored("of the FSDP engine; see lr_decay_style"),
    "weight_decay_incr_style": only("constant", "the weight decay is the same at every step"),
    "use_checkpoint_opt_param_scheduler": Ignored("a resumed run goes on where it was"),
    "optimizer_cpu_offload": _ON_HOST,
    "optimizer_offload_fraction": _ON_HOST,
    "overlap_cpu_optimizer_d2h_h2d": _ON_HOST,
    "use_layer_wise_distributed_optimizer": only(False, _ADAM),
    **{
        f"muon_{name}": Ignored(_ADAM)
        for name in (
            "momentum",
            "nesterov",
            "split_qkv",
            "scale_mode",
            "coefficient_type",
            "num_ns_steps",
            "tp_mode",
            "fp32_matmul_prec",
            "extra_scale_factor",
            "scalar_optimizer",
            "match_adamw_update_rms",
        )
    },
}

VERL_MEGATRON: dict[str, Outcome] = {
    f"{role}.megatron.{name}": outcome
    for role in ("actor", "critic", "ref")
    for name, outcome in _ENGINE.items()
} | {
    f"{role}.optim.{name}": outcome
    for role in ("actor", "critic")
    for name, outcome in _OPTIM.items()
}
for _role in ("critic", "ref"):
    VERL_MEGATRON[f"{_role}.megatron.router_replay"] = Ignored("see actor.router_replay.mode")
