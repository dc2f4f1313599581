"""How long does `mrl plan` take, start to answer, for each recipe?"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.record import ROOT

REPEATS = 5


def plan_seconds(config: str) -> float:
    """Time one `mrl plan` process, seconds. Raises CalledProcessError when it refuses."""
    start = time.perf_counter()
    command = [sys.executable, "-m", "mrl.cli", "plan", config, "--json"]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return time.perf_counter() - start


def run(args: Sequence[str]) -> dict[str, Any]:
    """Time the given recipes, by default all under configs/grpo and configs/ppo."""
    recipes = args or sorted(
        str(path.relative_to(ROOT))
        for room in ("grpo", "ppo")
        for path in (ROOT / "configs" / room).glob("*.yaml")
    )
    found = {}
    for recipe in recipes:
        seconds = [plan_seconds(recipe) for _ in range(REPEATS)]
        found[recipe] = {"median_s": statistics.median(seconds), "max_s": max(seconds)}
    return {"repeats": REPEATS, "recipes": found}
