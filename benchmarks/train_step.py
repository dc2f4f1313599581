"""How fast is a training step, what memory does it take, and is it right in 16 bits?

On one H200, then on two (parts are independent of each other):
mrl bench train_step --name train_step_h200 [--parts ...] [--models ...] [--profile]
mrl bench train_step --name train_step_2x_h200 --models 7b_tp2
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from benchmarks import precision
from benchmarks.cases import OFFLOAD, Case
from benchmarks.jobs import Repeats, spread
from benchmarks.training import Part, Run, batch_of, rates, run_parts, size_of
from mrl.algorithms.reductions import reduced

NAME = "train_step"
_PROFILED_MICRO_BATCHES = 2


def _update(run: Run, case: Case, variant: str, law: str, budget: int) -> dict[str, Any]:
    job = run.open(case, *case.variants[variant])
    rows = run.rows(law, case.tokens).draw(job.shape.vocab_size)
    batch, actor = batch_of(job, rows, budget), job.actor(budget)
    steps: list[Any] = []
    found = job.measure(lambda: steps.append(actor.update(batch)), run.scale.repeats)
    return {
        **found,
        **rates(job, rows, found["median_s"], train=True),
        **size_of(rows),
        **job.probe("implementation")[0],
        "metrics": reduced(steps[-1]),
    }


def update(run: Run, into: dict[str, Any]) -> None:
    """Forward, backward and optimizer on one mini-batch, by token budget and length law."""
    for name, case in run.cases.items():
        found = into.setdefault(name, {})
        if case.world > run.jobs.devices:
            found["skipped"] = f"needs {case.world} devices, there are {run.jobs.devices}"
            continue
        for variant, budgets in case.budgets.items():
            for law in run.laws:
                for budget in run.budgets or budgets:
                    run.attempt(
                        found,
                        f"{variant}/{law}/{budget}",
                        partial(_update, run, case, variant, law, budget),
                    )
        if run.profile is not None:
            run.attempt(found, "profile", partial(_profile, run, name, case, found))


def _profile(run: Run, name: str, case: Case, found: Mapping[str, Any]) -> dict[str, Any]:
    """Write the kernels of one update at the fastest setting."""
    done = {key: entry["tflops_per_gpu"] for key, entry in found.items() if "median_s" in entry}
    best = max(done, key=done.__getitem__)
    variant, law, budget = best.split("/")
    job = run.open(case, *case.variants[variant])
    tokens = min(case.tokens, _PROFILED_MICRO_BATCHES * int(budget))
    rows = run.rows(law, tokens).draw(job.shape.vocab_size)
    batch, actor = batch_of(job, rows, int(budget)), job.actor(int(budget))
    plain = job.measure(lambda: actor.update(batch), Repeats(1, 1))["median_s"]
    job.probe("start_profile")
    actor.update(batch)
    table = job.probe("stop_profile")[0]
    assert run.profile is not None
    run.profile.mkdir(parents=True, exist_ok=True)
    path = run.profile / f"profile_update_{name}.txt"
    path.write_text(f"{best}, {size_of(rows)}: {plain:.3f} s without the profiler\n{table}\n")
    return {"setting": best, "file": path.name}


def head(run: Run, into: dict[str, Any]) -> None:
    """Memory and time of one micro-batch with and without the fused head: one layer below it."""
    for tokens in run.scale.head_tokens:
        for fused in (True, False):
            run.attempt(
                into,
                f"{tokens}/{'fused' if fused else 'plain'}",
                partial(_head, run, tokens, fused),
            )


def _head(run: Run, tokens: int, fused: bool) -> dict[str, Any]:
    case = Case(run.scale.head, 1, (), tokens, {}, ())
    job = run.open(case, f"actor.megatron.use_fused_kernels={str(fused).lower()}")
    # whole rows fill the micro-batch
    rows = run.rows("uniform", tokens).draw(job.shape.vocab_size)
    budget = int(rows.tokens.lengths.sum())
    batch, actor = batch_of(job, rows, budget), job.actor(budget)
    before = job.memory()["allocated"]
    found = job.measure(lambda: actor.update(batch), run.scale.repeats)
    found["extra_gb"] = round(found["memory_gb"]["peak_allocated"] - before, 3)
    forward = job.measure(lambda: actor.log_probs(rows), run.scale.repeats)
    forward["extra_gb"] = round(forward["memory_gb"]["peak_allocated"] - before, 3)
    return {"update": found, "logprob": forward, **size_of(rows)}


def growth(run: Run, into: dict[str, Any]) -> None:
    """Memory after each of some steps of log-probs and update, everything offloaded between."""
    for name, case in run.cases.items():
        if case.world <= run.jobs.devices:
            run.attempt(into, name, partial(_growth, run, case))


def _growth(run: Run, case: Case) -> dict[str, Any]:
    job = run.open(case, *OFFLOAD)
    budget = case.budgets["plain"][0]
    steps = []
    for step in range(run.scale.growth_steps):
        rows = run.rows("skewed", 2 * budget).draw(job.shape.vocab_size, seed=step)
        job.actor(budget).update(batch_of(job, rows, budget))
        job.probe("give_back")  # as another role's turn does
        steps.append(job.memory())
    return {"steps": steps, "spread_from_step_2_gb": _spread_from_second(steps)}


def _spread_from_second(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {
        name: round(max(s[name] for s in steps[1:]) - min(s[name] for s in steps[1:]), 3)
        for name in ("allocated", "reserved", "host")
    }


def offload(run: Run, into: dict[str, Any]) -> None:
    """Seconds that parameters and optimizer state take to the host and back."""
    for name, case in run.cases.items():
        if case.world <= run.jobs.devices:
            run.attempt(into, name, partial(_offload, run, case))


def _offload(run: Run, case: Case) -> dict[str, Any]:
    job = run.open(case, *OFFLOAD)
    budget = case.budgets["plain"][0]
    rows = run.rows("skewed", budget).draw(job.shape.vocab_size)
    job.actor(budget).update(batch_of(job, rows, budget))  # makes the optimizer's state
    there = job.memory()
    first = {"out_s": max(job.probe("give_back")), "back_s": max(job.probe("bring"))}
    out, back = [], []
    for _ in range(run.scale.cycles):
        out.append(max(job.probe("give_back")))
        away = job.memory()
        back.append(max(job.probe("bring")))
    return {
        "out": spread(out),
        "back": spread(back),
        "first": first,  # takes the pinned buffers
        "host_gb": max(job.probe("host_bytes")) / 1e9,
        "device_gb": {"there": there["allocated"], "away": away["allocated"]},
    }


def precise(run: Run, into: dict[str, Any]) -> None:
    """Log-probs, loss and gradient norm of each layout in 16 bits against float32."""
    precision.compare(run.jobs, run.scale.precision, run.attempt, into, run.layouts)


PARTS: Mapping[str, Part] = {
    "update": update,
    "head": head,
    "offload": offload,
    "growth": growth,
    "precision": precise,
}


def run(args: Sequence[str]) -> dict[str, Any]:
    """Run the parts, saving after every measurement."""
    return run_parts(NAME, PARTS, args, __doc__)
