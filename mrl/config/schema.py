"""The config tree: frozen dataclasses whose leaf names are verl's.

Defaults live here and nowhere else. `None` means "derived" and the comment says from what; the
derived value is in `RunPlan`, never written back.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class MegatronConfig:
    """Parallel layout and numerics of one Megatron role."""

    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    virtual_pipeline_model_parallel_size: int | None = None
    num_layers_in_first_pipeline_stage: int | None = None  # None: as many as the others
    num_layers_in_last_pipeline_stage: int | None = None
    account_for_embedding_in_pipeline_split: bool = False  # it takes the place of a layer
    account_for_loss_in_pipeline_split: bool = False
    context_parallel_size: int = 1
    # a2a (Ulysses) | p2p (ring) | a2a+p2p; all but a2a need Transformer Engine
    cp_comm_type: str = "a2a"
    # a2a+p2p: ranks of the inner all-to-all and of the outer ring; their product is the CP size
    hierarchical_context_parallel_sizes: tuple[int, int] | None = None
    expert_model_parallel_size: int = 1
    expert_tensor_parallel_size: int | None = None
    sequence_parallel: bool = True  # in force only where TP > 1
    transformer_impl: str = "auto"  # auto | local | transformer_engine
    dtype: str = "auto"  # auto (float32 on CPU, bfloat16 on GPU) | float32 | bfloat16
    fp8: str | None = None  # hybrid | e4m3: linear layers in FP8 (Transformer Engine, Hopper on)
    # tensorwise and blockwise scale what they see; delayed takes scales from earlier steps
    fp8_recipe: str = "tensorwise"  # | blockwise | delayed
    # log-probs straight from hidden states, the logits of a few tokens at a time; false: all logits
    use_fused_kernels: bool = True
    recompute_granularity: str | None = None  # selective | full: activations again backward
    recompute_method: str | None = None  # full: uniform | block
    recompute_num_layers: int | None = None  # full: of a group (uniform) or in all (block)
    recompute_modules: tuple[str, ...] = ("core_attn",)  # selective
    param_offload: bool = False  # to the host between this role's phases; likewise below
    grad_offload: bool = False
    optimizer_offload: bool = False
    use_distributed_optimizer: bool = True
    overlap_grad_reduce: bool = False  # with the backward pass
    overlap_param_gather: bool = False  # of the distributed optimizer, with the forward pass
    gradient_accumulation_fusion: bool | None = None  # None: where Transformer Engine or Apex is
    moe_router_load_balancing_type: str = "none"  # | aux_loss | seq_aux_loss | global_aux_loss
    moe_aux_loss_coeff: float = 0.0
    moe_z_loss_coeff: float = 0.0
    freeze_moe_router: bool = False
    moe_grouped_gemm: bool | None = None  # None: with Transformer Engine


@dataclass(frozen=True)
class OptimConfig:
    """Adam and its learning-rate schedule."""

    lr: float = 1e-6
    weight_decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    clip_grad: float = 1.0
    lr_warmup_steps: int = -1  # -1: lr_warmup_steps_ratio of the total
    lr_warmup_steps_ratio: float = 0.0
    lr_decay_style: str = "constant"  # constant | linear | cosine
    min_lr: float = 0.0
    # Adam's state in the dtypes below, Transformer Engine's or Apex's fused Adam
    use_precision_aware_optimizer: bool = False
    main_grads_dtype: str = "fp32"  # fp32 | bf16
    main_params_dtype: str = "fp32"  # fp32 | fp16
    exp_avg_dtype: str = "fp32"  # fp32 | bf16 | fp16
    exp_avg_sq_dtype: str = "fp32"  # fp32 | bf16 | fp16


@dataclass(frozen=True)
class CriticOptimConfig(OptimConfig):
    """The critic's optimizer: verl's larger default rate."""

    lr: float = 1e-5


@dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters on the actor's linear layers (Hu et al. 2021); alone trained if on."""

    rank: int = 0  # 0: off, the whole model is trained
    alpha: int = 16  # the adapter's part is scaled by alpha / rank
    # Megatron's linear layers: linear_qkv, linear_proj, linear_fc1, linear_fc2
    target_modules: tuple[str, ...] = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
    merge: bool = True  # into the engine's weights at a sync; false: the adapter alone is sent
    adapter_path: str | None = None  # PEFT folder to start from


@dataclass(frozen=True)
class ModelConfig:
    """Where the policy's Hugging Face folder lies."""

    path: str = "???"
    tokenizer_path: str | None = None  # None: model.path
    trust_remote_code: bool = False
    lora: LoraConfig = field(default_factory=LoraConfig)


@dataclass(frozen=True)
class DataConfig:
    """Rows, prompts and batches."""

    train_files: list[str] = field(default_factory=list)
    val_files: list[str] = field(default_factory=list)
    prompt_key: str = "prompt"
    response_key: str = "response"  # `mrl sft`
    reward_fn_key: str = "data_source"
    max_prompt_length: int = 512
    max_response_length: int = 512
    train_batch_size: int = 1024  # prompts a step
    # prompts generated at a time, with algorithm.filter_groups; None: train_batch_size
    gen_batch_size: int | None = None
    val_batch_size: int | None = None  # None: all rows at once
    truncation: str = "error"  # error | filter | left | right
    shuffle: bool = True
    seed: int = 42
    apply_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RouterReplayConfig:
    """Whether training keeps the experts that an earlier pass chose."""

    # R2: those of the old log-prob pass; R3: the engine's, vLLM alone
    mode: str = "disabled"  # disabled | R2 | R3


@dataclass(frozen=True)
class PolicyLossConfig:
    """Which loss the actor is trained with."""

    loss_mode: str = "vanilla"  # vanilla (PPO's, dual-clipped) | gspo | cispo | gpg


@dataclass(frozen=True)
class CheckpointConfig:
    """How checkpoints are written."""

    async_save: bool = False  # beside training, from copies on the host; one at a time


@dataclass(frozen=True)
class ActorConfig:
    """The policy that is trained."""

    ppo_mini_batch_size: int = 256  # prompts an optimizer step
    ppo_micro_batch_size_per_gpu: int | None = None  # samples; needed unless use_dynamic_bsz
    use_dynamic_bsz: bool = False
    ppo_max_token_len_per_gpu: int = 16384
    ppo_epochs: int = 1
    # A step's first mini-batch is trained on by the policy that sampled it: its old log-probs are
    # those of the update's own forward pass. false: of a pass before, as all others
    first_log_probs_from_update: bool = True
    shuffle: bool = False  # shuffle rows over the mini-batches of an epoch
    clip_ratio: float = 0.2
    clip_ratio_low: float | None = None  # None: clip_ratio
    clip_ratio_high: float | None = None  # None: clip_ratio
    clip_ratio_c: float = 3.0
    # token-mean | seq-mean-token-mean | seq-mean-token-sum | seq-mean-token-sum-norm (Dr. GRPO's)
    loss_agg_mode: str = "token-mean"
    loss_scale_factor: int | None = None  # seq-mean-token-sum-norm; None: data.max_response_length
    policy_loss: PolicyLossConfig = field(default_factory=PolicyLossConfig)
    entropy_coeff: float = 0.0
    use_kl_loss: bool = False
    kl_loss_coef: float = 0.001
    kl_loss_type: str = "low_var_kl"  # k1 kl | k2 mse | k3 low_var_kl | abs
    router_replay: RouterReplayConfig = field(default_factory=RouterReplayConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    megatron: MegatronConfig = field(default_factory=MegatronConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)  # the critic's too


@dataclass(frozen=True)
class RefConfig:
    """The frozen reference policy; on when a KL term is."""

    log_prob_micro_batch_size_per_gpu: int | None = None  # None: the rollout's
    log_prob_use_dynamic_bsz: bool | None = None  # None: the actor's
    log_prob_max_token_len_per_gpu: int | None = None  # None: the actor's
    megatron: MegatronConfig | None = None  # None: the actor's


@dataclass(frozen=True)
class CriticConfig:
    """The value model; on when algorithm.adv_estimator is gae."""

    path: str | None = None  # None: model.path
    ppo_mini_batch_size: int | None = None  # None: the actor's
    ppo_micro_batch_size_per_gpu: int | None = None  # None: the actor's
    use_dynamic_bsz: bool | None = None  # None: the actor's
    ppo_max_token_len_per_gpu: int | None = None  # None: the actor's
    ppo_epochs: int | None = None  # None: the actor's
    cliprange_value: float = 0.5
    loss_agg_mode: str = "token-mean"
    loss_scale_factor: int | None = None  # as the actor's
    optim: CriticOptimConfig = field(default_factory=CriticOptimConfig)
    megatron: MegatronConfig | None = None  # None: the actor's


@dataclass(frozen=True)
class ValSamplingConfig:
    """How validation samples; independent of training."""

    n: int = 1
    do_sample: bool = False  # false: greedy, whatever temperature says
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = -1


@dataclass(frozen=True)
class RolloutConfig:
    """The generation engine."""

    name: str = "vllm"  # vllm | hf
    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    seed: int = 42
    stop: list[str] = field(default_factory=list)
    tensor_model_parallel_size: int = 1
    gpu_memory_utilization: float = 0.5
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    max_model_len: int | None = None  # None: max_prompt_length + max_response_length
    enforce_eager: bool = False
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    enable_expert_parallel: bool = False  # TP ranks hold whole experts instead of shards of all
    free_cache_engine: bool = True  # sleep around training, where the device can
    cpu_kv_cache_gib: int = 1  # vLLM's CPU backend only
    log_prob_micro_batch_size_per_gpu: int | None = None  # None: the actor's micro-batch
    log_prob_use_dynamic_bsz: bool | None = None  # None: the actor's
    log_prob_max_token_len_per_gpu: int | None = None  # None: the actor's
    val_kwargs: ValSamplingConfig = field(default_factory=ValSamplingConfig)


@dataclass(frozen=True)
class CustomRewardConfig:
    """A user's compute_score, by file and name."""

    path: str | None = None
    name: str = "compute_score"


@dataclass(frozen=True)
class OverlongBufferConfig:
    """DAPO's penalty of responses that come near the limit; added to their scores."""

    enable: bool = False
    len: int = 0  # last tokens of data.max_response_length, over which the penalty grows
    penalty_factor: float = 1.0  # the penalty at the limit


@dataclass(frozen=True)
class RewardComponentConfig:
    """One reward of several: a function of a file, or of a known data source, or of the row's."""

    weight: float = 1.0  # in the sum that is the score
    path: str | None = None
    name: str = "compute_score"
    data_source: str | None = None


@dataclass(frozen=True)
class RewardConfig:
    """Scoring and its limits."""

    custom_reward_function: CustomRewardConfig = field(default_factory=CustomRewardConfig)
    components: dict[str, Any] = field(default_factory=dict)  # name: RewardComponentConfig's keys
    num_workers: int = 2  # processes
    timeout_s: float = 30.0  # hard limit a sample
    overlong_buffer: OverlongBufferConfig = field(default_factory=OverlongBufferConfig)


@dataclass(frozen=True)
class KLControlConfig:
    """Coefficient of the KL term in the reward."""

    type: str = "fixed"  # fixed | adaptive
    kl_coef: float = 0.001
    horizon: int = 10000
    target_kl: float = 0.1


@dataclass(frozen=True)
class FilterGroupsConfig:
    """DAPO's dynamic sampling: prompts whose responses are all alike make room for others."""

    enable: bool = False
    metric: str | None = None  # score | a number that the reward function returns; None: score
    max_num_gen_batches: int = 10  # of a step; 0: no limit
    # stop: the run, with advice | fill: with prompts whose responses are all alike
    at_limit: str = "stop"


@dataclass(frozen=True)
class RolloutCorrectionConfig:
    """The difference between the engine's log-probs and the trainer's."""

    rollout_is: str | None = None  # weights trainer / engine: token | sequence
    # 2.0: weights are truncated there | 0.5_5.0: weights outside become 0
    rollout_is_threshold: str = "2.0"
    rollout_is_batch_normalize: bool = False  # to a mean of 1
    # token_k1, seq_mean_k3, ...: what is rejected, several between commas
    rollout_rs: str | None = None
    # an upper bound (k2, k3), or 0.5_2.0 of the ratio engine / trainer (k1)
    rollout_rs_threshold: str | None = None
    bypass_mode: bool = False  # the engine's log-probs are the old ones; the trainer computes none
    loss_type: str = "ppo_clip"  # bypass_mode: ppo_clip | reinforce
    # largest factor by which a token's probability may be off on average; null: any
    alarm_threshold: float | None = 1.05
    alarm_action: str = "warn"  # | stop: before the update


@dataclass(frozen=True)
class AlgorithmConfig:
    """From scores to advantages."""

    # gae | grpo | rloo | reinforce_plus_plus | reinforce_plus_plus_baseline | remax | opo
    adv_estimator: str = "gae"
    gamma: float = 1.0
    lam: float = 1.0
    norm_adv_by_std_in_grpo: bool = True
    use_kl_in_reward: bool = False
    kl_penalty: str = "kl"  # k1 kl | k2 mse | k3 low_var_kl | abs
    kl_ctrl: KLControlConfig = field(default_factory=KLControlConfig)
    # responses cut at the limit are not trained on; they still count in their group's statistics
    overlong_filtering: bool = False
    filter_groups: FilterGroupsConfig = field(default_factory=FilterGroupsConfig)
    rollout_correction: RolloutCorrectionConfig = field(default_factory=RolloutCorrectionConfig)


@dataclass(frozen=True)
class TrainerConfig:
    """Length, places and habits of the run."""

    nnodes: int = 1
    n_gpus_per_node: int = 1  # ranks a node; on a CPU machine, processes
    device: str = "auto"  # auto | cpu | cuda
    launcher: str = "torchrun"  # torchrun | ray
    project_name: str = "mrl"
    experiment_name: str = "default"
    default_local_dir: str = "runs/${trainer.project_name}/${trainer.experiment_name}"
    total_epochs: int = 1
    total_training_steps: int | None = None  # None: total_epochs over the data
    seed: int = 42
    logger: list[str] = field(default_factory=lambda: ["console", "tensorboard"])
    val_before_train: bool = True
    val_only: bool = False
    test_freq: int = -1  # steps; below 1: only before training and at the end
    save_freq: int = -1  # steps; below 1: only at the end
    log_val_generations: int = 0  # validation samples shown as text in TensorBoard
    resume_mode: str = "auto"  # auto | disable | resume_path
    resume_from_path: str | None = None
    max_actor_ckpt_to_keep: int | None = None  # None: all
    # the validation metric whose highest value is kept and linked as `best`; None: no such link
    best_metric: str | None = None
    allow_changed: list[str] = field(default_factory=list)  # keys, from a checkpoint's config
    critic_warmup: int = 0  # steps that train the critic alone
    full_determinism: bool = False  # the same numbers bit for bit on the same layout, slower
    balance_batch: bool = True  # spread tokens evenly over the data-parallel ranks
    fault_timeout_s: float = 1800.0  # longest silence of a collective before the job is ended
    hang_timeout_s: float = 7200.0  # longest that a rank may be at one call, as generating a batch
    max_restarts: int = 0  # after a failed rank, from the last checkpoint; torchrun: --max-restarts
    profile_steps: list[int] = field(default_factory=list)  # torch profiler, into <run>/profile
    profile_ranks: list[int] | None = field(default_factory=lambda: [0])  # None: all


@dataclass(frozen=True)
class PlacementConfig:
    """Which ranks hold which role."""

    # colocated: every rank holds every role | disaggregated: trainer and engine on the ranks below
    mode: str = "colocated"
    trainer_gpus: int | None = None  # actor, critic, reference: the first ranks; None: the others
    rollout_gpus: int | None = None  # engine: the last ranks; ranks of both sides hold both


@dataclass(frozen=True)
class ReshardingConfig:
    """Weight transfer from the trainer to the engine."""

    mode: str = "direct"  # direct: slice to slice | gather: all-gather, then the engine's loader
    bucket_bytes: int = 268435456
    verify: str = "off"  # off | first_step | every_step: compare checksums of both ends
    # receive once a node and pass on inside it, where replicas of a node need the same bytes
    forward_within_node: bool = False


@dataclass(frozen=True)
class Config:
    """Everything a run needs; see the fields' own classes."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    actor: ActorConfig = field(default_factory=ActorConfig)
    ref: RefConfig = field(default_factory=RefConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    placement: PlacementConfig = field(default_factory=PlacementConfig)
    resharding: ReshardingConfig = field(default_factory=ReshardingConfig)
