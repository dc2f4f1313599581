"""Measured runs of this project as configs, to hold the plan against."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.cases import REAL
from mrl.config import build_plan, load_config
from mrl.planning.hardware import Machine
from mrl.planning.job import Job

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
# All rows were scored by a pass before the updates.
ALL_BEFORE = "actor.first_log_probs_from_update=false"
# A trainer alone was measured, by its own allocator: no engine, nothing outside torch, no losses.
TRAINER_ALONE = ("engine_asleep=0", "context=0.5", "nccl=0", "allocator=0")


def result(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())["result"]
    return found


def trainer_job(folder: Path, model: str, world: int, budget: int, rows: int, overrides=()) -> Job:
    """Plan what benchmarks/train_step.py runs: rows of 512 + 3,584 tokens on H200."""
    empty = folder / "empty.yaml"
    empty.write_text("{}\n")
    config = load_config(
        empty,
        [
            f"model.path={ROOT}/configs/models/{model}",
            "data.max_prompt_length=512",
            "data.max_response_length=3584",
            f"data.train_batch_size={rows}",
            f"actor.ppo_mini_batch_size={rows}",
            "actor.use_dynamic_bsz=true",
            f"actor.ppo_max_token_len_per_gpu={budget}",
            f"trainer.n_gpus_per_node={world}",
            "algorithm.adv_estimator=grpo",
            "rollout.gpu_memory_utilization=0.3",
            ALL_BEFORE,
            *overrides,
        ],
    )
    return Job.of(config, build_plan(config), Machine.named("h200", None, TRAINER_ALONE))


def changed_model(folder: Path, name: str, changes: Mapping[str, object]) -> Path:
    """Write a model's config.json with other numbers."""
    found = json.loads((ROOT / "configs" / "models" / name / "config.json").read_text())
    model = folder / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(found | dict(changes)))
    return model


def measured() -> dict[str, tuple[str, int, int, int, tuple[str, ...], dict[str, Any]]]:
    """List (model, world, budget, rows, overrides, figures) of uniform rows by name."""
    found = {}
    parts = {name: result(name)["parts"] for name in ("train_step_h200", "train_step_2x_h200")}
    for file, part in parts.items():
        for case, settings in part["update"].items():
            known = REAL.cases[case]
            for setting, figures in settings.items():
                if "median_s" not in figures or "uniform" not in setting:
                    continue
                variant, _, budget = setting.split("/")
                model = "Qwen2.5-1.5B" if case.startswith("1.5b") else "Qwen2.5-7B"
                overrides = (*known.overrides, *known.variants[variant])
                update = {"update_actor": figures}
                same = part["logprob"].get(case, {}).get(f"uniform/{budget}")
                if same is not None and variant == "plain":
                    update["old_log_prob"] = same
                found[f"{file}: {case} {setting}"] = (
                    model, known.world, int(budget), figures["rows"], overrides, update,
                )  # fmt: skip
    return found
