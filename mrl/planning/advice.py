"""Advice from the tuning checklist: each rule with the number that triggers it and its key."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from mrl.planning.job import Job
from mrl.planning.memory import MemoryPlan, engine_memory
from mrl.tracking.findings import GENERATION_SHARE, generation_advice

_ROOM, _TIGHT = 0.6, 0.95  # of the GPU in a log-prob pass
_KINDS = 3
_LONG = 8192
_GROUP = 16


@dataclass(frozen=True, slots=True)
class Advice:
    """What may be better, the number that says so and the key to change."""

    rule: str
    key: str
    found: str
    text: str

    def __str__(self) -> str:
        return f"{self.key}: {self.found}; {self.text}"


@dataclass(frozen=True)
class Facts:
    """What the rules look at: planned here, measured in a report of a run."""

    job: Job
    generation_share: float
    log_prob_peak: float  # of the GPU's memory


Rule = Callable[[Facts], Iterator[tuple[str, str, str]]]
RULES: dict[str, Rule] = {}


def _rule(make: Rule) -> Rule:
    RULES[make.__name__.strip("_")] = make
    return make


def advise(facts: Facts) -> tuple[Advice, ...]:
    """Apply every rule."""
    return tuple(Advice(name, *found) for name, rule in RULES.items() for found in rule(facts))


def facts_of(job: Job, memory: MemoryPlan, generation_share: float) -> Facts:
    """Take the numbers of a plan."""
    peak = max(
        phase.total for group in memory.groups for phase in group.phases if phase.name == "log-prob"
    )
    return Facts(job, generation_share, peak / memory.capacity)


@_rule
def _generation_share(facts: Facts) -> Iterator[tuple[str, str, str]]:
    share = facts.generation_share
    if share > GENERATION_SHARE:
        held = max(facts.job.plan.sequences_per_replica)
        key, text = generation_advice(facts.job.config.rollout, held)
        yield key, f"generation takes {share:.0%} of the step, above {GENERATION_SHARE:.0%}", text


@_rule
def _log_prob_batch(facts: Facts) -> Iterator[tuple[str, str, str]]:
    peak, actor = facts.log_prob_peak, facts.job.roles[0]
    settings = actor.settings
    setting = "log_prob_max_token_len" if settings.log_prob_dynamic else "log_prob_micro"
    key = settings.keys[setting]
    if key.startswith("actor."):
        key = key.replace("actor.ppo_", "rollout.log_prob_")
    tokens = facts.job.local_tokens(actor, log_prob=True)
    if peak > _TIGHT:
        yield (
            key,
            f"a log-prob pass takes {peak:.0%} of the GPU, above {_TIGHT:.0%}",
            f"lower it from {tokens:,} tokens",
        )
    elif peak < _ROOM and tokens < min(2 * facts.job.local_tokens(actor), 16384):
        yield (
            key,
            f"log-prob micro-batches of {tokens:,} tokens take {peak:.0%} of the GPU",
            f"a pass without gradients can take {2 * tokens:,}",
        )


@_rule
def _rollout_tp(facts: Facts) -> Iterator[tuple[str, str, str]]:
    job, tp = facts.job, facts.job.config.rollout.tensor_model_parallel_size
    if tp == 1:
        return
    engine = engine_memory(job)
    cache = engine.kv - engine.weights  # half the ranks: twice the weights on each
    tokens = cache / (2 * engine.kv_token)
    held = int(tokens / job.longest)
    wanted = min(job.config.rollout.max_num_seqs, -(-max(job.plan.sequences_per_replica) // 2))
    if held >= wanted:
        yield (
            "rollout.tensor_model_parallel_size",
            f"at {tp // 2} the cache would still hold {held:,} of {wanted:,} sequences",
            f"{tp} is larger than needed",
        )


@_rule
def _kinds_of_parallelism(facts: Facts) -> Iterator[tuple[str, str, str]]:
    for role in facts.job.roles:
        layout = role.plan.layout
        sizes = {"tp": layout.tp, "pp": layout.pp, "cp": layout.cp, "ep": layout.ep}
        used = [f"{name}{size}" for name, size in sizes.items() if size > 1]
        if len(used) >= _KINDS and role.settings.keys["megatron"].startswith(role.name):
            yield (
                role.settings.keys["megatron"],
                f"{len(used)} kinds of parallelism at once ({' '.join(used)})",
                "each adds its own waits: see --suggest for layouts with fewer",
            )


@_rule
def _long_sequences(facts: Facts) -> Iterator[tuple[str, str, str]]:
    job, actor = facts.job, facts.job.roles[0]
    m = actor.settings.megatron
    if job.longest > _LONG and actor.plan.layout.cp == 1 and m.recompute_granularity is None:
        yield (
            "actor.megatron.context_parallel_size",
            f"sequences of {job.longest:,} tokens, above {_LONG:,}, on one rank each",
            "all-to-all context parallelism (Ulysses) cuts their activations",
        )


@_rule
def _group_size(facts: Facts) -> Iterator[tuple[str, str, str]]:
    n = facts.job.config.rollout.n
    if n > _GROUP:
        yield (
            "rollout.n",
            f"{n} responses a prompt, above {_GROUP}",
            "more prompts of fewer responses usually teach more for the same time",
        )


@_rule
def _starved_cache(facts: Facts) -> Iterator[tuple[str, str, str]]:
    job, engine = facts.job, engine_memory(facts.job)
    wanted = min(job.config.rollout.max_num_seqs, max(job.plan.sequences_per_replica))
    if engine.sequences < wanted:
        yield (
            "rollout.gpu_memory_utilization",
            f"the cache holds {engine.sequences:,} sequences of {job.plan.max_model_len:,} tokens, "
            f"{wanted:,} are to run at a time",
            f"raise {job.config.rollout.gpu_memory_utilization} or lower rollout.max_num_seqs",
        )


@_rule
def _idle_ranks(facts: Facts) -> Iterator[tuple[str, str, str]]:
    job = facts.job
    for role in job.roles:
        if not role.settings.trained:
            continue
        plan, layout = role.plan, role.plan.layout
        budget = job.local_tokens(role)
        held = plan.samples_per_rank * job.longest / layout.cp
        micro = plan.micro_batches or -(-held // budget)
        if micro < layout.pp:
            yield (
                role.settings.keys["mini"],
                f"{micro:.0f} micro-batches a step fill {layout.pp} pipeline stages of {role.name}",
                "stages wait for each other: larger mini-batches or smaller micro-batches",
            )
        elif plan.samples_per_rank < 2 and layout.dp > 1:
            yield (
                role.settings.keys["mini"],
                f"dp {layout.dp} leaves {plan.samples_per_rank} sample a rank and optimizer step",
                "ranks with a short one wait for the others: fewer dp ranks or larger mini-batches",
            )
