"""How fast is the forward pass that gives log-probs and entropies?

On one H200, then on two:
mrl bench logprob --name logprob_h200 [--models ...] [--laws ...] [--budgets ...]
mrl bench logprob --name logprob_2x_h200 --models 7b_tp2
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from benchmarks.cases import Case
from benchmarks.training import Run, rates, run_parts, size_of

NAME = "logprob"


def logprob(run: Run, into: dict[str, Any]) -> None:
    """The forward pass for log-probs and entropies alone."""
    for name, case in run.cases.items():
        found = into.setdefault(name, {})
        if case.world > run.jobs.devices:
            found["skipped"] = f"needs {case.world} devices, there are {run.jobs.devices}"
            continue
        for law in run.laws:
            for budget in run.budgets or case.log_prob_budgets:
                run.attempt(
                    found,
                    f"{law}/{budget}",
                    partial(_logprob, run, case, law, budget),
                )


def _logprob(run: Run, case: Case, law: str, budget: int) -> dict[str, Any]:
    job = run.open(case)
    rows = run.rows(law, case.tokens).draw(job.shape.vocab_size)
    actor = job.actor(budget)
    found = job.measure(lambda: actor.log_probs(rows), run.scale.repeats)
    return {**found, **rates(job, rows, found["median_s"], train=False), **size_of(rows)}


def run(args: Sequence[str]) -> dict[str, Any]:
    """Measure every case, saving after each."""
    return run_parts(NAME, {"logprob": logprob}, args, __doc__)
