"""Do layouts, weight transfers and steps of real models hold and scale on four and eight GPUs?

layouts       one batch in every layout against one of them: numbers, memory, TFLOP/s
reshard       trainer to engine: time, bytes against their floor, `mode=gather`, bits
grpo          whole steps on 1, 2, 4 and 8 GPUs, the work of each the same
ppo           the same on all GPUs, the critic on another layout than the actor
long_context  one row of 131,072 tokens over all GPUs, by ring, Ulysses and both
plan          what `mrl plan` and `mrl reshard` say, beside each of these measurements

Every entry is saved when it is done, and one that is done is not repeated: call again with the
same --folder and --name to go on. `--minutes` starts no entry after that time. Where a layout is
not legal for a model, the rule is told in its place. On a host of eight:
mrl bench eight_gpus --name eight_gpus_h200 --folder runs/eight --parts layouts --minutes 7
On CPU ranks with tiny models, where speed says nothing:
mrl bench eight_gpus --name eight_gpus_cpu --folder runs/eight --smoke
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import record
from benchmarks.eight import layouts, long_rows, steps, weights
from benchmarks.eight.entries import Entry, Kept, beside_plan, run_entries
from benchmarks.eight.goals import goals, shown
from benchmarks.eight.sizes import GPUS, REAL, SMOKE, WORLDS, Sizes
from benchmarks.jobs import Jobs
from benchmarks.record import output_of, parser_of
from benchmarks.roofline import device_name, gpu_key
from benchmarks.training import LAWS, Run
from mrl.checkpoint.atomic import write_atomically

NAME = "eight_gpus"
MEASURED = ("layouts", "reshard", "grpo", "ppo", "long_context")
PARTS = (*MEASURED, "plan")
_PLANNED_FOR = "h200"  # where the machine's own GPU is not known to the planner


def listed(
    sizes: Sizes, worlds: Sequence[int], laws: Sequence[str], jobs: Jobs, gpu: str
) -> dict[str, list[Entry]]:
    """List every entry of every part for so many ranks."""
    here = Run(sizes.scale, jobs, (), LAWS, (), lambda: None, None)
    counts = [gpus for gpus in GPUS if gpus <= max(worlds)]
    return {
        "layouts": [
            entry
            for world in worlds
            for model, wanted in sizes.layouts[world].items()
            for entry in layouts.entries(f"{world}/{model}", wanted, jobs, gpu)
        ],
        "reshard": [
            entry for world in worlds for entry in weights.entries(world, sizes is SMOKE, gpu)
        ],
        "grpo": [
            steps.entry(
                f"{model}/{law}/{gpus}", scaled.on(gpus, law), sizes.steps, gpu,
                jobs.folder / f"grpo_{model}_{law}",
            )
            for law in laws
            for gpus in counts
            for model, scaled in sizes.scaled.items()
        ],
        "ppo": [
            steps.entry(
                f"{model}/{law}/{world}", scaled.on(world, law), sizes.steps, gpu,
                jobs.folder / f"ppo_{model}_{law}",
            )
            for model, scaled in sizes.ppo.items()
            for law in laws
            for world in worlds
        ],
        "long_context": [
            entry
            for world in worlds
            for entry in long_rows.entries(world, sizes.long[world], sizes.long_tokens, here, gpu)
        ],
    }  # fmt: skip


def run(args: Sequence[str]) -> dict[str, Any]:
    """Measure what is asked for and lacking; gives all that is kept, with goals and figures."""
    options = _parse(args)
    output = output_of(NAME, options)
    folder = (options.folder or record.SMOKES) / f"{output.name}_parts"
    sizes, measures = SMOKE if options.smoke else REAL, set(options.parts) != {"plan"}
    worlds = options.ranks or _worlds(options.smoke or not measures)
    if measures and not options.smoke and torch.cuda.device_count() < max(worlds):
        raise ValueError(
            f"--ranks {max(worlds)}: there are {torch.cuda.device_count()} GPUs; "
            "give --smoke for tiny models on CPU ranks, or --parts plan"
        )
    gpu = gpu_key(device_name(record.environment())) or _PLANNED_FOR
    until = time.monotonic() + 60 * options.minutes
    with tempfile.TemporaryDirectory() as temporary:
        jobs = Jobs(sizes.scale.device, Path(temporary))
        every = listed(sizes, worlds, options.laws, jobs, gpu)
        kept = {part: Kept(folder / f"{part}.json") for part in MEASURED}
        try:
            left = _measure(options, every, kept, jobs, until)
            if "plan" in options.parts:
                print("plan", flush=True)
                plan = {part: beside_plan(kept[part], every[part]) for part in MEASURED}
                write_atomically(folder / "plan.json", json.dumps(plan, indent=1))
        finally:
            jobs.close()
    result = _result(options, folder, sizes, kept, gpu)
    print("\n".join(shown(result)))
    for part, names in left.items():
        print(f"left for another call, {part}: {', '.join(names)}")
    return result


def _measure(
    options: argparse.Namespace,
    every: Mapping[str, Sequence[Entry]],
    kept: Mapping[str, Kept],
    jobs: Jobs,
    until: float,
) -> dict[str, list[str]]:
    """Run the parts; names the entries that the time was too short for."""
    left = {}
    for part in MEASURED:
        if part in options.parts:
            print(part, flush=True)
            wanted = [e for e in every[part] if _matches(e.name, options.only)]
            if names := run_entries(kept[part], wanted, until):
                left[part] = names
            jobs.close()
    return left


def _matches(name: str, only: Sequence[str]) -> bool:
    return not only or any(text in name for text in only)


def _result(
    options: argparse.Namespace, folder: Path, sizes: Sizes, kept: Mapping[str, Kept], gpu: str
) -> dict[str, Any]:
    parts: dict[str, Any] = {part: found.entries for part, found in kept.items() if found.entries}
    plan = folder / "plan.json"
    planned = json.loads(plan.read_text()) if plan.exists() else {}
    scaling = steps.efficiencies(kept["grpo"].entries, sizes.scaled, LAWS)
    return {
        "smoke": options.smoke,
        "planned_for": gpu,
        "long_tokens": sizes.long_tokens,
        "parts": {**parts, **({"plan": planned} if planned else {})},
        "scaling": scaling,
        "goals": goals(parts, scaling, sizes.scaled, options.smoke),
    }


def _worlds(any_number: bool) -> list[int]:
    """Give the sizes to run: all, or the largest that the GPUs allow."""
    if any_number:
        return list(WORLDS)
    return [max((w for w in WORLDS if w <= torch.cuda.device_count()), default=min(WORLDS))]


def _parse(args: Sequence[str]) -> argparse.Namespace:
    parser = parser_of(NAME, __doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--ranks", nargs="+", type=int, choices=WORLDS, help="default: all GPUs")
    parser.add_argument("--only", nargs="+", default=[], help="entries whose names hold any")
    parser.add_argument("--laws", nargs="+", choices=LAWS, default=list(LAWS), help="of lengths")
    parser.add_argument("--minutes", type=float, default=1e6, help="start no entry after these")
    return parser.parse_args(list(args))
