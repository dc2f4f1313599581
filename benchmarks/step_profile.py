"""What does a GPU do in each phase of a step, and what does it wait for?

Profiles the last step of a recipe of benchmarks/recipes.py on rank 0 (`trainer.profile_steps`) and
sums its trace up: busy and idle seconds, the kernels that take most, and the idle time before each.
The profiler itself costs host time: where the host is waited for, compare the step before.
mrl bench step_profile --name step_profile_h200 --runs 1.5b_grpo
mrl bench step_profile --trace RUN/profile/step_3/rank_0.trace.json.gz     any trace of `mrl train`
"""

from __future__ import annotations

import gzip
import json
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.recipes import LAWS, Case, cases, configured
from benchmarks.record import output_of, parser_of

NAME = "step_profile"
_STEPS = 3  # the last one is profiled, the one before is without the profiler
_SHOWN = 12  # kernels of a phase
_SHORT_S = 0.01  # phases below are not shown
_LONG_US = 50.0  # an idle time that is no launch gap
_NAME = 100  # letters of a kernel's name
_GPU = ("kernel", "gpu_memcpy", "gpu_memset")  # categories of what a GPU does


@dataclass(frozen=True, slots=True)
class Work:
    """What a GPU does at one time, in microseconds."""

    start: float
    end: float
    name: str


def read_trace(path: Path) -> tuple[dict[str, list[tuple[float, float]]], list[Work]]:
    """Read when each phase ran, and what the GPU did."""
    content = path.read_bytes()
    events = json.loads(gzip.decompress(content) if path.suffix == ".gz" else content)[
        "traceEvents"
    ]
    phases: dict[str, list[tuple[float, float]]] = {}
    works = []
    for event in events:
        if event.get("ph") != "X":
            continue
        start, end = float(event["ts"]), float(event["ts"]) + float(event["dur"])
        if event.get("cat") == "user_annotation":
            phases.setdefault(event["name"], []).append((start, end))
        elif event.get("cat") in _GPU:
            works.append(Work(start, end, event["name"]))
    return phases, works


def summed_up(times: Sequence[tuple[float, float]], works: Sequence[Work]) -> dict[str, Any]:
    """Sum up what the GPU did within some times; kernels that overlap are counted once."""
    seconds = sum(end - start for start, end in times) / 1e6
    runs = Counter[str]()
    took, waited = defaultdict[str, float](float), defaultdict[str, float](float)
    busy, launch_gaps, waits = 0.0, 0.0, 0.0
    remaining, done = sorted(works, key=lambda work: work.start), 0
    for start, end in sorted(times):
        free = start  # since when the GPU has nothing to do
        while done < len(remaining) and remaining[done].start < end:
            work, done = remaining[done], done + 1
            if work.end <= start:
                continue
            gap = max(0.0, work.start - free)
            waited[work.name] += gap
            launch_gaps += gap if gap <= _LONG_US else 0.0
            waits += gap if gap > _LONG_US else 0.0
            busy += max(0.0, min(work.end, end) - max(free, work.start))
            free = max(free, work.end)
            took[work.name] += work.end - work.start
            runs[work.name] += 1
        waits += max(0.0, end - free)
    return {
        "seconds": seconds,
        "busy_s": busy / 1e6,
        "short_gaps_s": launch_gaps / 1e6,
        "long_gaps_s": waits / 1e6,
        "kernels": runs.total(),
        "longest": {
            name[:_NAME]: {"s": us / 1e6, "runs": runs[name], "idle_before_s": waited[name] / 1e6}
            for name, us in _most(took, _SHOWN)
        },
        "waited_for": {name[:_NAME]: us / 1e6 for name, us in _most(waited, _SHOWN // 2)},
    }


def _most(found: Mapping[str, float], count: int) -> list[tuple[str, float]]:
    return sorted(found.items(), key=lambda item: -item[1])[:count]


def sum_up(path: Path) -> dict[str, dict[str, Any]]:
    """Sum up a trace by phase."""
    phases, works = read_trace(path)
    return {name: summed_up(times, works) for name, times in phases.items()}


def profiled(case: Case, steps: int, folder: Path) -> dict[str, Any]:
    """Run a case, profiling its last step; sums its trace up."""
    from transformers import AutoTokenizer

    from mrl.tracking.jsonl import read_metrics
    from mrl.trainer import RayPPOTrainer

    more = (*case.overrides, f"trainer.profile_steps=[{steps}]")
    config = configured(replace(case, overrides=more), folder, steps)
    RayPPOTrainer(config, AutoTokenizer.from_pretrained(folder / "model")).fit()
    rows = [row for row in read_metrics(folder / "run" / "metrics.jsonl") if row["step"] > 0]
    timers = {k: v for k, v in rows[-2].items() if k.startswith("timing_s/") and v}
    (trace,) = (folder / "run" / "profile").glob("step_*/rank_0.trace.json*")
    return {
        "config": {
            "recipe": case.recipe,
            "law": case.law,
            "response_tokens": case.response,
            "overrides": list(case.overrides),
        },
        "step_before": timers,
        "phases": sum_up(trace),
    }


def _show(phases: Mapping[str, Mapping[str, Any]]) -> None:
    for phase, found in phases.items():
        if found["seconds"] < _SHORT_S:
            continue
        share = found["busy_s"] / max(found["seconds"], 1e-9)
        print(
            f"{phase}: {found['seconds']:.3f} s, GPU busy {found['busy_s']:.3f} ({share:.0%}), "
            f"gaps up to {_LONG_US:.0f} us {found['short_gaps_s']:.3f}, longer "
            f"{found['long_gaps_s']:.3f}; {found['kernels']} kernels"
        )
        for name, entry in found["longest"].items():
            print(f"  {entry['s']:8.3f} s {entry['runs']:8d} x  {name}")
        for name, seconds in found["waited_for"].items():
            print(f"  {seconds:8.3f} s idle before  {name}")
    sys.stdout.flush()


def run(args: Sequence[str]) -> dict[str, Any]:
    """Profile the cases, or sum one trace up."""
    parser = parser_of(NAME, __doc__)
    known = sorted({*cases(False), *cases(True)})
    parser.add_argument("--runs", nargs="+", default=[], help=f"of {', '.join(known)}")
    parser.add_argument("--laws", nargs="+", choices=LAWS, default=["uniform"])
    parser.add_argument("--response", type=int, help="tokens, in place of the case's own")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="of the config")
    parser.add_argument("--trace", type=Path, help="sum this one up; nothing is run or written")
    options = parser.parse_args(list(args))
    if options.trace is not None:
        phases = sum_up(options.trace)
        _show(phases)
        return {"phases": phases}
    output, known_cases = output_of(NAME, options), cases(options.smoke)
    if unknown := set(options.runs) - set(known_cases):
        raise ValueError(f"--runs {sorted(unknown)}: expected {', '.join(known_cases)}")
    result: dict[str, Any] = {"smoke": options.smoke, "runs": {}}
    for name in options.runs or list(known_cases)[:1]:
        for law in options.laws:
            case = replace(known_cases[name], law=law)
            overrides = (*case.overrides, *options.set)
            case = replace(case, response=options.response or case.response, overrides=overrides)
            with tempfile.TemporaryDirectory() as folder:
                found = profiled(case, _STEPS, Path(folder))
            result["runs"][f"{name}/{law}"] = found
            print(f"{name}, {law}: the step before took {found['step_before']}")
            _show(found["phases"])
            output.write(result)
    return result
