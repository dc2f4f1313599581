"""Layouts of a model against one of them, on the same rows: numbers, memory and speed."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property, partial
from typing import Any

from benchmarks.eight import plans
from benchmarks.eight.entries import Entry, Numbers, Result
from benchmarks.jobs import Job, Jobs, Repeats
from benchmarks.training import batch_of, rates, size_of
from benchmarks.workload import Model
from mrl.check_layout import LayoutResult, Round, bounds_of, compare, parse_layout, run_round
from mrl.check_layout.batch import Targets, make_rows, random_prompts
from mrl.check_layout.round import OPTIM
from mrl.config import Config, check_trainable
from mrl.config.schema import MegatronConfig
from mrl.resharding.families import ModelShape
from mrl.types import Sequences

_SEED = 7
_TOLD = ("actor/pg_loss", "actor/grad_norm")


@dataclass(frozen=True)
class Layouts:
    """A model, the layouts to compare, and the rows."""

    model: Model
    names: tuple[str, ...]  # as `mrl check-layout` reads them; the first is the reference
    rows: int
    prompt: int  # tokens, at most
    response: int  # tokens, at most
    budget: int  # tokens of a micro-batch on a context-parallel rank
    repeats: Repeats
    overrides: tuple[str, ...] = ()


def overrides_of(name: str) -> list[str]:
    """Write a layout's name as the config's keys."""
    plain = MegatronConfig()
    asked = parse_layout(name).megatron(plain)
    both = ((f.name, getattr(asked, f.name), getattr(plain, f.name)) for f in fields(plain))
    return [f"actor.megatron.{key}={value}" for key, value, usual in both if value != usual]


def entries(prefix: str, layouts: Layouts, jobs: Jobs, gpu: str) -> list[Entry]:
    """List one entry a layout."""
    check = _Check(layouts, jobs, gpu)
    return [
        Entry(
            f"{prefix}/{name}",
            partial(check.config, name),
            partial(check.measure, name),
            measured,
            partial(check.planned, name),
        )
        for name in layouts.names
    ]


def measured(found: Mapping[str, Any]) -> Numbers:
    """Give what the planner predicts."""
    return {
        "update_s": found["update"]["median_s"],
        "log_probs_s": found["log_probs"]["median_s"],
        "tflops_per_gpu": found["update"]["tflops_per_gpu"],
        "memory_gb": found["update"]["memory_gb"]["peak_allocated"],
    }


class _Check:
    """A model's layouts, and the reference's numbers once they are needed."""

    def __init__(self, layouts: Layouts, jobs: Jobs, gpu: str) -> None:
        self.layouts, self.jobs, self.gpu = layouts, jobs, gpu

    def config(self, name: str) -> Config:
        """Give a layout's config; raises ConfigError for one that is not legal."""
        config = self.jobs.config(self.layouts.model, *self._asked(name))
        check_trainable(config)
        return config

    def planned(self, name: str) -> Numbers:
        """Predict the passes over these rows."""
        wanted, rows = self.layouts, self.rows
        tokens, responses = (float(n.sum()) for n in (rows.tokens.lengths, rows.response_lengths))
        prompt = (tokens - responses) / len(rows) / wanted.prompt
        response = responses / len(rows) / wanted.response
        assume = [f"prompt={prompt}", f"response={response}"]
        return plans.passes(self.config(name), self.gpu, assume)

    def measure(self, name: str) -> Result:
        """Compare a layout with the reference, then time its passes."""
        start = time.monotonic()
        around = None if name == self.layouts.names[0] else self.reference
        job, wanted = self._open(name), self.layouts
        found = self._round(job, around)
        if around is None:
            self.reference = found
        kind = job.probe("implementation")[0]
        dtype = str(kind["dtype"]).removeprefix("torch.")
        bounds = bounds_of(dtype, job.shape.num_layers, job.shape.moe is not None)
        compared = None if around is None else compare(found, around, bounds)
        told = LayoutResult(
            name, job.pool.world_size, dtype, found, compared,
            "" if around is None else bounds.describe(), "", True, time.monotonic() - start,
        ).to_json()  # fmt: skip
        actor = job.actor(wanted.budget)
        batch = batch_of(job, self.rows, wanted.budget)
        update = job.measure(lambda: actor.update(batch), wanted.repeats)
        passed = job.measure(lambda: actor.log_probs(self.rows), wanted.repeats)
        return {
            "reference": wanted.names[0],
            "ok": not told.pop("failed"),
            **told,
            "actor": [{key: row[key] for key in _TOLD} for row in found.actor],
            "implementation": kind["transformer_impl"],
            "update": update | rates(job, self.rows, update["median_s"], train=True),
            "log_probs": passed | rates(job, self.rows, passed["median_s"], train=False),
            **size_of(self.rows),
        }

    @cached_property
    def reference(self) -> Round:
        """Run the first layout: weights are drawn alike, so a later call gets the same numbers."""
        return self._round(self._open(self.layouts.names[0]), None)

    @cached_property
    def rows(self) -> Sequences:
        """Draw the rows: responses of skewed lengths."""
        wanted = self.layouts
        folder = wanted.model.write(self.jobs.folder / wanted.model.name)
        words = range(2, ModelShape.from_folder(folder).vocab_size)
        prompts = random_prompts(wanted.rows, wanted.prompt, words, _SEED)
        return make_rows(prompts, wanted.response, words, _SEED)

    def _asked(self, name: str) -> tuple[list[str], int, tuple[int, int]]:
        wanted, world = self.layouts, parse_layout(name).world_size
        optim = ("lr", "eps", "clip_grad", "weight_decay")
        keys = [
            f"data.train_batch_size={wanted.rows}",
            f"actor.ppo_mini_batch_size={wanted.rows}",
            "rollout.n=1",
            f"actor.ppo_max_token_len_per_gpu={wanted.budget}",
            *(f"actor.optim.{key}={getattr(OPTIM, key)}" for key in optim),
            *wanted.overrides,
            *overrides_of(name),
        ]
        return keys, world, (wanted.prompt, wanted.response)

    def _open(self, name: str) -> Job:
        return self.jobs.open(self.layouts.model, *self._asked(name))

    def _round(self, job: Job, around: Round | None) -> Round:
        return run_round(job.actor(self.layouts.budget), None, self.rows, Targets(), around)
