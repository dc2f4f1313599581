"""How long from the command to the end of the first step, and what takes that time?

Processes of their own, `mrl train` as a user starts it, with random weights. `imports` and
`config_and_data` are the command's; of what ranks do side by side the slowest one counts. Before it
counts, one start fills the caches of the disk and of compiled kernels.
On one H200, then on two:
mrl bench startup --name startup_h200 --runs 1.5b_grpo
mrl bench startup --name startup_2x_h200 --runs 7b_grpo
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.marked import FOLDER
from benchmarks.recipes import cases, configured, settings
from benchmarks.record import ROOT, output_of, parser_of

NAME = "startup"
_REPEATS, _WARMUPS = 5, 1
_LIMIT_S = 1800.0
_PLANS = ("configs/grpo/qwen2.5_7b_2gpu.yaml", "configs/grpo/llama3.1_70b_128gpu.yaml")
_OF_RANKS = ("join", "engine", "megatron", "sync_layout")
Marks = Mapping[str, Sequence[Mapping[str, Any]]]  # by process


def parts(started: float, marks: Marks) -> dict[str, float]:
    """Give the seconds of each part and of all, from the notes of a run's processes.

    What ranks do one after the other is told by the slowest rank's; `rest` is what no part covers.
    """
    told = {mark["part"]: mark for mark in reversed(marks["command"])}  # the first of its kind
    ranks = [notes for who, notes in marks.items() if who != "command"]
    pool = told["pool"]["start"]
    joined = [mark["start"] for notes in ranks for mark in notes if mark["part"] == "join"]
    found = {
        "imports": told["imports"]["end"] - started,
        "config_and_data": pool - told["imports"]["end"],
        "rank_imports": max(joined) - pool,
    }
    for part in _OF_RANKS:
        seconds = [m["end"] - m["start"] for notes in ranks for m in notes if m["part"] == part]
        if seconds:
            found[part] = max(seconds)
    for part, name in (("sync", "first_sync"), ("step", "first_step")):
        found[name] = told[part]["end"] - told[part]["start"]
    total = told["step"]["end"] - started
    return {**found, "rest": total - sum(found.values()), "command_to_first_step": total}


def start(config: Path, overrides: Sequence[str], folder: Path) -> dict[str, float]:
    """Run one step in new processes. Raises RuntimeError, with the log's end, when it fails."""
    folder.mkdir()
    environment = {**os.environ, FOLDER: str(folder), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "benchmarks.marked", str(config), *overrides]
    command.append(f"trainer.default_local_dir={folder / 'run'}")
    log = folder / "log"
    started = time.time()
    with log.open("w") as stream:
        done = subprocess.run(
            command, stdout=stream, stderr=subprocess.STDOUT, env=environment, timeout=_LIMIT_S
        )
    if done.returncode != 0:
        raise RuntimeError(f"mrl train ended with {done.returncode}:\n{log.read_text()[-4000:]}")
    return parts(started, {
        path.stem: [json.loads(line) for line in path.read_text().splitlines()]
        for path in folder.glob("*.jsonl")
    })  # fmt: skip


def plan_seconds(recipe: str) -> float:
    """Time one `mrl plan` process, seconds. Raises CalledProcessError when it refuses."""
    begun = time.perf_counter()
    command = [sys.executable, "-m", "mrl.cli", "plan", recipe, "--json"]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return time.perf_counter() - begun


def measure(name: str, smoke: bool, repeats: int) -> dict[str, Any]:
    """Start a case again and again."""
    case, warmups = cases(smoke)[name], 0 if smoke else _WARMUPS
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        configured(case, folder, 1)
        given = settings(case, folder, 1)
        runs = [
            start(ROOT / "configs" / case.recipe, given, folder / f"start_{i}")
            for i in range(warmups + repeats)
        ][warmups:]
    return {"seconds": {part: [run[part] for run in runs] for part in runs[0]}}


def run(args: Sequence[str]) -> dict[str, Any]:
    """Measure the cases and `mrl plan`, saving after each."""
    parser = parser_of(NAME, __doc__)
    parser.add_argument("--runs", nargs="+", help="as of rl_step; default: those of GRPO")
    parser.add_argument("--repeats", type=int, help=f"default {_REPEATS}, 1 in a smoke run")
    parser.add_argument("--plans", nargs="*", default=list(_PLANS), help="recipes to plan")
    options = parser.parse_args(list(args))
    output = output_of(NAME, options)
    repeats = options.repeats or (1 if options.smoke else _REPEATS)
    known = cases(options.smoke)
    names = options.runs or [name for name in known if name.endswith("_grpo")]
    if unknown := set(names) - set(known):
        raise ValueError(f"--runs {sorted(unknown)}: expected {', '.join(known)}")
    result: dict[str, Any] = {"smoke": options.smoke, "cases": {}, "plan_s": {}}
    for recipe in options.plans:
        result["plan_s"][recipe] = [plan_seconds(recipe) for _ in range(repeats)]
        print(f"mrl plan {recipe}: {min(result['plan_s'][recipe]):.2f} s", flush=True)
    for name in names:
        found = measure(name, options.smoke, repeats)
        result["cases"][name] = found
        for part, seconds in found["seconds"].items():
            shown = ", ".join(f"{s:.2f}" for s in seconds)
            print(f"{name} {part:22} {shown} s", flush=True)
        output.write(result)
    return result
