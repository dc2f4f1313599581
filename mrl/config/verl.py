"""Keys of verl without a counterpart, and the defaults of its files that are other than here.

Names are without the prefix `actor_rollout_ref`; `verl_megatron` has those of the Megatron engine.
"""

from __future__ import annotations

from typing import Any

from mrl.config.outcomes import Ignored, Legacy, Outcome, Refused, needs, only

# What verl's files set where the defaults here differ: the lowest layer of a run without a config.
DEFAULTS: dict[str, Any] = {
    "model.lora.alpha": 32,
    "rollout.tensor_model_parallel_size": 2,
    "critic.ppo_max_token_len_per_gpu": 32768,
    "algorithm.filter_groups.max_num_gen_batches": 0,
    "trainer.n_gpus_per_node": 8,
    "trainer.total_epochs": 30,
    "trainer.project_name": "verl_examples",
    "trainer.experiment_name": "gsm8k",
    "trainer.default_local_dir": "checkpoints/${trainer.project_name}/${trainer.experiment_name}",
}

_NO_LOGGER = "not written; console, TensorBoard and metrics.jsonl are"
# Items of a list that fall out of it.
IGNORED_ITEMS: dict[str, dict[str, str]] = {
    "trainer.logger": dict.fromkeys(
        ("wandb", "swanlab", "mlflow", "clearml", "trackio", "vemlp_wandb", "rl_logging_board"),
        _NO_LOGGER,
    )
    | {"file": "metrics.jsonl is written whatever trainer.logger says"}
}

_TEXT_ONLY = Ignored("text models only")
_SERVER = Ignored("the engine answers whole batches in its own ranks, without servers or agents")
_PROFILER = Ignored(
    "torch's profiler writes traces and memory snapshots of trainer.profile_steps on "
    "trainer.profile_ranks into <run>/profile; phases are NVTX ranges too"
)
_FSDP = Ignored("of the FSDP engine; the training engine is Megatron-Core")
_CHECKPOINT = Ignored(
    "a checkpoint always holds model, optimizer, other state and a Hugging Face folder"
)
_OTHER_LOSSES = Ignored("of losses that are not here; see actor.policy_loss.loss_mode")
_REWARD_MODEL = "rewards come from a function (reward.custom_reward_function), not a model"
_MTP = "multi-token prediction is neither trained nor used by the engine"


def _over_all_gpus(key: str) -> Refused:
    return Refused(f"a size over all GPUs; did you mean {key}_per_gpu?")


VERL: dict[str, Outcome] = {
    # run
    "hydra": Ignored("configs are not composed by Hydra; the run folder is default_local_dir"),
    "hybrid_engine": only(True, "see placement.mode for engine and trainer on different ranks"),
    "ray_kwargs": Ignored("Ray is found as it is started (trainer.launcher=ray)"),
    "transfer_queue.enable": only(False, "experience passes through the controller"),
    "transfer_queue": needs("transfer_queue.enable=true"),
    "distillation.enabled": only(False, "there is no teacher model"),
    "distillation": needs("distillation.enabled=true"),
    "global_profiler": _PROFILER,
    "skip": Refused("rollouts cannot be skipped or replayed; leave it out"),
    "trainer.rollout_data_dir": Ignored("rollouts/<step>.jsonl in the run folder, always"),
    "trainer.validation_data_dir": Ignored("validation/<step>.jsonl in the run folder, always"),
    "trainer.esi_redundant_time": Ignored(
        "of one cluster; see launch/ for the end of a time limit"
    ),
    "trainer.default_hdfs_dir": Refused("checkpoints are local; copy trainer.default_local_dir"),
    "trainer.del_local_ckpt_after_load": only(False, "delete the checkpoint by hand"),
    "trainer.remove_previous_ckpt_in_save": Legacy(
        {False: {}, True: {"trainer.max_actor_ckpt_to_keep": 1}},
        "says whether one checkpoint is kept (trainer.max_actor_ckpt_to_keep=1)",
    ),
    "trainer.max_critic_ckpt_to_keep": Ignored("trainer.max_actor_ckpt_to_keep holds for both"),
    "trainer.ray_wait_register_center_timeout": Ignored("see trainer.fault_timeout_s"),
    "trainer.use_legacy_worker_impl": Ignored("there is one implementation of a worker"),
    "trainer.use_v1": Ignored("there is one trainer"),
    "trainer.v1.trainer_mode": only("sync", "rollout and update take turns"),
    "trainer.v1": Ignored("there is one trainer"),
    # data
    "data.return_raw_chat": Ignored("the chat is always kept"),
    "data.return_raw_input_ids": Ignored("token ids are always kept"),
    "data.return_full_prompt": Ignored("rollouts/<step>.jsonl holds the prompts"),
    "data.return_multi_modal_inputs": _TEXT_ONLY,
    "data.image_key": _TEXT_ONLY,
    "data.image_patch_size": _TEXT_ONLY,
    "data.video_key": _TEXT_ONLY,
    "data.audio_key": _TEXT_ONLY,
    "data.mm_processor_kwargs": _TEXT_ONLY,
    "data.filter_overlong_prompts_workers": Ignored("rows are read and measured by one process"),
    "data.dataloader_num_workers": Ignored("rows are read and measured by one process"),
    "data.use_shm": Ignored("files are read where they are"),
    "data.trust_remote_code": Ignored("model.trust_remote_code holds for the tokenizer as well"),
    "data.validation_shuffle": Ignored("no result depends on the order of validation rows"),
    "data.train_max_samples": only(-1, "all rows are used; give a shorter file"),
    "data.val_max_samples": only(-1, "all rows are used; give a shorter file"),
    "data.custom_cls.path": Refused("pass train_dataset to RayPPOTrainer in Python"),
    "data.custom_cls": Ignored("has a part only with data.custom_cls.path"),
    "data.sampler": Refused("data.shuffle is the one choice of an order"),
    "data.tool_config_path": Refused("tools are not called"),
    "data.function_tool_path": Refused("tools are not called"),
    # model
    "model.use_shm": Ignored("weights are read where they are"),
    "model.external_lib": Refused("models are those that mrl converts"),
    "model.hf_config_path": Refused("config.json is read from the folder model.path"),
    "model.custom_chat_template": Refused("put it into the tokenizer's folder"),
    "model.override_config": Refused("edit config.json in the folder model.path"),
    "model.use_remove_padding": Ignored("sequences are always packed without padding"),
    "model.enable_activation_offload": only(False, "see actor.megatron.recompute_granularity"),
    "model.use_liger": _FSDP,
    "model.fused_kernel_options": Ignored("there is one fused head (use_fused_kernels)"),
    "model.tiled_mlp.enabled": only(False, "see actor.megatron.recompute_granularity"),
    "model.tiled_mlp": needs("model.tiled_mlp.enabled=true"),
    "model.exclude_modules": Refused("name what is adapted: model.lora.target_modules"),
    "model.mtp.enable": only(False, _MTP),
    "model.mtp.enable_train": only(False, _MTP),
    "model.mtp.enable_rollout": only(False, _MTP),
    "model.mtp": needs("model.mtp.enable=true"),
    "model.lora.type": only("lora", "only plain low-rank adapters are trained"),
    "model.lora.dropout": only(0, "nothing drops out: log-probs of two passes must agree"),
    "model.lora.dropout_position": Ignored("nothing drops out"),
    "model.lora.exclude_modules": Refused("name what is adapted: model.lora.target_modules"),
    "model.lora.lora_A_init_method": only("kaiming", "A starts as in PEFT: Kaiming uniform"),
    "model.lora.lora_B_init_method": only("zero", "B starts at zero"),
    "model.lora.fully_sharded_loras": Ignored("how the engine cuts an adapter changes no number"),
    "model.lora.a2a_experimental": Ignored("adapters are cut as the layers they sit on"),
    "model.lora.dtype": Refused("an adapter has the model's dtype (actor.megatron.dtype)"),
    "model.lora.freeze_vision_model": _TEXT_ONLY,
    "model.lora.freeze_vision_projection": _TEXT_ONLY,
    "model.lora.freeze_language_model": Ignored("with an adapter it alone is trained"),
    "critic.model.lora.rank": only(0, "the critic is trained whole"),
    "critic.model.lora_rank": only(0, "the critic is trained whole"),
    "critic.model.tokenizer_path": Ignored("actor and critic share model.tokenizer_path"),
    "critic.model.override_config": Refused("edit config.json in the folder critic.path"),
    "critic.model": Ignored("the critic is trained whole, in the way that `model` says"),
    # actor, critic, reference
    "actor.policy_loss.clip_cov_ratio": _OTHER_LOSSES,
    "actor.policy_loss.clip_cov_lb": _OTHER_LOSSES,
    "actor.policy_loss.clip_cov_ub": _OTHER_LOSSES,
    "actor.policy_loss.kl_cov_ratio": _OTHER_LOSSES,
    "actor.policy_loss.ppo_kl_coef": _OTHER_LOSSES,
    "actor.policy_loss.dro_beta": _OTHER_LOSSES,
    "actor.policy_loss.rollout_correction": Ignored("see algorithm.rollout_correction"),
    "actor.tau_pos": _OTHER_LOSSES,
    "actor.tau_neg": _OTHER_LOSSES,
    "actor.calculate_entropy": Ignored("the entropy is always measured"),
    "actor.calculate_sum_pi_squared": only(False, "no estimator here needs it"),
    "actor.freeze_vision_tower": _TEXT_ONLY,
    "actor.use_prefix_grouper": only(False, "each response is packed with its prompt"),
    "critic.enable": Ignored("the critic is on when algorithm.adv_estimator is gae"),
    "critic.shuffle": Ignored("the critic goes through the samples once an epoch, in their order"),
    "critic.forward_max_token_len_per_gpu": Ignored("see critic.ppo_max_token_len_per_gpu"),
    "critic.forward_micro_batch_size_per_gpu": Ignored("see critic.ppo_micro_batch_size_per_gpu"),
    "critic.forward_micro_batch_size": Ignored("see critic.ppo_micro_batch_size_per_gpu"),
    "critic.nccl_timeout": Ignored("trainer.fault_timeout_s holds for all roles"),
    "ref.model": Refused("the reference is the actor's start (model.path)"),
    "ref.router_replay": Ignored("see actor.router_replay.mode"),
    # rollout
    "rollout.mode": Ignored("requests are batched by the engine in either mode"),
    "rollout.load_format": Ignored(
        "as with dummy, the engine reads no files: the trainer sends its weights before the first "
        "response, an adapter's base too"
    ),
    "rollout.layered_summon": Ignored(
        "no parameter is gathered for the engine, so there is no peak to avoid "
        "(resharding.bucket_bytes bounds the buffers)",
        off=(None, False),
    ),
    "rollout.skip_tokenizer_init": Ignored("prompts are tokenized before the engine sees them"),
    "rollout.disable_log_stats": Ignored("the engine's log is never printed"),
    "rollout.multi_stage_wake_up": Ignored("see rollout.free_cache_engine"),
    "rollout.scheduling_policy": Ignored("requests of a batch come all at once"),
    "rollout.cudagraph_capture_sizes": Ignored("vLLM's own sizes; see rollout.enforce_eager"),
    "rollout.limit_images": _TEXT_ONLY,
    "rollout.agent.default_agent_loop": only("single_turn_agent", "a prompt, a response"),
    "rollout.agent": _SERVER,
    "rollout.trace": _SERVER,
    "rollout.prometheus": _SERVER,
    "rollout.multi_turn.enable": only(False, "a prompt, a response: tools are not called"),
    "rollout.multi_turn": needs("rollout.multi_turn.enable=true"),
    "rollout.disaggregation.enabled": only(False, "prefill and decode share their ranks"),
    "rollout.disaggregation": needs("rollout.disaggregation.enabled=true"),
    "rollout.checkpoint_engine": Ignored("weights arrive by resharding (resharding.bucket_bytes)"),
    "rollout.prompt_length": Ignored("follows data.max_prompt_length"),
    "rollout.response_length": Ignored("follows data.max_response_length"),
    "rollout.dtype": only("bfloat16", "the engine's dtype is bfloat16 on GPUs"),
    "rollout.do_sample": only(True, "training samples; see rollout.val_kwargs for validation"),
    "rollout.ignore_eos": only(False, "a response ends at its end token"),
    "rollout.over_sample_rate": only(0, "every response that is started is trained on"),
    "rollout.data_parallel_size": only(
        1, "engines are independent: as many as rollout.tensor_model_parallel_size leaves ranks for"
    ),
    "rollout.pipeline_model_parallel_size": only(
        1, "an engine is cut by rollout.tensor_model_parallel_size alone"
    ),
    "rollout.expert_parallel_size": Legacy(
        # vLLM has no number of its own: whole experts on the ranks of one engine, or shards of all.
        {1: {}, **{2**i: {"rollout.enable_expert_parallel": True} for i in range(1, 9)}},
        "says whether an engine's ranks hold whole experts (rollout.enable_expert_parallel=true)",
    ),
    "rollout.moe_tensor_parallel_size": Ignored("of the TensorRT-LLM engine"),
    "rollout.quantization": Refused("the engine holds the trainer's weights as they are"),
    "rollout.quantization_config_file": needs("rollout.quantization"),
    "rollout.qat": Refused("weights are not quantized"),
    "rollout.mtp": Refused(_MTP),
    "rollout.nnodes": only(0, "see placement.mode=disaggregated and placement.rollout_gpus"),
    "rollout.n_gpus_per_node": Ignored("trainer.n_gpus_per_node holds for all roles"),
    "rollout.profiler": _PROFILER,
    "rollout.enable_sleep_mode": Ignored("see rollout.free_cache_engine"),
    "rollout.moe_load_balance_metrics_interval": Ignored("the router's load is not reported"),
    "rollout.log_prob_micro_batch_size": _over_all_gpus("rollout.log_prob_micro_batch_size"),
    "rollout.engine_kwargs.sglang": Ignored("of the SGLang engine"),
    "rollout.engine_kwargs.trtllm": Ignored("of the TensorRT-LLM engine"),
    "rollout.engine_kwargs.vllm.compilation_config": Ignored(
        "vLLM's own; see rollout.enforce_eager"
    ),
    "rollout.engine_kwargs.vllm.mm_processor_cache_gb": _TEXT_ONLY,
    "rollout.engine_kwargs.vllm.disable_mm_preprocessor_cache": _TEXT_ONLY,
    "rollout.engine_kwargs.vllm.swap_space": Ignored("vLLM has no swap space any more"),
    "rollout.engine_kwargs": Refused("vLLM is set up by the keys of `rollout` alone"),
    "rollout.calculate_log_probs": only(True, "the engine always returns log-probs"),
    "rollout.logprobs_mode": only(
        "processed_logprobs", "log-probs always have the temperature applied"
    ),
    # reward
    "reward.reward_manager.name": Legacy(
        {"naive": {}, "dapo": {}, "prime": {}}, "compute_score is called for one sample at a time"
    ),
    "reward.reward_manager.source": only("register", "name compute_score in a file of your own"),
    "reward.reward_manager": Ignored("see reward.custom_reward_function"),
    "reward.reward_kwargs.max_resp_len": Ignored("follows data.max_response_length"),
    "reward.overlong_buffer.log": Ignored("reward/overlong/mean is always logged"),
    "reward.reward_kwargs": Refused("give them to compute_score in its own file"),
    "reward.custom_reward_function.reward_kwargs": Refused("give them in the function's own file"),
    "reward.reward_model.enable": only(False, _REWARD_MODEL),
    "reward.reward_model": needs("reward.reward_model.enable=true"),
    "reward.sandbox_fusion.url": Refused("code runs where compute_score sends it"),
    "reward.sandbox_fusion": Ignored("has a part only with its url"),
    # algorithm
    "algorithm.use_pf_ppo": only(False, "no sample is drawn again"),
    "algorithm.pf_ppo": needs("algorithm.use_pf_ppo=true"),
}
for _role in ("actor", "critic", "ref"):
    VERL |= {
        f"{_role}.strategy": only("megatron", "the training engine is Megatron-Core"),
        f"{_role}.model_engine": only("megatron", "the training engine is Megatron-Core"),
        f"{_role}.rollout_n": Ignored("follows rollout.n"),
        f"{_role}.use_torch_compile": Ignored("nothing is compiled by torch"),
        f"{_role}.data_loader_seed": Ignored("data.seed draws the order of mini-batches"),
        f"{_role}.entropy_from_logits_with_chunking": Ignored("see megatron.use_fused_kernels"),
        f"{_role}.entropy_from_logits_chunk_size": Ignored("see megatron.use_fused_kernels"),
        f"{_role}.profiler": _PROFILER,
        f"{_role}.fsdp_config": _FSDP,
        f"{_role}.grad_clip": _FSDP,
        f"{_role}.qat.enable": only(False, "weights are not quantized"),
        f"{_role}.qat": needs("qat.enable=true"),
        f"{_role}.ppo_micro_batch_size": _over_all_gpus(f"{_role}.ppo_micro_batch_size"),
        f"{_role}.log_prob_micro_batch_size": _over_all_gpus(f"{_role}.log_prob_micro_batch_size"),
    }
VERL |= {
    **dict.fromkeys(("critic.checkpoint", "ref.checkpoint"), _CHECKPOINT),
    "critic.checkpoint.async_save": Ignored("follows actor.checkpoint.async_save"),
    **{
        f"actor.checkpoint.{name}": _CHECKPOINT
        for name in ("save_contents", "load_contents", "mbridge_config", "strict")
    },
}
