"""What the training benchmarks share: parts that measure the trainer's own actor.

Ranks are started here and weights are drawn on the device. Times are the controller's, from one
idle device to the next. TFLOP/s are those of `mrl.tracking.flops`, with the head for the tokens
that are predicted, which are those that it computes. What there is is saved after every
measurement.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.cases import REAL, SMOKE, Case, Scale
from benchmarks.jobs import Job, Jobs
from benchmarks.record import output_of, parser_of
from benchmarks.workload import Rows, policy_batch
from mrl.tracking.flops import forward_flops, mfu, peak_flops, training_flops
from mrl.types import PolicyBatch, Sequences
from mrl.workers.group import WorkerError

LAWS = ("uniform", "skewed")


@dataclass(frozen=True)
class Run:
    """What every part works with."""

    scale: Scale
    jobs: Jobs
    models: tuple[str, ...]
    laws: tuple[str, ...]
    budgets: tuple[int, ...]  # in place of the cases' own, if any
    save: Callable[[], object]
    profile: Path | None  # folder of the tables
    layouts: tuple[str, ...] = ()  # of the precision part; none: all
    tokens: tuple[int, ...] = ()  # of the long rows; none: the cases' own

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


def batch_of(job: Job, rows: Sequences, budget: int) -> PolicyBatch:
    """Make a mini-batch of rows, with the actor's own log-probs."""
    log_probs, _ = job.actor(budget).log_probs(rows)
    return policy_batch(rows, log_probs)


def size_of(rows: Sequences) -> dict[str, int]:
    """Count rows and tokens."""
    return {
        "rows": len(rows),
        "tokens": int(rows.tokens.lengths.sum()),
        "predicted": int(rows.response_lengths.sum()),
    }


Part = Callable[[Run, dict[str, Any]], None]


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


def run_parts(
    name: str, parts: Mapping[str, Part], args: Sequence[str], description: str | None
) -> dict[str, Any]:
    """Run the parts of a benchmark that its command line asks for."""
    parser = parser_of(name, description)
    if len(parts) > 1:
        parser.add_argument("--parts", nargs="+", choices=list(parts), default=list(parts))
    parser.add_argument("--models", nargs="+", help=f"of {', '.join(REAL.cases)}")
    parser.add_argument("--laws", nargs="+", choices=LAWS, default=list(LAWS))
    parser.add_argument("--budgets", nargs="+", type=int, default=[], help="tokens a micro-batch")
    parser.add_argument("--layouts", nargs="+", default=[], help="of the precision part")
    parser.add_argument("--tokens", nargs="+", type=int, default=[], help="of a long row")
    parser.add_argument("--profile", action="store_true", help="write the kernels of an update")
    options = parser.parse_args(list(args))
    scale, output = SMOKE if options.smoke else REAL, output_of(name, options)
    models = tuple(options.models or [case for case in scale.cases if case != "7b_tp2"])
    if unknown := set(models) - set(scale.cases):
        raise ValueError(f"--models {sorted(unknown)}: expected {', '.join(scale.cases)}")
    result: dict[str, Any] = {
        "smoke": options.smoke,
        "prompt": scale.prompt,
        "response": scale.response,
        "warmups": scale.repeats.warmups,
        "parts": {},
    }
    with tempfile.TemporaryDirectory() as folder:
        jobs = Jobs(scale.device, Path(folder))
        here = Run(
            scale, jobs, models, tuple(options.laws), tuple(options.budgets),
            lambda: output.write(result), output.folder if options.profile else None,
            tuple(options.layouts), tuple(options.tokens),
        )  # fmt: skip
        try:
            for part in options.parts if len(parts) > 1 else parts:
                print(f"{part}: {(parts[part].__doc__ or '').splitlines()[0]}", flush=True)
                parts[part](here, result["parts"].setdefault(part, {}))
        finally:
            jobs.close()
    return result
