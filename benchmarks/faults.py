"""Does a job end soon after any fault, say its cause, leave nothing, and go on to the same numbers?

`matrix` plants faults of every kind in every phase, one after the other in one job that restarts
from its last checkpoint each time, and compares its numbers with those of a run without faults.
`rewards` does so to scoring processes: the job goes on, one sample a fault is unscored.
`kills` ends a whole job, controller and ranks, at random moments, starts it again each time, and
compares likewise. Times are from the fault to the end of every process of its ranks; where only
the clock can tell (a rank that is stopped or sleeps), trainer.hang_timeout_s is left out.

With `--folder` each part is kept there when it is done, and not repeated by the next call.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks import record
from mrl.checkpoint.atomic import write_atomically
from mrl.tracking.jsonl import read_metrics
from tests.faults.jobs import (
    IDLE_KINDS,
    LAUNCHERS,
    PLANTER,
    RANK_KINDS,
    RANK_PHASES,
    RANKS,
    Ending,
    Fault,
    FaultyJob,
    start,
    write_inputs,
)
from tests.runs import ROOT, steps_of

NAME = "faults"
# How a launcher learns of an end does not depend on the phase: one meets all, the others some.
_SOME_PHASES = ("update", "save", "idle")
_RUN_LIMIT_S = 3600.0


def planned(kinds: Sequence[str], phases: Sequence[str], seed: int) -> list[Fault]:
    """List a fault a step, of every kind in every phase that can meet it, on ranks by turns."""
    pairs = [(kind, phase) for kind in kinds for phase in phases]
    random.Random(seed).shuffle(pairs)
    possible = [p for p in pairs if p[1] != "idle" or p[0] in IDLE_KINDS]
    return [Fault(k, p, i % RANKS, i + 2) for i, (k, p) in enumerate(possible)]


def matrix(
    launcher: str, faults: Sequence[Fault], config: Path, folder: Path, steps: int, name: str
) -> dict[str, Any]:
    """Run one job through all faults; gives how each ended it, and whether its numbers differ."""
    endings: list[Ending] = []
    problem, left = "", []
    with FaultyJob(launcher, config, folder / name / launcher, faults, steps) as job:
        try:
            for index in range(len(faults)):
                endings.append(job.meet(index))
                print(f"{launcher}: {endings[-1]}", file=sys.stderr, flush=True)
            left = job.finish()
        except (RuntimeError, AssertionError, LookupError) as error:
            problem = str(error)[-3000:]
    return {
        "launcher": launcher,
        "injected": len(endings),
        "ended_as_wanted": sum(ending.as_wanted for ending in endings),
        "longest_s": round(max((e.seconds - e.detected_s for e in endings), default=0.0), 1),
        "left_at_the_end": left,
        "problem": problem,
        "steps": _compare(job.run, folder / "whole" / "run", steps),
        "endings": [{**asdict(e), "as_wanted": e.as_wanted} for e in endings],
    }


def rewards(launcher: str, kinds: Sequence[str], config: Path, folder: Path) -> dict[str, Any]:
    """Let scoring processes meet faults; gives what `matrix` does, but for its comparison."""
    faults = [Fault(kind, "reward", 0, 0) for kind in kinds]
    steps = 6 * len(faults)
    result = matrix(launcher, faults, config, folder, steps, "rewards")
    written = (folder / "rewards" / launcher / "run").glob("*/*.jsonl")
    rows = [json.loads(line) for file in written for line in file.read_text().splitlines()]
    result["unscored"] = sum(row["score"] is None for row in rows)
    result["steps"]["differ"] = None  # a sample less changes what is learnt
    return result


def kills(count: int, launcher: str, config: Path, folder: Path, seed: int) -> dict[str, Any]:
    """Kill a whole job at random moments and start it again; gives what was lost."""
    draw = random.Random(seed)
    steps = 6 * count
    run, lost, points = folder / "killed" / "run", [], []
    for number in range(count):
        while_starting = draw.random() < 0.2
        wait_s = draw.uniform(0.0, 10.0) if while_starting else draw.uniform(0.0, 4.0)
        before = _last_step(run)
        with start(launcher, config, run, steps) as command:
            deadline = time.monotonic() + _RUN_LIMIT_S
            while not while_starting and _last_step(run) <= before:
                if command.process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"ended before its kill:\n{command.stderr}")
                time.sleep(0.02)
            stop = time.monotonic() + wait_s
            while time.monotonic() < stop and command.process.poll() is None:
                command.tree()
                time.sleep(0.02)
            for process in (*command.tree(), command.process):  # ranks and controller at once
                os.kill(process.pid, signal.SIGKILL)
        done, kept = _last_step(run), _last_checkpoint(run)
        lost.append(max(0, done - kept))
        points.append({"step": done, "checkpoint": kept, "while_starting": while_starting})
        print(f"kill {number}: {points[-1]}", file=sys.stderr, flush=True)
    with start(launcher, config, run, steps) as command:
        status = command.wait(_RUN_LIMIT_S)
        problem = "" if status == 0 else command.stderr[-3000:]
    return {
        "kills": count,
        "points": points,
        "steps_lost_beyond_a_checkpoint": sum(lost),
        "problem": problem,
        "steps": _compare(run, folder / "whole" / "run", steps),
    }


def whole(config: Path, folder: Path, steps: int) -> dict[str, Any]:
    """Run without a fault for as many steps as any of the others."""
    with start("warm", config, folder / "whole" / "run", steps) as command:
        if command.wait(_RUN_LIMIT_S) != 0:
            raise RuntimeError(command.stderr)
    return {"steps": steps}


def _compare(run: Path, whole_run: Path, steps: int) -> dict[str, Any]:
    """Compare all metrics of all steps, exactly; the two schedules are constant."""
    if not (run / "metrics.jsonl").exists():
        return {"wanted": steps, "found": 0, "differ": []}
    found, expected = steps_of(run), steps_of(whole_run)
    differ = [step for step in found if found[step] != expected.get(step)]
    return {"wanted": steps, "found": len(found), "differ": differ}


def _last_step(run: Path) -> int:
    metrics = run / "metrics.jsonl"
    return max((row["step"] for row in read_metrics(metrics)), default=0) if metrics.exists() else 0


def _last_checkpoint(run: Path) -> int:
    markers = run.glob("global_step_*/COMPLETE")
    return max((int(m.parent.name.rpartition("_")[2]) for m in markers), default=0)


def run(argv: Sequence[str] = ()) -> dict[str, Any]:
    """Run what is asked for; gives counts, the longest times, and all endings."""
    parser = argparse.ArgumentParser(prog=f"benchmarks.run {NAME}", description=__doc__)
    launchers = ("warm", "torchrun", "ray")  # warm ones are spawned, but for their imports
    parser.add_argument("--launchers", nargs="*", default=launchers, choices=LAUNCHERS)
    parser.add_argument("--kinds", nargs="*", default=list(RANK_KINDS), choices=RANK_KINDS)
    phases = (*RANK_PHASES, "idle")
    parser.add_argument("--phases", nargs="*", choices=phases, help="default: all for warm ones")
    parser.add_argument("--rewards", nargs="*", default=["warm"], choices=LAUNCHERS)
    parser.add_argument("--kills", type=int, default=20, help="of a whole job (default 20)")
    parser.add_argument("--kills-launcher", default="warm", choices=("warm", "spawned"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="for the runs; default: a temporary one")
    arguments = parser.parse_args(argv)
    if "MRL_TEST_FAULTS" not in os.environ:  # read when Python starts
        return _again(argv)
    with tempfile.TemporaryDirectory(prefix="faults-") as temporary:
        folder = (arguments.folder or Path(temporary)).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        return _run_in(folder, arguments)


def _run_in(folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    config, seed, results = _inputs(folder), arguments.seed, []
    every = (*RANK_PHASES, "idle")
    faults = {
        name: planned(
            arguments.kinds, arguments.phases or (every if name == "warm" else _SOME_PHASES), seed
        )
        for name in arguments.launchers
    }
    longest = max((len(own) + 2 for own in faults.values()), default=0)
    count, launcher = arguments.kills, arguments.kills_launcher
    _kept(folder, "whole", whole, config, folder, max(longest, 6 * count))
    killed = _kept(folder, "kills", kills, count, launcher, config, folder, seed) if count else None
    for name, own in faults.items():
        parts = (name, own, config, folder, len(own) + 2, "matrix")
        results.append(_kept(folder, f"matrix_{name}", matrix, *parts))
    scoring = [
        _kept(folder, f"rewards_{name}", rewards, name, arguments.kinds, config, folder)
        for name in arguments.rewards
    ]
    return {
        "matrix": results,
        "rewards": scoring,
        "table": table([*results, *scoring]),
        "kills": killed,
    }


def _kept(
    folder: Path, name: str, work: Callable[..., dict[str, Any]], *args: Any
) -> dict[str, Any]:
    """Do a part of the work, or take what it gave the last time."""
    path, asked = folder / f"{name}.json", " ".join(map(str, args))
    kept: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    if kept.get("asked") != asked:
        kept = {**work(*args), "commit": record.environment()["commit"], "asked": asked}
        write_atomically(path, json.dumps(kept))
    return kept


def _again(argv: Sequence[str]) -> dict[str, Any]:
    """Run in a process that faults can be planted in."""
    path = os.pathsep.join([str(ROOT), PLANTER, os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "MRL_TEST_FAULTS": "", "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    line = [sys.executable, "-m", "benchmarks.faults", *argv]
    done = subprocess.run(line, cwd=ROOT, env=environment, check=True, stdout=subprocess.PIPE)
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def table(results: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Sum up kind by phase: how many were planted, ended as wanted, and the longest time."""
    cells: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for result in results:
        for ending in result["endings"]:
            fault = ending["fault"]
            key = (result["launcher"], fault["kind"], fault["phase"])
            cells.setdefault(key, []).append(ending)
    return [
        {
            "launcher": launcher,
            "kind": kind,
            "phase": phase,
            "injected": len(cell),
            "ended_as_wanted": sum(e["as_wanted"] for e in cell),
            "longest_s": round(max(e["seconds"] - e["detected_s"] for e in cell), 1),
        }
        for (launcher, kind, phase), cell in sorted(cells.items())
    ]


def _inputs(folder: Path) -> Path:
    """Write a tiny model, in a process of its own, and what a job needs; gives the config."""
    model = folder / "model"
    code = "import sys; from pathlib import Path; from tests.models import write_model; "
    code += "write_model(Path(sys.argv[1]), 'qwen2', num_hidden_layers=2)"
    if not model.exists():
        subprocess.run([sys.executable, "-c", code, str(model)], cwd=ROOT, check=True)
    return write_inputs(folder, model)


if __name__ == "__main__":
    print(json.dumps(run(sys.argv[1:])))
