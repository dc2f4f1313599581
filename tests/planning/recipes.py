"""The recipes of configs/, and the table of README.md that is planned from them.

`python -m tests.planning.recipes` writes the table anew.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

from mrl.config import Config, load_config
from mrl.planning.change import Change, changed
from mrl.planning.hardware import GB, Machine
from mrl.planning.plan import JobPlan, plan_job

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
KINDS = ("grpo", "ppo")
GPUS = ("h100", "a100-80")
RECIPES = sorted(p for kind in KINDS for p in (ROOT / "configs" / kind).glob("*gpu*.yaml"))
# (file name, as people call it) by size; a last part of a file name beside the GPUs is in brackets
MODELS = {
    "qwen2.5_0.5b": "Qwen2.5-0.5B",
    "qwen2.5_1.5b": "Qwen2.5-1.5B",
    "qwen2.5_7b": "Qwen2.5-7B",
    "llama3.1_8b": "Llama-3.1-8B",
    "qwen3_30b_a3b": "Qwen3-30B-A3B",
    "qwen2.5_32b": "Qwen2.5-32B",
    "llama3.1_70b": "Llama-3.1-70B",
}
_SPECIAL = {"": "", "lora": ", adapters", "32k": ", 32k", "128k": ", 128k"}
_HEAD = (
    "| model, configs/{grpo,ppo} | GPUs | GRPO: GB | H100: s, tokens/s a GPU | A100-80 "
    "| PPO: GB | H100: s, tokens/s a GPU | A100-80 |",
    "|---|--:|--:|--:|--:|--:|--:|--:|",
)


@cache
def load(path: Path) -> Config:
    """Load a recipe; its folders are relative to the project's root, the current folder."""
    return load_config(path)


@cache
def _plan(path: Path, gpu: str) -> JobPlan:
    return plan_job(load(path), Machine.named(gpu), exact_reshard=False)


def planned(path: Path, gpu: str, change: Change | None = None) -> JobPlan:
    """Plan a recipe, or one with some keys changed."""
    if change is None:
        return _plan(path, gpu)
    return plan_job(changed(load(path), change), Machine.named(gpu), exact_reshard=False)


def parts(path: Path) -> tuple[str, int, str]:
    """Read (model, GPUs, what is special) from the name of a recipe's file."""
    model, _, rest = path.stem.rpartition("gpu")
    model, _, gpus = model.rpartition("_")
    return model, int(gpus), rest.removeprefix("_")


def table() -> str:
    """Write a row for each model, number of GPUs and special use, GRPO beside PPO."""
    files = {(*parts(path), path.parent.name): path for path in RECIPES}
    rows = sorted(
        {name[:3] for name in files},
        key=lambda name: (list(_SPECIAL).index(name[2]) > 1, list(MODELS).index(name[0]), name),
    )
    lines = list(_HEAD)
    for model, gpus, special in rows:
        cells = [f"{MODELS[model]}{_SPECIAL[special]}", str(gpus)]
        for kind in KINDS:
            cells += _cells(files.get((model, gpus, special, kind)))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _cells(path: Path | None) -> list[str]:
    if path is None:
        return ["", "", ""]
    plans = [planned(path, gpu) for gpu in GPUS]
    speeds = [f"{plan.time.total:.0f}, {plan.time.throughput:.0f}" for plan in plans]
    return [f"{plans[0].memory.peak.peak.total / GB:.0f}", *speeds]


def table_of_readme() -> str:
    """Cut the table out of README.md."""
    lines = README.read_text(encoding="utf-8").splitlines()
    first = lines.index(_HEAD[0])
    last = next(i for i in range(first, len(lines)) if not lines[i].startswith("|"))
    return "\n".join(lines[first:last])


if __name__ == "__main__":
    os.chdir(ROOT)
    text = README.read_text(encoding="utf-8")
    README.write_text(text.replace(table_of_readme(), table()), encoding="utf-8")
