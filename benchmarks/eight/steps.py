"""Whole steps of GRPO on more and more GPUs, and of PPO: the work of each GPU stays the same."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import record
from benchmarks.eight import plans
from benchmarks.eight.entries import Entry, Numbers, Result
from benchmarks.recipes import Case, settings
from benchmarks.rl_step import measure
from benchmarks.workload import Model
from mrl.config import Config, load_config


@dataclass(frozen=True)
class Scaled:
    """A recipe whose batch grows with the GPUs."""

    case: Case
    prompts: int  # of each GPU
    mini_prompts: int  # of each GPU, an optimizer step
    goal: float | None = None  # least share of the tokens/s/GPU of the fewest GPUs

    def on(self, gpus: int, law: str) -> Case:
        """Give the recipe on so many GPUs."""
        more = (
            f"trainer.n_gpus_per_node={gpus}",
            f"data.train_batch_size={gpus * self.prompts}",
            f"actor.ppo_mini_batch_size={gpus * self.mini_prompts}",
        )
        return replace(self.case, law=law, overrides=(*self.case.overrides, *more))


def entry(name: str, case: Case, steps: int, gpu: str, folder: Path) -> Entry:
    """Give the entry of a recipe; the model is kept in `folder` for others of its law."""
    return Entry(
        name,
        partial(config_of, case, steps),
        partial(_measure, case, steps, gpu, folder),
        measured,
        partial(_planned, case, steps, gpu),
    )


def config_of(case: Case, steps: int) -> Config:
    """Load a recipe on its shape alone; raises ConfigError where it is refused."""
    with tempfile.TemporaryDirectory() as folder:
        return _load(case, steps, Path(folder))


def _load(case: Case, steps: int, folder: Path) -> Config:
    Model("model", case.model, case.shape or {}).write(folder / "model")
    return load_config(record.ROOT / "configs" / case.recipe, settings(case, folder, steps))


def _measure(case: Case, steps: int, gpu: str, folder: Path) -> Result:
    folder.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(folder / "run", ignore_errors=True)
    return measure(case, steps, folder, gpu)


def _planned(case: Case, steps: int, gpu: str) -> Numbers:
    with tempfile.TemporaryDirectory() as folder:
        return plans.steps(_load(case, steps, Path(folder)), gpu, case.mean_response)


def measured(found: Mapping[str, Any]) -> Numbers:
    """Give what the planner predicts."""
    seconds = {f"{phase}_s": row["measured"] for phase, row in found["seconds"].items()}
    memory = found["memory_gb"].get("peak")
    return {
        **seconds,
        "tokens_per_s_per_gpu": rate(found),
        **({"memory_gb": memory["measured"]} if memory else {}),
    }


def rate(found: Mapping[str, Any]) -> float:
    """Give tokens/s/GPU of the steps after the first, which warms up."""
    config, times = found["config"], found["timings"]["timing_s/step"][1:]
    rates: Sequence[float] = found["metrics"]["perf/throughput"][1:]
    assert len(rates) == len(times) and config["gpus"]
    return sum(r * s for r, s in zip(rates, times, strict=True)) / sum(times)


def efficiencies(
    kept: Mapping[str, Mapping[str, Any]], scaled: Mapping[str, Scaled], laws: Sequence[str]
) -> dict[str, dict[str, Any]]:
    """Compare tokens/s/GPU with those on the fewest GPUs, by `model/law` and count of GPUs."""
    found = {}
    for model in scaled:
        for law in laws:
            rates = {
                int(name.rpartition("/")[2]): rate(entry)
                for name, entry in kept.items()
                if name.startswith(f"{model}/{law}/") and "timings" in entry
            }
            if rates:
                first = rates[min(rates)]
                found[f"{model}/{law}"] = {
                    str(gpus): {
                        "tokens_per_s_per_gpu": rates[gpus],
                        "efficiency": rates[gpus] / first,
                    }
                    for gpus in sorted(rates)
                }
    return found
