"""Activations computed again give what kept ones give."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from mrl.config.schema import MegatronConfig
from mrl.types import Batching
from mrl.workers.host import WorkerHost
from tests.ranks import Ranks
from tests.workers.jobs import (
    ALL_ROWS,
    TWO_ROWS,
    Round,
    assert_same_round,
    both,
    group,
    layout,
    policy_batch,
    sequences,
    work,
)
from tests.workers.megatron.conftest import Alone


def full(method: str | None = None, num_layers: int | None = None, **where: Any) -> MegatronConfig:
    return layout(
        recompute_granularity="full",
        recompute_method=method,
        recompute_num_layers=num_layers,
        **where,
    )


def selective(*modules: str, **where: Any) -> MegatronConfig:
    return layout(recompute_granularity="selective", recompute_modules=modules, **where)


def assert_identical_round(found: Round, expected: Round) -> None:
    for name in ("log_probs", "entropies", "values"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name
    assert found.metrics == expected.metrics
    for role in ("actor", "critic"):
        weights, wanted = getattr(found, role), getattr(expected, role)
        assert all(torch.equal(weights[name], wanted[name]) for name in wanted)


ON_ONE_RANK = {
    "full": full(),
    "full-uneven-groups": full("uniform", 3),
    "full-block": full("block", 2),
    "core-attention-and-mlp": selective("core_attn", "mlp"),
}
FAST = ("full", "core-attention-and-mlp", "tp2", "pp2")


def cases(names: Iterable[str]) -> list[Any]:
    return [pytest.param(n, marks=() if n in FAST else pytest.mark.slow) for n in names]


@pytest.mark.parametrize("case", cases(ON_ONE_RANK))
def test_recompute_on_one_rank_changes_no_bit(
    case: str, ranks: Ranks, qwen2: Path, alone: Alone, tmp_path: Path
) -> None:
    spec = both(qwen2, ON_ONE_RANK[case])
    with ranks.job(1, spec) as pool:
        found = work(pool, spec, tmp_path, TWO_ROWS, None)
    assert_identical_round(found, alone(qwen2))


ON_MORE = {
    "tp2": ("llama", 2, full(tp=2), ALL_ROWS),
    "tp2-selective": ("llama", 2, selective("core_attn", "mlp", tp=2), ALL_ROWS),
    "pp2": ("qwen2", 2, full(pp=2), TWO_ROWS),
    "pp2-vpp2": ("qwen2", 2, full(pp=2, virtual_pipeline_model_parallel_size=2), TWO_ROWS),
    "ep2": ("qwen3_moe", 2, full(expert_model_parallel_size=2), TWO_ROWS),
    "ep2-experts": ("qwen3_moe", 2, selective("moe", expert_model_parallel_size=2), TWO_ROWS),
}


@pytest.mark.parametrize("case", cases(ON_MORE))
def test_recompute_over_ranks_computes_what_one_rank_does(
    case: str, ranks: Ranks, alone: Alone, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    model, world, where, batching = ON_MORE[case]
    path = request.getfixturevalue(model)
    expected = alone(path)
    spec = both(path, where)
    with ranks.job(world, spec) as pool:
        assert_same_round(work(pool, spec, tmp_path, batching, expected), expected)


def count_calls(host: WorkerHost) -> None:
    """Count what the first layer and its attention and norms compute from now on."""
    engine = host._roles["actor"].engine
    layer = engine.chunks[0].decoder.layers[0]
    parts = {
        "layer": layer,
        "core_attn": layer.self_attention.core_attention,
        "mlp": layer.mlp,
        "norm": layer.input_layernorm,
    }
    engine.calls = dict.fromkeys(parts, 0)
    for name, part in parts.items():
        part.register_forward_hook(lambda *_, name=name: count(engine.calls, name))


def count(calls: dict[str, int], name: str) -> None:
    calls[name] += 1


def calls(host: WorkerHost) -> dict[str, int]:
    return host._roles["actor"].engine.calls


@pytest.mark.parametrize(
    ("where", "again"),
    [
        (layout(), ()),
        (full(), ("layer", "core_attn", "mlp", "norm")),
        (selective("core_attn"), ("core_attn",)),
        (selective("mlp"), ("mlp",)),
    ],
    ids=["off", "full", "core_attn", "mlp"],
)
def test_only_training_computes_again(
    where: MegatronConfig, again: tuple[str, ...], ranks: Ranks, qwen2: Path
) -> None:
    spec = both(qwen2, where)
    whole = Batching(micro_batch_size=8)
    with ranks.job(1, spec) as pool:
        pool.each(count_calls)
        actor, rows = group(pool, spec.actor, whole), sequences()
        log_probs = actor.log_probs(rows)[0]
        (scored,) = pool.each(calls)
        actor.update(policy_batch(rows, log_probs))
        (trained,) = pool.each(calls)
    assert set(scored.values()) == {1}
    assert trained == {name: 3 if name in again else 2 for name in trained}


@pytest.mark.parametrize(
    ("modules", "uses_te", "experts", "refused"),
    [
        (("core_attn", "mlp"), False, False, ""),
        (("mlp", "moe_act"), True, True, ""),
        (("layernorm",), True, True, ""),
        (("layernorm",), True, False, "layernorm needs a model with experts"),
        (("layernorm",), False, True, "layernorm needs transformer_impl=transformer_engine"),
        (("mlp", "moe"), True, False, "moe needs a model with experts; found mlp, moe"),
        (("moe_act",), False, True, "moe_act needs grouped experts"),
        (("shared_experts",), True, True, "shared_experts needs a model with shared experts"),
    ],
)
def test_a_part_that_layers_lack_is_refused(
    modules: tuple[str, ...], uses_te: bool, experts: bool, refused: str, request: Any
) -> None:
    from mrl.resharding.families import ModelShape
    from mrl.workers.megatron.recompute import recompute_config

    shape = ModelShape.from_folder(request.getfixturevalue("qwen3_moe" if experts else "llama"))
    if not refused:
        found = recompute_config(shape, selective(*modules), uses_te)
        assert found["recompute_modules"] == list(modules)
        return
    with pytest.raises(ValueError, match=refused):
        recompute_config(shape, selective(*modules), uses_te)
