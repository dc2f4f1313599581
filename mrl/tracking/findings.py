"""What a run's own numbers say is wrong: each with its number, its limit and the key to change.

Rules look at the rows of metrics.jsonl alone, so that a finished run, one in progress and one that
was killed are judged alike. Nothing here imports torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from mrl.config import Config, build_plan
from mrl.config.schema import RolloutConfig

Row = Mapping[str, Any]  # of metrics.jsonl; null: not finite

GENERATION_SHARE = 0.4  # of the step
WINDOW = 20  # steps that are averaged: the last, and the first to compare them with
_FEWEST = 5  # steps that show a trend or a habit
_ENTROPY = 0.2  # of what it was at first
_GROWTH, _MISMATCH = 3.0, 0.005  # times what it was at first; of probability
_CONSTANT_GROUPS = 0.5
_TRUNCATED = 0.2
_PADDING = 0.1
_IMBALANCE = 1.2
_SLOW, _ALWAYS = 1.2, 0.8  # times the mean of the ranks; of the steps

_SPREAD, _SLOWEST = "perf/rank_spread/", "perf/slowest_rank/"


@dataclass(frozen=True, slots=True)
class Finding:
    """What is wrong, the number that says so and the key to change."""

    name: str  # of its rule
    number: float
    limit: float
    key: str
    found: str
    advice: str

    def __str__(self) -> str:
        return f"{self.found}; {self.key}: {self.advice}"


class Record:
    """The training steps of a run, oldest first, as rules ask for them."""

    def __init__(self, rows: Sequence[Row], config: Config) -> None:
        """Take all rows of metrics.jsonl; one that only validates is no training step."""
        self.rows = [row for row in rows if "timing_s/step" in row]
        self.config = config

    def values(self, name: str) -> list[float]:
        """List the finite values of a metric."""
        return [row[name] for row in self.rows if row.get(name) is not None]

    def last(self, name: str) -> list[float]:
        """List the finite values of a metric in the last steps of the run."""
        return [row[name] for row in self.rows[-WINDOW:] if row.get(name) is not None]

    def trend(self, name: str) -> tuple[float, float] | None:
        """Give the means of the first and of the last steps; None where there are too few."""
        values = self.values(name)
        if len(values) < 2 * _FEWEST:
            return None
        size = min(WINDOW, len(values) // 2)
        return fmean(values[:size]), fmean(values[-size:])

    def names(self, prefix: str) -> list[str]:
        """List the metrics of the last steps whose name starts so."""
        names = dict.fromkeys(name for row in self.rows[-WINDOW:] for name in row)
        return [name for name in names if name.startswith(prefix)]


Rule = Callable[[Record], Iterator[Finding]]
RULES: dict[str, Rule] = {}


def _rule(make: Rule) -> Rule:
    RULES[make.__name__.strip("_")] = make
    return make


def find(rows: Sequence[Row], config: Config) -> tuple[Finding, ...]:
    """Apply every rule to the rows of metrics.jsonl."""
    record = Record(rows, config)
    return tuple(found for rule in RULES.values() for found in rule(record))


def generation_advice(rollout: RolloutConfig, held: int) -> tuple[str, str]:
    """Give the key and the text that shorten generation; `held`: sequences of a replica."""
    if rollout.max_num_seqs < held:
        text = f"a replica has {held} sequences and runs {rollout.max_num_seqs} at a time: raise it"
        return "rollout.max_num_seqs", text
    if rollout.tensor_model_parallel_size > 1:
        text = "fewer ranks a replica make more replicas, each with fewer sequences"
        return "rollout.tensor_model_parallel_size", text
    text = "all sequences run at once: only shorter responses or more GPUs make it shorter"
    return "data.max_response_length", text


@_rule
def _entropy_collapse(run: Record) -> Iterator[Finding]:
    trend = run.trend("actor/entropy") or run.trend("actor/entropy_loss")
    if trend is None or trend[0] <= 0 or trend[1] >= _ENTROPY * trend[0]:
        return
    first, last = trend
    yield Finding(
        "entropy_collapse",
        last / first,
        _ENTROPY,
        "actor.clip_ratio_high",
        f"entropy is {last:.3g}, {last / first:.1%} of the {first:.3g} it began with, below "
        f"{_ENTROPY:.0%}",
        "responses of a prompt become alike: raise it (0.28 keeps rare tokens alive), or "
        f"actor.entropy_coeff from {run.config.actor.entropy_coeff:g}",
    )


@_rule
def _growing_mismatch(run: Record) -> Iterator[Finding]:
    trend = run.trend("training/rollout_probs_diff_mean")
    if trend is None or trend[1] <= max(_GROWTH * trend[0], _MISMATCH):
        return
    first, last = trend
    yield Finding(
        "growing_mismatch",
        last,
        max(_GROWTH * first, _MISMATCH),
        "algorithm.rollout_correction.rollout_is",
        f"engine and trainer differ by {last:.2g} in the probability of a sampled token, "
        f"{first:.2g} at first, above {_GROWTH:g} times that",
        "token weighs by the gap; resharding.verify=every_step tells whether weights differ",
    )


@_rule
def _mismatch(run: Record) -> Iterator[Finding]:
    limit = run.config.algorithm.rollout_correction.alarm_threshold
    values = run.last("rollout_corr/token_mult_prob_error")
    if limit is None or not values or fmean(values) <= limit:
        return
    yield Finding(
        "mismatch",
        fmean(values),
        limit,
        "resharding.verify",
        f"the trainer's probability of a sampled token is off from the engine's by a factor of "
        f"{fmean(values):.4g}, above {limit:g}",
        "first_step tells whether both hold the same weights; else look at dtype and rope settings",
    )


@_rule
def _zero_variance_groups(run: Record) -> Iterator[Finding]:
    values, sizes = run.last("group/zero_variance_ratio"), run.last("group/size/max")
    algorithm = run.config.algorithm
    if not values or algorithm.adv_estimator == "gae" or (sizes and max(sizes) <= 1):
        return
    if (share := fmean(values)) <= _CONSTANT_GROUPS:
        return
    on = algorithm.filter_groups.enable
    yield Finding(
        "zero_variance_groups",
        share,
        _CONSTANT_GROUPS,
        "rollout.n" if on else "algorithm.filter_groups.enable",
        f"in {share:.0%} of the groups all scores are alike, above {_CONSTANT_GROUPS:.0%}: they "
        "teach nothing",
        "more responses a prompt differ more often, or take prompts of another difficulty"
        if on
        else "true draws other prompts in their place; or take prompts of another difficulty",
    )


@_rule
def _truncated(run: Record) -> Iterator[Finding]:
    values, config = run.last("response_length/clip_ratio"), run.config
    if not values or (share := fmean(values)) <= _TRUNCATED:
        return
    more = "" if config.algorithm.overlong_filtering else "; or algorithm.overlong_filtering=true"
    yield Finding(
        "truncated",
        share,
        _TRUNCATED,
        "data.max_response_length",
        f"{share:.0%} of the responses are cut at the limit, above {_TRUNCATED:.0%}",
        f"raise it from {config.data.max_response_length:,}, so that answers are not cut before "
        f"they are given{more}",
    )


@_rule
def _generation_share(run: Record) -> Iterator[Finding]:
    rows = [row for row in run.rows[-WINDOW:] if "timing_s/gen" in row]
    seconds = sum(row["timing_s/step"] or 0.0 for row in rows)
    share = sum(row["timing_s/gen"] or 0.0 for row in rows) / seconds if seconds else 0.0
    if share <= GENERATION_SHARE:
        return
    held = max(build_plan(run.config).sequences_per_replica)
    key, advice = generation_advice(run.config.rollout, held)
    found = f"generation takes {share:.0%} of the step, above {GENERATION_SHARE:.0%}"
    yield Finding("generation_share", share, GENERATION_SHARE, key, found, advice)


@_rule
def _padding(run: Record) -> Iterator[Finding]:
    for name in run.names("perf/padding/"):
        values, role = run.last(name), name.rpartition("/")[2]
        if not values or (share := fmean(values)) <= _PADDING:
            continue
        dynamic = run.config.actor.use_dynamic_bsz
        yield Finding(
            "padding",
            share,
            _PADDING,
            "actor.ppo_max_token_len_per_gpu" if dynamic else "actor.use_dynamic_bsz",
            f"{share:.0%} of what the {role} computes is padding, above {_PADDING:.0%}",
            "a larger row has less of it" if dynamic else "true packs rows to a token budget",
        )


@_rule
def _imbalance(run: Record) -> Iterator[Finding]:
    for name in run.names("perf/imbalance/"):
        values, role = run.last(name), name.rpartition("/")[2]
        if not values or (factor := fmean(values)) <= _IMBALANCE:
            continue
        balanced = run.config.trainer.balance_batch
        yield Finding(
            "imbalance",
            factor,
            _IMBALANCE,
            "actor.ppo_mini_batch_size" if balanced else "trainer.balance_batch",
            f"the busiest rank of the {role} has {factor:.2f} times the mean work, above "
            f"{_IMBALANCE:g}",
            "more samples a step spread more evenly"
            if balanced
            else "true spreads tokens evenly over the ranks",
        )


@_rule
def _slow_rank(run: Record) -> Iterator[Finding]:
    for name in run.names(_SPREAD):
        phase = name.removeprefix(_SPREAD)
        values, ranks = run.last(name), run.last(_SLOWEST + phase)
        if min(len(values), len(ranks)) < _FEWEST or (factor := median(values)) <= _SLOW:
            continue
        # ranks of one copy of the model work in step: any of them may be named
        copies = Counter(int(rank) // _ranks_a_copy(run.config, phase) for rank in ranks)
        (copy, times), *_ = copies.most_common(1)
        if times < _ALWAYS * len(ranks):
            continue
        first = copy * _ranks_a_copy(run.config, phase)
        yield Finding(
            "slow_rank",
            factor,
            _SLOW,
            "trainer.nnodes",
            f"rank {first} takes {factor:.2f} times the ranks' mean in {phase}, above {_SLOW:g}, "
            f"in {times} of {len(ranks)} steps",
            "ranks.json names its host: run `mrl doctor` there (clocks, other jobs, memory), and "
            "leave the node out if that does not help",
        )


def _ranks_a_copy(config: Config, phase: str) -> int:
    """Count the neighbouring ranks that work on the same rows."""
    if phase == "gen":
        return config.rollout.tensor_model_parallel_size
    critic = config.critic.megatron
    m = critic if phase in ("values", "update_critic") and critic else config.actor.megatron
    return m.tensor_model_parallel_size * m.context_parallel_size


@_rule
def _skipped_updates(run: Record) -> Iterator[Finding]:
    for name in ("actor/skipped_updates", "critic/skipped_updates"):
        if not (count := sum(run.last(name))):
            continue
        algorithm = run.config.algorithm
        key = "algorithm.rollout_correction.rollout_rs_threshold"
        if algorithm.rollout_correction.rollout_rs is None:
            cut = algorithm.overlong_filtering
            key = "algorithm.overlong_filtering" if cut else "reward.timeout_s"
        yield Finding(
            "skipped_updates",
            count,
            0.0,
            key,
            f"{count:.0f} optimizer steps of the {name.partition('/')[0]} are missing in the last "
            f"{len(run.last(name))} training steps: no token was left to train on",
            "responses without a score, cut at the limit or rejected are not trained on",
        )


@_rule
def _unscored(run: Record) -> Iterator[Finding]:
    counts = run.last("reward/unscored")
    if not (count := sum(counts)):
        return
    late, errors = sum(run.last("reward/timeouts")), sum(run.last("reward/errors"))
    slow = late > errors
    yield Finding(
        "unscored",
        count,
        0.0,
        "reward.timeout_s" if slow else "reward.custom_reward_function.path",
        f"{count:.0f} samples of the last {len(counts)} steps have no score ({late:.0f} ran out of "
        f"time, {errors:.0f} failed)",
        f"raise it from {run.config.reward.timeout_s:g} s, or reward.num_workers"
        if slow
        else "`detail` in rollouts/<step>.jsonl says what the reward function raised",
    )


@_rule
def _not_finite(run: Record) -> Iterator[Finding]:
    rows = [row for row in run.rows[-WINDOW:] if row.get("non_finite")]
    if rows:
        names = dict.fromkeys(name for row in rows for name in row["non_finite"])
        yield Finding(
            "not_finite",
            float(len(rows)),
            0.0,
            "actor.optim.lr",
            f"{len(rows)} of the last {len(run.rows[-WINDOW:])} steps have numbers that are not "
            f"finite: {', '.join(list(names)[:3])}",
            f"lower it from {run.config.actor.optim.lr:g}, or actor.optim.clip_grad",
        )
