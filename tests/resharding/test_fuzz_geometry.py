"""Random models and layouts: a plan writes each element once, or the config is refused by key."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest

from mrl.config import ConfigError, load_config
from mrl.config.typed import schema_keys
from mrl.resharding.layout import whole
from mrl.resharding.planner import ReshardPlan
from mrl.resharding.report import build_report

FEW, MANY = 12, 400
DRAWS = {
    "actor.megatron.tensor_model_parallel_size": (1, 1, 2, 2, 3, 4),
    "actor.megatron.pipeline_model_parallel_size": (1, 1, 2, 3),
    "actor.megatron.context_parallel_size": (1, 1, 1, 2),
    "actor.megatron.expert_model_parallel_size": (1, 1, 1, 2, 3),
    "rollout.tensor_model_parallel_size": (1, 1, 2, 2, 3, 4),
    "trainer.n_gpus_per_node": (1, 2, 4, 6, 8),
    "trainer.nnodes": (1, 1, 2),
}


def any_model(rng: random.Random) -> dict[str, object]:
    """Draw a config.json, now and then of sizes that fit nothing."""
    heads = rng.choice([4, 4, 6, 8, 12])
    model: dict[str, object] = {
        "model_type": rng.choice(["llama", "qwen2", "qwen3", "mistral"]),
        "hidden_size": 8 * rng.randint(1, 4),
        "num_hidden_layers": rng.choice([1, 2, 3, 4, 6]),
        "num_attention_heads": heads,
        "num_key_value_heads": rng.choice([1, 2, heads // 2, heads, 5]),
        "head_dim": rng.choice([2, 4]),
        "intermediate_size": rng.choice([12, 16, 24, 25]),
        "vocab_size": rng.randint(5, 90),
        "max_position_embeddings": 4096,
        "tie_word_embeddings": rng.random() < 0.4,
        "dtype": "bfloat16",
    }
    if rng.random() < 0.3:
        experts = {"num_experts": rng.choice([2, 4, 6]), "moe_intermediate_size": 12}
        model |= experts | {"model_type": "qwen3_moe", "num_experts_per_tok": 2}
    return model


def assert_each_element_is_written_once(plan: ReshardPlan) -> None:
    """Count the writes of every element of every parameter, cell by cell."""
    written: dict[tuple[int, str], np.ndarray] = {}
    wanted: dict[tuple[int, str], np.ndarray] = {}
    extents: dict[str, list[int]] = {}
    for piece in plan.dst.pieces:
        ends = extents.setdefault(piece.param, [0] * len(piece.local))
        ends[:] = [max(end, stop) for end, (_, stop) in zip(ends, piece.local, strict=True)]
    for piece in plan.dst.pieces:
        for rank in piece.ranks:
            key, zeros = (rank, piece.param), np.zeros(extents[piece.param], np.int16)
            wanted.setdefault(key, zeros)[tuple(slice(*side) for side in piece.local)] += 1
            written.setdefault(key, np.zeros_like(zeros))
    for copy in plan.copies:
        box = tuple(slice(*side) for side in copy.dst_box)
        written[copy.dst_rank, copy.dst_param][box] += 1
    for key, counts in written.items():
        assert (counts == wanted[key]).all() and counts.max() == 1, key
    assert all(whole(info.shape) for info in plan.dst.tensors.values())


def fuzz(seed: int, count: int, folder: Path) -> int:
    rng, planned = random.Random(seed), 0
    (folder / "empty.yaml").write_text("{}\n")
    for _ in range(count):
        model = any_model(rng)
        (folder / "config.json").write_text(json.dumps(model))
        drawn = {key: rng.choice(values) for key, values in DRAWS.items()}
        overrides = [f"{key}={value}" for key, value in drawn.items()]
        fixed = ("data.train_batch_size=48", "actor.ppo_mini_batch_size=48", "rollout.n=8")
        more = ("algorithm.adv_estimator=grpo", "actor.use_dynamic_bsz=true")
        try:
            config = load_config(
                folder / "empty.yaml", [f"model.path={folder}", *fixed, *more, *overrides]
            )
            report = build_report(config)
        except ConfigError as error:
            for violation in error.violations:
                keys = violation.key.split(" and ")
                assert all(key in schema_keys() for key in keys), (violation, model, drawn)
            continue
        except ValueError as error:  # of the model's own numbers
            assert "config.json" in str(error), (error, model, drawn)
            continue
        assert_each_element_is_written_once(report.plan)
        planned += 1
    return planned


def test_any_geometry_is_planned_whole_or_refused_by_key(tmp_path: Path) -> None:
    assert 0 < fuzz(0, FEW, tmp_path) < FEW


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_many_geometries_are_planned_whole_or_refused_by_key(tmp_path: Path) -> None:
    assert 0 < fuzz(1, MANY, tmp_path) < MANY
