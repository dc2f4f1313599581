"""What a step is trained on: prompts taken, answered and scored, until the batch is full."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

from mrl.algorithms.filters import is_mixed, tell_constant
from mrl.batching.experience import Experience, collect
from mrl.config import Config
from mrl.data import PromptStream
from mrl.rewards.runner import RewardRunner
from mrl.tracking.timers import Timers
from mrl.types import Prompt, Sample, SamplingParams, Score
from mrl.validation import score_item
from mrl.workers.group import RolloutGroup

# Generations of one step draw from seeds this far apart: beyond steps and replicas.
_REFILL_SEED_STRIDE = 2_000_000_011


@dataclass(frozen=True, slots=True)
class Group:
    """A prompt with all its responses."""

    prompt: Prompt
    samples: tuple[Sample, ...]
    scores: tuple[Score, ...]


@dataclass(frozen=True, slots=True)
class Generated:
    """The groups of a step, and the same as columns."""

    groups: tuple[Group, ...]
    batch: Experience
    scores: tuple[Score, ...]  # [N]
    greedy: tuple[tuple[Sample, Score], ...] | None  # of each group's prompt, for ReMax
    memory: Sequence[int]  # bytes in use by each rank after the engine fell asleep
    metrics: dict[str, float]

    @property
    def prompts(self) -> dict[str, Prompt]:
        """Give the prompts by uid."""
        return {group.prompt.uid: group.prompt for group in self.groups}


class Generator:
    """Fills the batch of a step.

    With algorithm.filter_groups, groups whose responses are all alike make room for others (Yu et
    al. 2025, DAPO, equation 11): the stream is read further, and the batch keeps its size.
    """

    def __init__(
        self, config: Config, stream: PromptStream, rollout: RolloutGroup, scorer: RewardRunner
    ) -> None:
        self.config, self.stream = config, stream
        self.rollout, self.scorer = rollout, scorer

    def __call__(self, step: int, timer: Timers) -> Generated:
        """Take prompts, generate and score, under the phases gen and reward.

        Raises ValueError when max_num_gen_batches do not fill the batch, unless they are to be
        filled up.
        """
        groups, metrics = self._fill(step, timer)
        samples = [group.samples for group in groups]
        with timer("gen"):
            best = self._greedy(step, groups)
            memory = self.rollout.sleep()
        with timer("reward"):
            scores = self._scores([g.prompt for g in groups], best) if best else ()
        return Generated(
            tuple(groups),
            collect(samples),
            tuple(score for group in groups for score in group.scores),
            tuple(zip(best, scores, strict=True)) if best else None,
            memory,
            metrics,
        )

    def _fill(self, step: int, timer: Timers) -> tuple[list[Group], dict[str, float]]:
        rules, size = self.config.algorithm.filter_groups, self.config.data.train_batch_size
        if not rules.enable:
            return self._generate(step, 0, timer), {}
        kept: list[Group] = []
        constant: list[Group] = []
        for number in count(1):
            for group in self._generate(step, number - 1, timer):
                (kept if is_mixed(group.scores, rules.metric) else constant).append(group)
            if len(kept) >= size:
                break
            if number == rules.max_num_gen_batches:
                if rules.at_limit == "stop":
                    raise ValueError(self._advice(number, kept, constant))
                kept, constant = _filled(kept, constant, size)
                break
            print(f"step {step}: {len(kept)} of {size} prompts after {number} generations")
        n = self.config.rollout.n
        return kept[:size], {
            "train/num_gen_batches": float(number),
            "training/filter_groups/evicted_samples": float(n * len(constant)),
            "training/filter_groups/discarded_surplus_samples": float(n * (len(kept) - size)),
        }

    def _generate(self, step: int, number: int, timer: Timers) -> list[Group]:
        prompts = self.stream.next_batch()
        with timer("gen"):
            groups = self.rollout.generate(prompts, self._sampling(step, number))
        with timer("reward"):
            owners = [p for p, group in zip(prompts, groups, strict=True) for _ in group]
            scores = iter(self._scores(owners, [s for group in groups for s in group]))
        return [
            Group(prompt, group, tuple(next(scores) for _ in group))
            for prompt, group in zip(prompts, groups, strict=True)
        ]

    def _scores(self, prompts: Sequence[Prompt], samples: Sequence[Sample]) -> tuple[Score, ...]:
        pairs = zip(prompts, samples, strict=True)
        return self.scorer.score([score_item(prompt, sample) for prompt, sample in pairs])

    def _sampling(self, step: int, number: int) -> SamplingParams:
        rollout, data = self.config.rollout, self.config.data
        return SamplingParams(
            rollout.n,
            rollout.temperature,
            rollout.top_p,
            rollout.top_k,
            data.max_response_length,
            # a seed of its own for each step, so that a resumed run draws what it would have
            rollout.seed + step + _REFILL_SEED_STRIDE * number,
            tuple(rollout.stop),
        )

    def _greedy(self, step: int, groups: Sequence[Group]) -> list[Sample]:
        """Answer each prompt once more, greedily, where the estimator compares with that."""
        if self.config.algorithm.adv_estimator != "remax":
            return []
        rollout, longest = self.config.rollout, self.config.data.max_response_length
        stop, seed = tuple(rollout.stop), rollout.seed + step
        sampling = SamplingParams(1, 0.0, 1.0, -1, longest, seed, stop)
        answers = self.rollout.generate([group.prompt for group in groups], sampling)
        return [answer for (answer,) in answers]

    def _advice(self, number: int, kept: Sequence[Group], constant: Sequence[Group]) -> str:
        rules, size = self.config.algorithm.filter_groups, self.config.data.train_batch_size
        found = tell_constant([group.scores for group in constant], rules.metric)
        return (
            f"algorithm.filter_groups.max_num_gen_batches={number} generations gave "
            f"{len(kept)} of {size} prompts whose responses differ; the others: {found}. All alike "
            "at the lowest score: too hard a data set, or a reward that never fires; at the "
            "highest: too easy a one. Else raise rollout.n, data.gen_batch_size or "
            "max_num_gen_batches (0: no limit), or set algorithm.filter_groups.at_limit=fill"
        )


def _filled(kept: list[Group], constant: list[Group], size: int) -> tuple[list[Group], list[Group]]:
    """Take what is missing from the others; gives both lists anew."""
    missing = size - len(kept)
    if missing > len(constant):
        raise ValueError(
            f"{len(kept) + len(constant)} prompts were generated for a batch of {size}: raise "
            "data.gen_batch_size or algorithm.filter_groups.max_num_gen_batches"
        )
    return kept + constant[:missing], constant[missing:]
