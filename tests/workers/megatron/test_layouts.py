"""Every layout and every cut of the batch computes what one rank computes."""

from __future__ import annotations

from pathlib import Path

import pytest

from mrl.algorithms.reductions import reduced
from mrl.config.schema import MegatronConfig
from mrl.types import Batching
from mrl.workers.host import WorkerHost
from tests.ranks import Ranks
from tests.workers.jobs import (
    ALL_ROWS,
    TWO_ROWS,
    assert_close,
    assert_same_round,
    both,
    group,
    job,
    layout,
    of_the_layout,
    policy_batch,
    role,
    sequences,
    value_batch,
    work,
)
from tests.workers.megatron.conftest import Alone

FOUR_ROWS = Batching(micro_batch_size=4)
# For each case the ranks, their layout, and how a rank cuts its rows. The models have 2 KV heads.
CASES = {
    "tp2": (2, layout(tp=2), FOUR_ROWS),
    "tp2-without-sequence-parallel": (2, layout(tp=2, sequence_parallel=False), FOUR_ROWS),
    "tp4-above-kv-heads": (4, layout(tp=4), ALL_ROWS),
    "pp2": (2, layout(pp=2), TWO_ROWS),
    "pp2-one-micro-batch": (2, layout(pp=2), ALL_ROWS),
    "pp2-uneven": (2, layout(pp=2, num_layers_in_first_pipeline_stage=1), TWO_ROWS),
    "pp4": (4, layout(pp=4), Batching(micro_batch_size=3)),
    "dp2": (2, layout(), TWO_ROWS),
    "dp2-plain-optimizer": (2, layout(use_distributed_optimizer=False), TWO_ROWS),
    "dp4-by-tokens": (4, layout(), Batching(max_tokens=24)),
    "tp2-pp2": (4, layout(tp=2, pp=2), TWO_ROWS),
    "tp2-dp2": (4, layout(tp=2), ALL_ROWS),
    "pp2-dp2-by-tokens": (4, layout(pp=2), Batching(max_tokens=24)),
    "pp2-vpp2": (2, layout(pp=2, virtual_pipeline_model_parallel_size=2), TWO_ROWS),
    "pp2-vpp2-by-tokens": (
        2,
        layout(pp=2, virtual_pipeline_model_parallel_size=2),
        Batching(max_tokens=24),
    ),
    "ep2": (2, layout(expert_model_parallel_size=2), TWO_ROWS),
    "ep2-by-tokens": (2, layout(expert_model_parallel_size=2), Batching(max_tokens=24)),
    "ep2-etp2": (4, layout(tp=2, expert_model_parallel_size=2), ALL_ROWS),
    "ep2-in-tp2": (
        2,
        layout(tp=2, expert_model_parallel_size=2, expert_tensor_parallel_size=1),
        FOUR_ROWS,
    ),
    "cp2": (2, layout(context_parallel_size=2), TWO_ROWS),
    "cp2-by-tokens": (2, layout(context_parallel_size=2), Batching(max_tokens=24)),
    "cp4-above-kv-heads": (4, layout(context_parallel_size=4), ALL_ROWS),
    "cp2-tp2": (4, layout(tp=2, context_parallel_size=2), ALL_ROWS),
    "cp2-pp2": (4, layout(pp=2, context_parallel_size=2), FOUR_ROWS),
    "cp2-pp2-vpp2": (
        4,
        layout(pp=2, context_parallel_size=2, virtual_pipeline_model_parallel_size=2),
        FOUR_ROWS,
    ),
    "cp2-dp2": (4, layout(context_parallel_size=2), ALL_ROWS),
    "cp2-ep2": (2, layout(context_parallel_size=2, expert_model_parallel_size=2), FOUR_ROWS),
    "row-by-row": (1, layout(), Batching(micro_batch_size=1)),
    "four-rows": (1, layout(), FOUR_ROWS),
    "uneven-rows": (1, layout(), Batching(micro_batch_size=3)),
    "all-rows": (1, layout(), ALL_ROWS),
    "by-tokens": (1, layout(), Batching(max_tokens=24)),
}
EXPERT_CASES = ("ep2", "ep2-by-tokens", "ep2-etp2", "ep2-in-tp2", "cp2-ep2")
FAST = {
    "qwen2": (
        "tp2", "tp4-above-kv-heads", "pp2", "pp2-uneven", "pp2-vpp2-by-tokens", "dp2", "cp2",
        "cp4-above-kv-heads", "cp2-tp2", "cp2-pp2", "tp2-pp2", "by-tokens",
    ),
    "llama": ("tp2-pp2", "cp2-by-tokens"),
    "qwen3_moe": ("ep2-by-tokens", "ep2-etp2", "cp2-ep2"),
}  # fmt: skip
SLOW = {
    "qwen2": tuple(set(CASES) - set(EXPERT_CASES) - set(FAST["qwen2"])),
    "llama": ("tp2", "tp4-above-kv-heads", "pp2", "dp2", "cp2"),
    "qwen3_moe": ("ep2", "ep2-in-tp2", "tp2", "pp2-vpp2", "cp2-tp2"),
}
PAIRS = [
    *((model, case) for model, cases in FAST.items() for case in cases),
    *(
        pytest.param(model, case, marks=pytest.mark.slow)
        for model, cases in SLOW.items()
        for case in sorted(cases)
    ),
]


@pytest.mark.parametrize(("model", "case"), PAIRS)
def test_every_layout_and_cut_computes_what_one_rank_computes(
    model: str,
    case: str,
    ranks: Ranks,
    alone: Alone,
    request: pytest.FixtureRequest,
    tmp_path: Path,
) -> None:
    path = request.getfixturevalue(model)
    expected = alone(path)
    world, where, batching = CASES[case]
    spec = both(path, where)
    with ranks.job(world, spec) as pool:
        found = work(pool, spec, tmp_path, batching, expected)
    assert_same_round(found, expected)


def is_cut_along_the_sequence(host: WorkerHost) -> bool:
    return host._roles["actor"].engine.chunks[0].config.sequence_parallel


@pytest.mark.parametrize(
    ("where", "wanted"),
    [(layout(tp=2), True), (layout(tp=2, sequence_parallel=False), False), (layout(), False)],
    ids=["tp2", "tp2-off", "dp2"],
)
def test_sequence_parallelism_is_in_force_where_tp_is(
    where: MegatronConfig, wanted: bool, ranks: Ranks, llama: Path
) -> None:
    with ranks.job(2, job(role(llama, where, optim=None))) as pool:
        assert pool.each(is_cut_along_the_sequence) == [wanted] * 2


def cut_head(host: WorkerHost, size: int) -> None:
    """Make the head hold so many bytes of logits at once."""
    from mrl.workers.megatron import fused_head

    fused_head.CHUNK_BYTES = size


@pytest.mark.parametrize(("world", "where"), [(1, layout()), (2, layout(tp=2))], ids=["one", "tp2"])
def test_the_head_may_take_the_vocabulary_in_chunks(
    world: int, where: MegatronConfig, ranks: Ranks, qwen2: Path, alone: Alone, tmp_path: Path
) -> None:
    spec = both(qwen2, where)
    with ranks.job(world, spec) as pool:
        pool.each(cut_head, size=1800)  # 36 predictions in float32: 12 columns
        assert_same_round(work(pool, spec, tmp_path, ALL_ROWS, alone(qwen2)), alone(qwen2))


def test_the_round_is_worth_comparing(alone: Alone, qwen2: Path, llama: Path) -> None:
    for path in (qwen2, llama):
        done = alone(path)
        assert done.log_probs.std() > 0.5
        assert done.values.std() > 0.1
        actor, critic, later, _ = done.metrics
        assert actor["actor/grad_norm"] > 0.5 < critic["critic/grad_norm"]  # clipped
        assert 0 < actor["actor/pg_clipfrac"] < 1
        assert 0 < critic["critic/vf_clipfrac"] < 1
        assert abs(later["actor/pg_loss"] - actor["actor/pg_loss"]) > 1e-3


@pytest.mark.parametrize(
    ("model", "world", "where", "batching"),
    [
        ("llama", 4, layout(), ALL_ROWS),  # three rows: one rank has none
        # one rank has two micro-batches, the other one, and both hold halves of each expert
        ("qwen3_moe", 2, layout(expert_tensor_parallel_size=2), Batching(micro_batch_size=1)),
    ],
)
def test_ranks_with_fewer_rows_take_part(
    model: str,
    world: int,
    where: MegatronConfig,
    batching: Batching,
    ranks: Ranks,
    request: pytest.FixtureRequest,
) -> None:
    path = request.getfixturevalue(model)
    rows = sequences(lengths=(5, 9, 4), responses=(3, 4, 1))
    answers = []
    for size, place in ((1, layout()), (world, where)):
        spec = both(path, place)
        with ranks.job(size, spec) as pool:
            actor, critic = group(pool, spec.actor, batching), group(pool, spec.critic, batching)
            log_probs, _ = actor.log_probs(rows)
            batch = policy_batch(rows, log_probs)
            values = critic.values(rows)
            metrics = [actor.update(batch), critic.update(value_batch(rows, values))]
            later = actor.log_probs(rows)[0].values, critic.values(rows).values
            answers.append((log_probs.values, values.values, *later, *map(reduced, metrics)))
    for found, wanted in zip(*answers, strict=True):
        if isinstance(wanted, dict):
            for name in wanted.keys() - set(filter(of_the_layout, wanted)):
                assert found[name] == pytest.approx(wanted[name], rel=1e-5, abs=1e-6), name
        else:
            assert_close(found, wanted, "outputs")
