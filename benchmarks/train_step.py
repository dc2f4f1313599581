"""How fast is a training step, what memory does it take, and is it right in 16 bits?

The trainer's own actor in ranks that this script starts; weights are drawn on the device. Times
are the controller's, from one idle device to the next. TFLOP/s are causal model FLOPs
(mrl/tracking/flops.py): attention by the sum of squared lengths, no lookup, no recompute, no
padding, and the head for the tokens that are predicted, which are those that it computes.
Saves after every measurement; parts are independent of each other:
python -m benchmarks.train_step --name train_step_h200 [--parts ...] [--models ...] [--smoke]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import precision, record
from benchmarks.cases import OFFLOAD, REAL, SMOKE, Case, Scale
from benchmarks.jobs import Job, Jobs, Repeats, spread
from benchmarks.workload import Rows, policy_batch
from mrl.algorithms.reductions import reduced
from mrl.tracking.flops import forward_flops, mfu, peak_flops, training_flops
from mrl.types import PolicyBatch, Sequences
from mrl.workers.group import WorkerError

NAME = "train_step"
LAWS = ("uniform", "skewed")
_PROFILED_MICRO_BATCHES = 2


@dataclass(frozen=True)
class Run:
    """What every part works with."""

    scale: Scale
    jobs: Jobs
    models: tuple[str, ...]
    laws: tuple[str, ...]
    budgets: tuple[int, ...]  # in place of the cases' own, if any
    save: Callable[[], None]
    profile: Path | None  # folder of the tables
    layouts: tuple[str, ...] = ()  # of the precision part; none: all

    @property
    def cases(self) -> dict[str, Case]:
        """Give the cases asked for."""
        return {name: self.scale.cases[name] for name in self.models if name in self.scale.cases}

    def rows(self, law: str, tokens: int) -> Rows:
        """Give a law of this run's lengths."""
        return Rows(law, self.scale.prompt, self.scale.response, tokens)

    def open(self, case: Case, *overrides: str) -> Job:
        """Run a case's job on short rows."""
        longest = (self.scale.prompt, self.scale.response)
        return self.jobs.open(case.model, [*case.overrides, *overrides], case.world, longest)

    def attempt(self, into: dict[str, Any], name: str, act: Callable[[], Any]) -> None:
        """Enter what `act` gives under a name, or why it failed; save either way."""
        try:
            into[name] = act()
        except (WorkerError, ValueError, RuntimeError) as error:
            into[name] = {"failed": _cause(str(error)), "log": str(error)[-6000:]}
            self.jobs.close()
        print(f"  {name}: {_shown(into[name])}", flush=True)
        self.save()


def rates(job: Job, rows: Sequences, seconds: float, train: bool) -> dict[str, float]:
    """Give TFLOP/s, tokens/s and utilisation a GPU of a pass over rows."""
    lengths = rows.tokens.lengths.tolist()
    count = training_flops if train else forward_flops
    flops = count(job.shape, lengths, int(rows.response_lengths.sum()))
    device_name = job.pool.ask("host", "describe")[0].device_name
    share = mfu(flops, seconds, job.gpus, peak_flops(device_name))
    return {
        "tflops_per_gpu": flops / seconds / job.gpus / 1e12,
        "tokens_per_s_per_gpu": sum(lengths) / seconds / job.gpus,
        **({} if share is None else {"mfu": share}),
    }


def _batch(job: Job, rows: Sequences, budget: int) -> PolicyBatch:
    log_probs, _ = job.actor(budget).log_probs(rows)
    return policy_batch(rows, log_probs)


def _update(run: Run, case: Case, variant: str, law: str, budget: int) -> dict[str, Any]:
    job = run.open(case, *case.variants[variant])
    rows = run.rows(law, case.tokens).draw(job.shape.vocab_size)
    batch, actor = _batch(job, rows, budget), job.actor(budget)
    steps: list[Any] = []
    found = job.measure(lambda: steps.append(actor.update(batch)), run.scale.repeats)
    return {
        **found,
        **rates(job, rows, found["median_s"], train=True),
        **_size(rows),
        **job.probe("implementation")[0],
        "metrics": reduced(steps[-1]),
    }


def _size(rows: Sequences) -> dict[str, int]:
    return {
        "rows": len(rows),
        "tokens": int(rows.tokens.lengths.sum()),
        "predicted": int(rows.response_lengths.sum()),
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
    batch, actor = _batch(job, rows, int(budget)), job.actor(int(budget))
    plain = job.measure(lambda: actor.update(batch), Repeats(1, 1))["median_s"]
    job.probe("start_profile")
    actor.update(batch)
    table = job.probe("stop_profile")[0]
    assert run.profile is not None
    run.profile.mkdir(parents=True, exist_ok=True)
    path = run.profile / f"profile_update_{name}.txt"
    path.write_text(f"{best}, {_size(rows)}: {plain:.3f} s without the profiler\n{table}\n")
    return {"setting": best, "file": path.name}


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
    return {**found, **rates(job, rows, found["median_s"], train=False), **_size(rows)}


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
    batch, actor = _batch(job, rows, budget), job.actor(budget)
    before = job.memory()["allocated"]
    found = job.measure(lambda: actor.update(batch), run.scale.repeats)
    found["extra_gb"] = round(found["memory_gb"]["peak_allocated"] - before, 3)
    forward = job.measure(lambda: actor.log_probs(rows), run.scale.repeats)
    forward["extra_gb"] = round(forward["memory_gb"]["peak_allocated"] - before, 3)
    return {"update": found, "logprob": forward, **_size(rows)}


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
        job.actor(budget).update(_batch(job, rows, budget))
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
    job.actor(budget).update(_batch(job, rows, budget))  # makes the optimizer's state
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


def long(run: Run, into: dict[str, Any]) -> None:
    """One row of 64k tokens trains; on too few devices ranks share one, which times nothing."""
    for name in run.models:
        if name in run.scale.long:
            run.attempt(into, name, partial(_long, run, run.scale.long[name]))


def _long(run: Run, case: Case) -> dict[str, Any]:
    longest = (run.scale.prompt, case.tokens - run.scale.prompt)
    job = run.jobs.open(case.model, case.overrides, case.world, longest)
    rows = Rows("uniform", *longest, case.tokens).draw(job.shape.vocab_size)
    budget = case.budgets["plain"][0]
    batch, actor = _batch(job, rows, budget), job.actor(budget)
    steps: list[Any] = []
    repeats = Repeats(1, 3 if job.gpus == case.world else 1)
    found = job.measure(lambda: steps.append(actor.update(batch)), repeats)
    return {
        **found,
        **rates(job, rows, found["median_s"], train=True),
        **_size(rows),
        "ranks": case.world,
        "gpus": job.gpus,
        "metrics": [reduced(step) for step in steps],
    }


def precise(run: Run, into: dict[str, Any]) -> None:
    """Log-probs, loss and gradient norm of each layout in 16 bits against float32."""
    precision.compare(run.jobs, run.scale.precision, run.attempt, into, run.layouts)


Part = Callable[[Run, dict[str, Any]], None]
PARTS: Mapping[str, Part] = {
    "update": update,
    "logprob": logprob,
    "head": head,
    "offload": offload,
    "growth": growth,
    "precision": precise,
    "long": long,
}


def _cause(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line.split(":")[0] or "out of memory" in line]
    return (errors or lines or ["nothing said"])[-1][:300]


def _shown(entry: Any) -> str:
    """Say an entry on one line."""
    if not isinstance(entry, Mapping):
        return str(entry)
    if "failed" in entry:
        return f"failed: {entry['failed']}"
    if "median_s" not in entry:
        nested = [f"{k} {_shown(v)}" for k, v in entry.items() if isinstance(v, Mapping)]
        plain = [
            f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}"
            for k, v in entry.items()
            if isinstance(v, int | float | str)
        ]
        return "; ".join([*plain, *nested])
    shown = f"{entry['median_s']:.3f} s ({entry['min_s']:.3f} to {entry['max_s']:.3f})"
    if "tflops_per_gpu" in entry:
        shown += f", {entry['tflops_per_gpu']:.0f} TFLOP/s"
        shown += f", {entry['tokens_per_s_per_gpu']:.0f} tokens/s a GPU"
    if "memory_gb" in entry:
        shown += f", peak {entry['memory_gb']['peak_allocated']:.1f} GB"
    if "extra_gb" in entry:
        shown += f", extra {entry['extra_gb']:.2f} GB"
    return shown


def run(args: Sequence[str]) -> dict[str, Any]:
    """Run the parts, saving after every measurement."""
    options = _parse(args)
    scale = SMOKE if options.smoke else REAL
    known = list(scale.cases)
    models = tuple(options.models or [name for name in known if name != "7b_tp2"])
    if unknown := set(models) - set(known):
        raise SystemExit(f"unknown models {sorted(unknown)}; known: {', '.join(known)}")
    result: dict[str, Any] = {"prompt": scale.prompt, "response": scale.response, "parts": {}}

    def save() -> None:
        record.write(options.name, result, options.folder)

    profile = options.folder if options.profile else None
    with tempfile.TemporaryDirectory() as folder:
        jobs = Jobs(scale.device, Path(folder))
        laws, budgets = tuple(options.laws), tuple(options.budgets)
        here = Run(scale, jobs, models, laws, budgets, save, profile, tuple(options.layouts))
        try:
            for part in options.parts:
                print(f"{part}: {(PARTS[part].__doc__ or '').splitlines()[0]}", flush=True)
                PARTS[part](here, result["parts"].setdefault(part, {}))
        finally:
            jobs.close()
    return result


def _parse(args: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.train_step")
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--models", nargs="+", help=f"of {', '.join(REAL.cases)}")
    parser.add_argument("--laws", nargs="+", choices=LAWS, default=list(LAWS))
    parser.add_argument("--budgets", nargs="+", type=int, default=[], help="tokens a micro-batch")
    parser.add_argument("--layouts", nargs="+", default=[], help="of the precision part")
    parser.add_argument("--name", default=NAME, help="of the JSON file")
    parser.add_argument("--folder", type=Path, default=record.RESULTS, help="of what is written")
    parser.add_argument("--profile", action="store_true", help="write the kernels of an update")
    parser.add_argument("--smoke", action="store_true", help="tiny shapes on CPU ranks")
    return parser.parse_args(list(args))


def main(args: Sequence[str]) -> int:
    """Run and write the JSON file."""
    options = _parse(args)
    path = record.write(options.name, run(args), options.folder)
    print(f"written to {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
