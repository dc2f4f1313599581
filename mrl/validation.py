"""Scoring the policy on held-out prompts, with a sampling of its own."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping

from mrl.algorithms.reductions import Mean, reduced
from mrl.config import Config, RunPlan
from mrl.data import RLHFDataset, validation_batches
from mrl.rewards.registry import ScoreItem
from mrl.rewards.runner import RewardRunner
from mrl.tracking.recorder import Recorder
from mrl.tracking.rollouts import RolloutRow, rollout_rows
from mrl.types import Prompt, Sample, SamplingParams, Score
from mrl.workers.group import RolloutGroup


class Validator:
    """Generates and scores every held-out row, none dropped."""

    def __init__(
        self,
        config: Config,
        plan: RunPlan,
        dataset: RLHFDataset | None,
        rollout: RolloutGroup,
        scorer: RewardRunner,
        recorder: Recorder,
    ) -> None:
        self.config, self.dataset = config, dataset
        self.rollout, self.scorer, self.recorder = rollout, scorer, recorder
        val = config.rollout.val_kwargs
        self.sampling = SamplingParams(
            val.n,
            plan.val_temperature,
            val.top_p,
            val.top_k,
            config.data.max_response_length,
            config.rollout.seed,
            tuple(config.rollout.stop),
        )

    def __call__(self, step: int) -> Mapping[str, float]:
        """Give `val-core/<data_source>/<acc|reward>/mean@<n>` over the scored samples.

        `val-aux/<data_source>/unscored` counts the others. Nothing without held-out rows.
        """
        if self.dataset is None:
            return {}
        results: dict[str, list[float]] = defaultdict(list)
        unscored: Counter[str] = Counter()
        rows: list[RolloutRow] = []
        for prompts in validation_batches(self.dataset, self.config.data.val_batch_size):
            groups = self.rollout.generate(prompts, self.sampling)
            samples = [sample for group in groups for sample in group]
            by_uid = {prompt.uid: prompt for prompt in prompts}
            scores = self.scorer.score(
                [score_item(by_uid[sample.uid], sample) for sample in samples]
            )
            rows += rollout_rows(step, by_uid, samples, scores)
            for sample, score in zip(samples, scores, strict=True):
                name, value = _result(score)
                source = by_uid[sample.uid].data_source
                unscored[f"val-aux/{source}/unscored"] += value is None
                if value is not None:
                    results[f"val-core/{source}/{name}/mean@{self.sampling.n}"].append(value)
        self.recorder.rollouts("validation", step, rows)
        self.recorder.samples(step, rows[: self.config.trainer.log_val_generations])
        means = reduced({name: Mean.of(values) for name, values in results.items()})
        return {**means, **{name: float(count) for name, count in unscored.items()}}


def score_item(prompt: Prompt, sample: Sample) -> ScoreItem:
    """Ask for the verdict on one response."""
    return ScoreItem(prompt.data_source, sample.text, prompt.ground_truth, prompt.extra_info)


def _result(score: Score) -> tuple[str, float | None]:
    """Take the accuracy where the reward function reports one, else the reward."""
    if score.value is not None and score.extra is not None and "acc" in score.extra:
        return "acc", score.extra["acc"]
    return "reward", score.value
