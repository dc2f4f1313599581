"""How fast does one very long row train, alone and cut over two GPUs?

Every layer is recomputed. On one H200, then on two; a length that does not fit is told as failed:
mrl bench long_context --name long_context_h200 [--models ...] [--tokens 65536 131072]
mrl bench long_context --name long_context_2x_h200 --models 7b_tp2
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from benchmarks.cases import Case
from benchmarks.jobs import Repeats
from benchmarks.training import Run, batch_of, rates, run_parts, size_of
from benchmarks.workload import Rows
from mrl.algorithms.reductions import reduced

NAME = "long_context"


def long(run: Run, into: dict[str, Any]) -> None:
    """One row of many tokens trains; ranks that share a device time nothing."""
    for name in run.models:
        case = run.scale.long.get(name)
        if case is None:
            continue
        found = into.setdefault(name, {})
        for tokens in run.tokens or run.scale.long_tokens:
            run.attempt(found, str(tokens), partial(train_row, run, case, tokens))


def train_row(run: Run, case: Case, tokens: int) -> dict[str, Any]:
    """Time the update of one row of so many tokens."""
    longest = (run.scale.prompt, tokens - run.scale.prompt)
    job = run.jobs.open(case.model, case.overrides, case.world, longest)
    rows = Rows("uniform", *longest, tokens).draw(job.shape.vocab_size)
    budget = tokens // job.group.ranks.cp  # of a rank: the row is cut over these
    batch, actor = batch_of(job, rows, budget), job.actor(budget)
    steps: list[Any] = []
    repeats = run.scale.repeats if job.gpus == case.world else Repeats(1, 1)
    found = job.measure(lambda: steps.append(actor.update(batch)), repeats)
    return {
        **found,
        **rates(job, rows, found["median_s"], train=True),
        **size_of(rows),
        "ranks": case.world,
        "gpus": job.gpus,
        "metrics": [reduced(step) for step in steps],
    }


def run(args: Sequence[str]) -> dict[str, Any]:
    """Measure every case and length, saving after each."""
    return run_parts(NAME, {"long": long}, args, __doc__)
