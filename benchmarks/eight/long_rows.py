"""One very long row, cut over all ranks in several ways."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from benchmarks.cases import Case
from benchmarks.eight import plans
from benchmarks.eight.entries import Entry, Numbers
from benchmarks.long_context import train_row
from benchmarks.training import Run
from mrl.config import Config


def entries(
    world: int, cuts: Mapping[str, tuple[Case, tuple[str, ...]]], tokens: int, run: Run, gpu: str
) -> list[Entry]:
    """List one entry a model and cut: a case, and what the cut adds to it."""
    found = []
    for name, (known, more) in cuts.items():
        case = replace(known, world=world, overrides=(*known.overrides, *more))
        found.append(
            Entry(
                f"{world}/{name}",
                partial(_config, run, case, tokens),
                partial(train_row, run, case, tokens),
                measured,
                partial(_planned, run, case, tokens, gpu),
            )
        )
    return found


def measured(found: Mapping[str, Any]) -> Numbers:
    """Give what the planner predicts."""
    return {
        "update_s": found["median_s"],
        "tflops_per_gpu": found["tflops_per_gpu"],
        "memory_gb": found["memory_gb"]["peak_allocated"],
    }


def _config(run: Run, case: Case, tokens: int) -> Config:
    longest = (run.scale.prompt, tokens - run.scale.prompt)
    one_row = ("data.train_batch_size=1", "actor.ppo_mini_batch_size=1", "rollout.n=1")
    return run.jobs.config(case.model, [*case.overrides, *one_row], case.world, longest)


def _planned(run: Run, case: Case, tokens: int, gpu: str) -> Numbers:
    found = plans.passes(_config(run, case, tokens), gpu)
    return {name: found[name] for name in ("update_s", "tflops_per_gpu", "memory_gb")}
