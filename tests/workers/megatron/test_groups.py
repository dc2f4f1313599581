from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mrl.workers.group import WorkerError
from mrl.workers.host import WorkerHost
from tests.ranks import Ranks
from tests.workers.jobs import (
    ALL_ROWS,
    assert_same_round,
    group,
    job,
    layout,
    role,
    sequences,
    work,
)
from tests.workers.megatron.conftest import Alone

MIXES = {
    "actor-tp2-critic-pp2": (2, layout(tp=2), layout(pp=2)),
    "actor-tp2-critic-dp2": (2, layout(tp=2), layout()),
    "actor-pp2-dp2-critic-tp4": (4, layout(pp=2), layout(tp=4)),
}


@pytest.mark.parametrize("mix", MIXES)
def test_roles_of_different_layouts_share_ranks(
    mix: str, ranks: Ranks, llama: Path, alone: Alone, tmp_path: Path
) -> None:
    world, of_actor, of_critic = MIXES[mix]
    expected = alone(llama)
    spec = job(role(llama, of_actor), role(llama, of_critic, "critic"))
    with ranks.job(world, spec) as pool:  # their calls alternate
        assert_same_round(work(pool, spec, tmp_path, ALL_ROWS, expected), expected)


def test_reference_in_a_third_layout_scores_alike(ranks: Ranks, qwen2: Path, alone: Alone) -> None:
    spec = job(
        role(qwen2, layout(tp=2)),
        role(qwen2, layout(pp=2), "critic"),
        role(qwen2, layout(), "ref", optim=None),
    )
    with ranks.job(2, spec) as pool:
        found = group(pool, spec.ref).log_probs(sequences())
    assert float((found.values - alone(qwen2).log_probs).abs().max()) < 1e-4


def shares_groups(host: WorkerHost) -> bool:
    actor, critic = (host._roles[name].engine for name in ("actor", "critic"))
    return actor.groups is critic.groups


def test_roles_of_equal_sizes_share_groups_whatever_else_they_are_set_to(
    ranks: Ranks, llama: Path, alone: Alone, tmp_path: Path
) -> None:
    again = layout(tp=2, recompute_granularity="full", optimizer_offload=True)
    spec = job(role(llama, layout(tp=2)), role(llama, again, "critic"))
    with ranks.job(2, spec) as pool:
        assert all(pool.each(shares_groups))
        assert_same_round(work(pool, spec, tmp_path, ALL_ROWS, alone(llama)), alone(llama))
    apart = job(role(llama, layout(tp=2)), role(llama, layout(pp=2), "critic"))
    with ranks.job(2, apart) as pool:
        assert not any(pool.each(shares_groups))


def globals_around_a_role(host: WorkerHost) -> tuple[Any, ...]:
    """Say which groups Megatron sees outside, inside and after a role, and after a failure."""
    from megatron.core import parallel_state

    def sizes() -> Any:
        if not parallel_state.model_parallel_is_initialized():
            return None
        return (
            parallel_state.get_tensor_model_parallel_world_size(),
            parallel_state.get_pipeline_model_parallel_world_size(),
        )

    actor, critic = (host._roles[name].engine.groups for name in ("actor", "critic"))
    seen = [sizes()]
    with actor.active():
        seen.append(sizes())
        with critic.active():
            seen.append(sizes())
        seen.append(sizes())
    try:
        with critic.active():
            raise KeyError
    except KeyError:
        seen.append(sizes())
    return tuple(seen)


def test_megatron_sees_the_groups_of_the_role_at_work_alone(ranks: Ranks, qwen2: Path) -> None:
    spec = job(role(qwen2, layout(tp=2)), role(qwen2, layout(pp=2), "critic"))
    with ranks.job(2, spec) as pool:
        assert pool.each(globals_around_a_role) == 2 * [(None, (2, 1), (1, 2), (2, 1), None)]


def placed(host: WorkerHost) -> tuple[int, int, int]:
    groups = host._roles["actor"].engine.groups
    return groups.tp_rank, groups.dp_rank, groups.pp_rank


def test_ranks_run_tensor_then_data_then_pipeline(ranks: Ranks, qwen2: Path) -> None:
    for where, wanted in (
        (layout(tp=2, pp=2), [(0, 0, 0), (1, 0, 0), (0, 0, 1), (1, 0, 1)]),
        (layout(tp=2), [(0, 0, 0), (1, 0, 0), (0, 1, 0), (1, 1, 0)]),
        (layout(pp=2), [(0, 0, 0), (0, 1, 0), (0, 0, 1), (0, 1, 1)]),
    ):
        spec = job(role(qwen2, where))
        with ranks.job(4, spec) as pool:
            assert pool.each(placed) == wanted
            parts = group(pool, spec.actor).ranks
        assert [parts.part_of(rank) for rank in range(4)] == [dp for _, dp, _ in wanted]


def test_layouts_that_do_not_divide_the_ranks_are_refused(ranks: Ranks, qwen2: Path) -> None:
    with (
        pytest.raises(WorkerError, match="3 ranks cannot be cut into tp 2 x pp 1 x cp 1"),
        ranks.job(3, job(role(qwen2, layout(tp=2)))),
    ):
        pass


def norm_of_one_gradient(host: WorkerHost, name: str, parameter: str, value: float) -> float:
    """Take an optimizer step whose only gradient is a parameter's; give the reported norm."""
    engine = host._roles[name].engine
    with engine.groups.active():
        engine.trainer.zero_grad()
        for found, param in engine.chunks[0].named_parameters():
            if found == parameter:
                param.main_grad.zero_()
                param.main_grad.view(-1)[0] = value
        return engine.trainer.step().grad_norm


@pytest.mark.parametrize(
    "where",
    [layout(), layout(tp=2), layout(tp=2, sequence_parallel=False), layout(tp=2, pp=2)],
    ids=["one", "tp2", "tp2-without-sequence-parallel", "tp2-pp2"],
)
def test_replicated_gradients_count_once(where: Any, ranks: Ranks, llama: Path) -> None:
    world = where.tensor_model_parallel_size * where.pipeline_model_parallel_size
    spec = job(role(llama, where), role(llama, replace(where), "critic"))
    with ranks.job(world, spec) as pool:
        for name, parameter in (
            ("actor", "decoder.layers.0.input_layernorm.weight"),
            ("actor", "decoder.final_layernorm.weight"),
            ("critic", "output_layer.weight"),
        ):
            # layer 0 of each stage holds one: as many gradients as there are stages
            copies = where.pipeline_model_parallel_size if "layers" in parameter else 1
            found = pool.each(norm_of_one_gradient, name=name, parameter=parameter, value=3.0)
            assert found == pytest.approx([3.0 * copies**0.5] * world), parameter


def tied_norm(host: WorkerHost) -> float:
    """Give the norm where both stages hold the same gradient of the tied embedding."""
    engine = host._roles["actor"].engine
    with engine.groups.active():
        engine.trainer.zero_grad()
        for name, param in engine.chunks[0].named_parameters():
            if name in ("embedding.word_embeddings.weight", "output_layer.weight"):
                param.main_grad.view(-1)[0] = 3.0
        return engine.trainer.step().grad_norm


def test_a_tied_embedding_counts_once(ranks: Ranks, qwen2: Path) -> None:
    for where in (layout(), layout(pp=2)):
        world = where.pipeline_model_parallel_size
        with ranks.job(world, job(role(qwen2, where))) as pool:
            assert pool.each(tied_norm) == [3.0] * world
