"""The entries of the metrics' contract; see `mrl.tracking.contract`."""

from __future__ import annotations

from mrl.tracking.contract import Metric, Section

_OLD = "the trainer computes old log-probs (not rollout_correction.bypass_mode)"
_CRITIC = "a critic is trained"
_ACTOR = "the actor is updated (after trainer.critic_warmup)"
_GPU = "on a GPU"
_EXPERTS = "a model of experts"
_IS = "algorithm.rollout_correction.rollout_is"
_RS = "algorithm.rollout_correction.rollout_rs"
_SFT = "`mrl sft`"

_SCORES = Section(
    "Rewards and advantages",
    "mrl/tracking/metrics.py",
    (
        Metric("critic/score/<stat>", "score", "samples",
               "the reward function's score", "a response was scored"),
        Metric("critic/rewards/<stat>", "score", "samples",
               "sum of a response's token rewards: score, penalties, KL term",
               "a response was scored"),
        Metric("critic/advantages/<stat>", "1", "tokens",
               "advantages, before a rollout correction weighs them", "a response was scored"),
        Metric("critic/returns/<stat>", "score", "tokens",
               "what the critic is to predict; without one the advantages",
               "a response was scored"),
        Metric("critic/values/<stat>", "score", "tokens",
               "what the critic predicted before its update", _CRITIC),
        Metric("critic/vf_explained_var", "1", "tokens",
               "1 - var(returns - values) / var(returns); 1 is perfect, below 0 useless", _CRITIC),
        Metric("critic/baseline/mean", "score", "samples",
               "reward of the greedy responses", "adv_estimator=remax"),
        Metric("reward/timeouts", "samples", "sum", "ran over reward.timeout_s: unscored"),
        Metric("reward/errors", "samples", "sum",
               "the reward function raised, or gave no number: unscored"),
        Metric("reward/unscored", "samples", "sum", "without a score; no part in any loss"),
        Metric("reward/baseline_unscored", "prompts", "sum",
               "whose greedy response has no score", "adv_estimator=remax"),
        Metric("reward/overlong/mean", "score", "samples, all",
               "penalty of long responses", "reward.overlong_buffer.enable"),
        Metric("reward/overlong/ratio", "share", "samples, all",
               "responses with such a penalty", "reward.overlong_buffer.enable"),
        Metric("reward/overlong/filtered_ratio", "share", "samples, all",
               "responses cut at the limit, not trained on", "algorithm.overlong_filtering"),
        Metric("reward/<name>/mean", "as given", "samples that have it",
               "a number that the reward function returns beside the score", "it returns any"),
        Metric("group/size/<stat>", "samples", "prompts", "scored responses of a prompt"),
        Metric("group/zero_variance_ratio", "share", "prompts",
               "groups whose scores are all alike: no advantage comes of them"),
        Metric("actor/reward_kl_penalty", "nats", "tokens, then samples",
               "KL to the reference, as the reward has it", "algorithm.use_kl_in_reward"),
        Metric("actor/reward_kl_penalty_coeff", "1", "same",
               "its coefficient (algorithm.kl_ctrl)"),
    ),
)  # fmt: skip

_LENGTHS = Section(
    "Lengths and batches",
    "mrl/tracking/metrics.py, mrl/generation.py",
    (
        Metric("response_length/<stat>", "tokens", "samples, all", "length of responses"),
        Metric("response_length/clip_ratio", "share", "samples, all",
               "cut at data.max_response_length"),
        Metric("prompt_length/<stat>", "tokens", "samples, all", "length of prompts"),
        Metric("prompt_length/clip_ratio", "share", "samples, all",
               "as long as data.max_prompt_length or longer"),
        Metric("train/num_gen_batches", "1", "sum",
               "generations that filled the batch", "algorithm.filter_groups"),
        Metric("training/filter_groups/evicted_samples", "samples", "sum",
               "of groups that were all alike", "algorithm.filter_groups"),
        Metric("training/filter_groups/discarded_surplus_samples", "samples", "sum",
               "generated beyond the batch", "algorithm.filter_groups"),
        Metric("training/global_step", "steps", "same", "this step"),
        Metric("training/epoch", "epochs", "same",
               "passes over the data that are complete"),
    ),
)  # fmt: skip

_MISMATCH = Section(
    "Engine against trainer",
    "mrl/algorithms/mismatch.py, mrl/algorithms/correction.py",
    (
        Metric("training/rollout_probs_diff_<extreme>", "probability", "tokens, all",
               "difference of a sampled token's probability", _OLD),
        Metric("training/rollout_log_probs_diff_<extreme>", "nats", "tokens, all",
               "difference of its log-prob", _OLD),
        Metric("rollout_corr/token_mult_prob_error", "factor", "tokens, all",
               "by which a probability is off; 1: they agree (rollout_correction.alarm_threshold)",
               _OLD),
        Metric("rollout_corr/seq_mult_prob_error_max", "factor", "max over samples",
               "the same of the worst response", _OLD),
        Metric("rollout_corr/kl", "nats", "tokens, all",
               "k1 estimate of KL(engine, trainer)", _OLD),
        Metric("rollout_corr/k3_kl", "nats", "tokens, all", "k3 estimate of it", _OLD),
        Metric("rollout_corr/training_ppl", "1", "samples, all", "perplexity by the trainer", _OLD),
        Metric("rollout_corr/training_log_ppl", "nats", "samples, all", "its logarithm", _OLD),
        Metric("rollout_corr/rollout_ppl", "1", "samples, all", "perplexity by the engine", _OLD),
        Metric("rollout_corr/rollout_log_ppl", "nats", "samples, all", "its logarithm", _OLD),
        Metric("rollout_corr/log_ppl_diff", "nats", "samples, all",
               "trainer's log-perplexity less the engine's", _OLD),
        Metric("rollout_corr/log_ppl_abs_diff", "nats", "samples, all", "its size", _OLD),
        Metric("rollout_corr/log_ppl_diff_max", "nats", "max over samples", "its largest", _OLD),
        Metric("rollout_corr/log_ppl_diff_min", "nats", "min over samples", "its smallest", _OLD),
        Metric("rollout_corr/ppl_ratio", "factor", "samples, all",
               "trainer's perplexity over the engine's", _OLD),
        Metric("rollout_corr/chi2_token", "1", "tokens, all",
               "chi-squared divergence of tokens", _OLD),
        Metric("rollout_corr/chi2_seq", "1", "samples, all",
               "chi-squared divergence of responses", _OLD),
        Metric("rollout_corr/rollout_is_<stat>", "factor", "tokens",
               "importance weight; in bypass_mode the mean alone", _IS),
        Metric("rollout_corr/rollout_is_std", "factor", "tokens", "its standard deviation", _IS),
        Metric("rollout_corr/rollout_is_eff_sample_size", "share", "tokens",
               "mean weight squared over mean squared weight", _IS),
        Metric("rollout_corr/rollout_is_ratio_fraction_high", "share", "tokens",
               "at the upper threshold or above", _IS),
        Metric("rollout_corr/rollout_is_oob_ratio", "share", "tokens",
               "outside two thresholds: weight 0", f"{_IS} with two thresholds"),
        Metric("rollout_corr/rollout_is_seq_<stat>", "factor", "samples",
               "mean weight of a response", _IS),
        Metric("rollout_corr/rollout_is_batch_norm_factor", "factor", "tokens or samples",
               "mean that the weights are divided by", "rollout_is_batch_normalize"),
        Metric("rollout_corr/rollout_rs_masked_fraction", "share", "tokens",
               "rejected", f"{_RS}, or bypass_mode with a correction"),
        Metric("rollout_corr/rollout_rs_seq_masked_fraction", "share", "samples",
               "with a rejected token", _RS),
        Metric("rollout_corr/rollout_rs_<rule>_masked_fraction", "share", "tokens",
               "rejected by this rule", _RS),
        Metric("rollout_corr/rollout_rs_<rule>_seq_masked_fraction", "share", "samples",
               "with a token rejected by it", _RS),
        Metric("rollout_corr/rollout_rs_<rule>_<stat>", "nats", "tokens",
               "what the rule looks at", _RS),
    ),
    note="The first ones are over all response tokens, trained or not.",
)  # fmt: skip

_UPDATES = Section(
    "Updates",
    "mrl/workers/actor.py, mrl/workers/critic.py",
    (
        Metric("actor/entropy", "nats", "tokens, all",
               "entropy of the policy before the update", _OLD),
        Metric("actor/pg_loss", "loss", "sum", "policy loss", _ACTOR),
        Metric("actor/entropy_loss", "nats", "sum",
               "entropy by actor.loss_agg_mode, during the update", _ACTOR),
        Metric("actor/pg_clipfrac", "share", "tokens", "the clip bound the loss", _ACTOR),
        Metric("actor/pg_clipfrac_lower", "share", "tokens",
               "clip_ratio_c bound it (advantage below 0)", _ACTOR),
        Metric("actor/ppo_kl", "nats", "tokens", "k1 estimate of KL(old, new policy)", _ACTOR),
        Metric("actor/kl_loss", "nats", "sum",
               "KL to the reference by actor.loss_agg_mode, without its coefficient",
               "actor.use_kl_loss"),
        Metric("actor/kl_coef", "1", "same", "its coefficient", "actor.use_kl_loss"),
        Metric("critic/vf_loss", "loss", "sum", "clipped squared error of values", _CRITIC),
        Metric("critic/vf_clipfrac", "share", "tokens", "the clip bound the loss", _CRITIC),
        Metric("critic/vpred_mean", "score", "tokens", "values during the update", _CRITIC),
        Metric("sft/loss", "nats", "sum",
               "mean negative log-likelihood of the responses' tokens", _SFT),
        Metric("<role>/grad_norm", "1", "same",
               "norm of the whole gradient before clipping", "the role is updated"),
        Metric("<role>/lr", "1", "same", "learning rate", "the role is updated"),
        Metric("sft/grad_norm", "1", "same", "norm of the whole gradient before clipping", _SFT),
        Metric("sft/lr", "1", "same", "learning rate", _SFT),
        Metric("<role>/skipped_updates", "updates", "sum",
               "optimizer steps left out: no token to train on", "the role is updated"),
        Metric("<role>/moe_aux_loss", "loss", "same",
               "balance of experts, without its coefficient; 1 is perfect; mean over layers",
               f"{_EXPERTS}, moe_aux_loss_coeff above 0"),
        Metric("<role>/moe_z_loss", "loss", "same",
               "router z-loss, without its coefficient", f"{_EXPERTS}, moe_z_loss_coeff above 0"),
        Metric("<role>/moe_max_violation", "share", "same",
               "load of the fullest expert above the mean, relative to it", _EXPERTS),
    ),
)  # fmt: skip

_VALIDATION = Section(
    "Validation",
    "mrl/validation.py",
    (
        Metric("val-core/<data source>/<acc or reward>/mean@<n>", "score", "samples",
               "held-out rows, n responses each", "steps that validate"),
        Metric("val-aux/<data source>/unscored", "samples", "sum",
               "held-out responses without a score", "steps that validate"),
    ),
)  # fmt: skip

_TIME = Section(
    "Time",
    "mrl/tracking/timers.py, mrl/workers/busy.py",
    (
        Metric("timing_s/step", "s", "controller", "the step, from the end of the one before"),
        Metric("timing_s/<phase>", "s", "controller",
               "a phase; a part of the job that is absent takes microseconds",
               "the run has the phase"),
        Metric("timing_s/rest", "s", "controller",
               "what no phase covers: bookkeeping, writing the row before"),
        Metric("timing_per_token_ms/<per-token phase>", "ms", "controller",
               "a phase over the step's tokens; gen over those of responses",
               "the run has the phase"),
        Metric("perf/rank_seconds/<ranked phase>", "s", "mean over ranks",
               "the ranks' own work in a phase", "several ranks work in it"),
        Metric("perf/rank_spread/<ranked phase>", "factor", "max over mean",
               "the slowest rank's own work over the mean", "several ranks work in it"),
        Metric("perf/slowest_rank/<ranked phase>", "rank", "argmax",
               "whose it is, as in ranks.json", "several ranks work in it"),
    ),
    note="Phases and `rest` add up to the step. A phase is what the controller waits for; "
    "`perf/rank_seconds` is what ranks work of it, so that the difference is waiting: for the "
    "slowest rank, for messages. In an update a rank's own work ends where its gradients are "
    "ready, before they are summed over ranks of other rows. Ranks that hold one copy of a model "
    "work in step and share a value. Dumps, checkpoints in the background and these metrics "
    "overlap with the phases and cost time only where a step waits for them (`rest`, "
    "`save_checkpoint`). A step of `trainer.profile_steps` has the phase `profile`, and its other "
    "phases are slower.",
)  # fmt: skip

_SPEED = Section(
    "Throughput and memory",
    "mrl/tracking/rates.py, mrl/tracking/timers.py, mrl/workers/actor.py, mrl/workers/group.py",
    (
        Metric("perf/total_num_tokens", "tokens", "sum",
               "prompt and response tokens of the step, without padding"),
        Metric("perf/time_per_step", "s", "controller", "timing_s/step"),
        Metric("perf/throughput", "tokens/s/GPU", "step",
               "total_num_tokens over the step and all GPUs of the job, whatever their role"),
        Metric("perf/mfu/actor", "share", "step",
               "model FLOPs of the actor's update (all epochs) over its phase and the peak of "
               "the GPUs that train", "a GPU whose peak is known"),
        Metric("perf/micro_batches/<role>", "1", "max",
               "micro-batches of a rank in an optimizer step", "the role is updated"),
        Metric("perf/padding/<role>", "share", "tokens",
               "padding in packed rows", "the role is updated"),
        Metric("perf/imbalance/<role>", "factor", "max over mean",
               "work of the fullest data-parallel part, as planned", "the role is updated"),
        Metric("perf/max_memory_allocated_gb", "GB", "max over ranks",
               "by torch, since the start", _GPU),
        Metric("perf/max_memory_reserved_gb", "GB", "max over ranks",
               "by torch's allocator, since the start", _GPU),
        Metric("perf/cpu_memory_used_gb", "GB", "max over ranks",
               "of the host, by all processes", _GPU),
        Metric("perf/memory_after_sleep_gb", "GB", "max over ranks",
               "of the device by all processes, once the engine sleeps", _GPU),
        Metric("reshard/bytes_moved", "bytes", "sum over ranks",
               "received by the engine in the weight update"),
        Metric("reshard/bytes_floor", "bytes", "sum over ranks",
               "needed there and not held"),
        Metric("reshard/seconds", "s", "max over ranks",
               "the exchange alone"),
    ),
    note="Model FLOPs: causal attention by sequence (packed or not), key and value projections "
    "by their own heads, the experts that a token is sent to, the head for predicted tokens, no "
    "embedding lookup, no padding, nothing for recomputation.",
)  # fmt: skip

SECTIONS = (_SCORES, _LENGTHS, _MISMATCH, _UPDATES, _VALIDATION, _TIME, _SPEED)
