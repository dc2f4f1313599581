"""Rules of the algorithm: what estimator, loss, filter and correction ask of each other."""

from __future__ import annotations

from collections.abc import Iterator

from mrl.config.bounds import parse_bounds, parse_rejections
from mrl.config.errors import Violation
from mrl.config.schema import Config

# They compare a response with the others of its prompt. (GRPO with one is told in `caveats`.)
_OF_A_GROUP = ("rloo", "reinforce_plus_plus_baseline", "opo")
_CORRECTION = "algorithm.rollout_correction"
_FILTER = "algorithm.filter_groups"
# Losses of one way to average, as they were published.
_AGGREGATION = {"gspo": "seq-mean-token-mean"}


def check_algorithm(config: Config) -> Iterator[Violation]:
    """Check everything between the engine's samples and the losses."""
    yield from _check_estimator(config)
    yield from _check_loss(config)
    yield from _check_filter(config)
    yield from _check_overlong(config)
    yield from _check_correction(config)
    yield from _check_truncation(config)


def _check_estimator(config: Config) -> Iterator[Violation]:
    algorithm, name = config.algorithm, config.algorithm.adv_estimator
    if config.actor.use_kl_loss and algorithm.use_kl_in_reward:
        yield Violation(
            "actor.use_kl_loss and algorithm.use_kl_in_reward",
            True,
            "the KL term would count twice, in the loss and in the reward",
            "one of them false",
        )
    if name in _OF_A_GROUP and config.rollout.n == 1:
        rule = f"{name} compares each response with the others of its prompt"
        yield Violation("rollout.n", 1, rule, "2")
    if config.trainer.critic_warmup > 0 and name != "gae":
        rule = f"algorithm.adv_estimator={name} has no critic to warm up"
        yield Violation("trainer.critic_warmup", config.trainer.critic_warmup, rule, "0")


def _check_loss(config: Config) -> Iterator[Violation]:
    actor, mode = config.actor, config.actor.policy_loss.loss_mode
    wanted = _AGGREGATION.get(mode, actor.loss_agg_mode)
    if actor.loss_agg_mode != wanted:
        rule = f"actor.policy_loss.loss_mode={mode} averages over responses"
        yield Violation("actor.loss_agg_mode", actor.loss_agg_mode, rule, wanted)
    for role, section in (("actor", actor), ("critic", config.critic)):
        if section.loss_scale_factor is not None and "norm" not in section.loss_agg_mode:
            rule = f"has a part only in {role}.loss_agg_mode=seq-mean-token-sum-norm"
            yield Violation(f"{role}.loss_scale_factor", section.loss_scale_factor, rule, "null")


def _check_filter(config: Config) -> Iterator[Violation]:
    found, data = config.algorithm.filter_groups, config.data
    if found.enable and config.rollout.n == 1:
        rule = f"{_FILTER}.enable=true keeps prompts whose responses differ: one never does"
        yield Violation("rollout.n", 1, rule, "2")
    shaped = config.reward.overlong_buffer.enable or config.algorithm.use_kl_in_reward
    if found.enable and shaped and found.metric in ("seq_reward", "seq_final_reward"):
        rule = (
            "compares the scores alone: what reward.overlong_buffer or "
            "algorithm.use_kl_in_reward takes off is not in them"
        )
        yield Violation(f"{_FILTER}.metric", found.metric, rule, "score")
    if not found.enable and data.gen_batch_size not in (None, data.train_batch_size):
        rule = (
            f"without {_FILTER}.enable=true all prompts that are generated are trained on: "
            f"data.train_batch_size={data.train_batch_size}"
        )
        yield Violation("data.gen_batch_size", data.gen_batch_size, rule, "null")


def _check_overlong(config: Config) -> Iterator[Violation]:
    found, longest = config.reward.overlong_buffer, config.data.max_response_length
    if found.enable and not 1 <= found.len <= longest:
        yield Violation(
            "reward.overlong_buffer.len",
            found.len,
            f"must be at least 1 and at most data.max_response_length={longest}",
            str(min(max(found.len, 1), longest)),
        )


def _check_correction(config: Config) -> Iterator[Violation]:
    found = config.algorithm.rollout_correction
    reinforce = found.bypass_mode and found.loss_type == "reinforce"
    yield from _check_bounds(config)
    if found.loss_type != "ppo_clip" and not found.bypass_mode:
        rule = f"is a loss of {_CORRECTION}.bypass_mode=true alone"
        yield Violation(f"{_CORRECTION}.loss_type", found.loss_type, rule, "ppo_clip")
    if found.rollout_is is not None and found.bypass_mode and not reinforce:
        rule = (
            "would count twice: with bypass_mode=true the ratio of the loss is to the engine; "
            f"weights are for {_CORRECTION}.loss_type=reinforce"
        )
        yield Violation(f"{_CORRECTION}.rollout_is", found.rollout_is, rule, "null")
    if reinforce and config.actor.policy_loss.loss_mode not in ("vanilla", "gpg"):
        rule = f"{_CORRECTION}.loss_type=reinforce is a loss itself"
        mode = config.actor.policy_loss.loss_mode
        yield Violation("actor.policy_loss.loss_mode", mode, rule, "vanilla")
    if found.rollout_is_batch_normalize and (found.rollout_is is None or found.bypass_mode):
        rule = "needs rollout_is, and the weights of a whole batch: bypass_mode=false"
        yield Violation(f"{_CORRECTION}.rollout_is_batch_normalize", True, rule, "false")
    if found.bypass_mode and config.algorithm.use_kl_in_reward:
        rule = (
            "needs the trainer's log-probs, which bypass_mode=true leaves out; "
            "actor.use_kl_loss=true does not"
        )
        yield Violation("algorithm.use_kl_in_reward", True, rule, "false")
    if found.bypass_mode and config.actor.router_replay.mode == "R2":
        rule = f"records routing in the pass that {_CORRECTION}.bypass_mode=true leaves out"
        yield Violation("actor.router_replay.mode", "R2", rule, "R3")


def _check_bounds(config: Config) -> Iterator[Violation]:
    found = config.algorithm.rollout_correction
    try:
        _, high = parse_bounds(found.rollout_is_threshold)
        if high < 1:  # YAML reads 0.5_2 as the number 0.52
            raise ValueError(
                f"the upper bound {high:g} is below 1, the weight where nothing differs; "
                "write two bounds with a point each, such as 0.5_2.0"
            )
    except ValueError as error:
        key = f"{_CORRECTION}.rollout_is_threshold"
        yield Violation(key, found.rollout_is_threshold, str(error), "2.0")
    try:
        parse_rejections(found.rollout_rs, found.rollout_rs_threshold)
    except ValueError as error:
        key = f"{_CORRECTION}.rollout_rs and rollout_rs_threshold"
        yield Violation(key, f"{found.rollout_rs}, {found.rollout_rs_threshold}", str(error))
    if found.rollout_rs is None and found.rollout_rs_threshold is not None:
        rule = "has a part only with rollout_rs"
        key = f"{_CORRECTION}.rollout_rs_threshold"
        yield Violation(key, found.rollout_rs_threshold, rule, "null")


def _check_truncation(config: Config) -> Iterator[Violation]:
    """Refuse to sample from another distribution than the one that is trained, uncorrected."""
    rollout, correction = config.rollout, config.algorithm.rollout_correction
    is_corrected = correction.rollout_is is not None and rollout.name == "vllm"
    for key, value, everything in (
        ("rollout.top_p", rollout.top_p, 1),
        ("rollout.top_k", rollout.top_k, -1),
    ):
        cuts = value < 1 if key == "rollout.top_p" else value > 0
        if cuts and not is_corrected:
            yield Violation(
                key,
                value,
                "samples training responses from a truncated distribution, while the trainer's "
                "log-probs are of the full one: each token is off by the logarithm of what was "
                f"kept; vLLM's samples can be weighed, {_CORRECTION}.rollout_is=token",
                str(everything),
            )
