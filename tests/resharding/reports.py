"""Configs and reports of well-known models on many GPUs, from their shapes alone."""

from __future__ import annotations

from pathlib import Path

from mrl.config import Config, load_config
from mrl.resharding.report import ReshardReport, build_report

MODELS = Path(__file__).resolve().parents[2] / "configs" / "models"

BATCH = (
    "data.train_batch_size=64",
    "actor.ppo_mini_batch_size=64",
    "actor.use_dynamic_bsz=true",
    "rollout.n=8",
    "algorithm.adv_estimator=grpo",
)


def layout_overrides(
    model: str, tp: int, pp: int, engine_tp: int, nodes: int, gpus: int
) -> tuple[str, ...]:
    return (
        *BATCH,
        f"model.path={MODELS / model}",
        f"actor.megatron.tensor_model_parallel_size={tp}",
        f"actor.megatron.pipeline_model_parallel_size={pp}",
        f"rollout.tensor_model_parallel_size={engine_tp}",
        f"trainer.nnodes={nodes}",
        f"trainer.n_gpus_per_node={gpus}",
    )


def make_config(folder: Path, *overrides: str) -> Config:
    file = folder / "empty.yaml"
    file.write_text("{}\n")
    return load_config(file, overrides)


def small_report(folder: Path, *changes: str, **options: bool) -> ReshardReport:
    """Report Qwen2.5-0.5B from TP2 PP2 to two replicas of TP2 on two nodes of two GPUs."""
    overrides = layout_overrides("Qwen2.5-0.5B", 2, 2, 2, nodes=2, gpus=2)
    return build_report(make_config(folder, *overrides, *changes), **options)
