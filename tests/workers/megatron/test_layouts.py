"""Every layout and every cut of the batch computes what one rank computes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from mrl.types import Batching
from tests.ranks import Ranks
from tests.workers.jobs import TWO_ROWS, Round, assert_close, both, layout, work

# For each case the ranks, their layout, and how a rank cuts its rows. The models have 2 KV heads.
CASES = {
    "tp2": (2, layout(tp=2), TWO_ROWS),
    "tp2-without-sequence-parallel": (2, layout(tp=2, sequence_parallel=False), TWO_ROWS),
    "tp4-above-kv-heads": (4, layout(tp=4), Batching(micro_batch_size=8)),
    "pp2": (2, layout(pp=2), TWO_ROWS),
    "pp2-one-micro-batch": (2, layout(pp=2), Batching(micro_batch_size=8)),
    "pp4": (4, layout(pp=4), Batching(micro_batch_size=3)),
    "dp2": (2, layout(), TWO_ROWS),
    "dp2-plain-optimizer": (2, layout(use_distributed_optimizer=False), TWO_ROWS),
    "dp4-by-tokens": (4, layout(), Batching(max_tokens=24)),
    "tp2-pp2": (4, layout(tp=2, pp=2), TWO_ROWS),
    "tp2-dp2": (4, layout(tp=2), TWO_ROWS),
    "pp2-dp2-by-tokens": (4, layout(pp=2), Batching(max_tokens=24)),
    "row-by-row": (1, layout(), Batching(micro_batch_size=1)),
    "four-rows": (1, layout(), Batching(micro_batch_size=4)),
    "uneven-rows": (1, layout(), Batching(micro_batch_size=3)),
    "all-rows": (1, layout(), Batching(micro_batch_size=8)),
    "by-tokens": (1, layout(), Batching(max_tokens=24)),
}
UNTIED_CASES = ("tp2", "tp4-above-kv-heads", "pp2", "dp2", "tp2-pp2")
PAIRS = [("qwen2", case) for case in CASES] + [("llama", case) for case in UNTIED_CASES]

Alone = Callable[[str, Path], Round]


@pytest.fixture(scope="module")
def alone(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Alone:
    """What one rank does with two rows a micro-batch, once for each model."""
    rounds: dict[str, Round] = {}

    def alone(name: str, path: Path) -> Round:
        if name not in rounds:
            spec = both(path, layout())
            with ranks.job(1, spec) as pool:
                rounds[name] = work(pool, spec, tmp_path_factory.mktemp(name), TWO_ROWS, None)
        return rounds[name]

    return alone


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
    expected = alone(model, path)
    world, where, batching = CASES[case]
    spec = both(path, where)
    with ranks.job(world, spec) as pool:
        found = work(pool, spec, tmp_path, batching, expected)
    for name in ("log_probs", "entropies", "values"):
        assert_close(getattr(found, name), getattr(expected, name), name)
    for step, (metrics, wanted) in enumerate(zip(found.metrics, expected.metrics, strict=True)):
        assert metrics == pytest.approx(wanted, rel=1e-5, abs=1e-6), step
    for role in ("actor", "critic"):
        weights, wanted_weights = getattr(found, role), getattr(expected, role)
        assert weights.keys() == wanted_weights.keys()
        for name, tensor in wanted_weights.items():
            assert_close(weights[name], tensor, f"{role} {name}")


def test_the_round_is_worth_comparing(
    alone: Alone, qwen2: Path, llama: Path, ranks: Ranks
) -> None:
    for name, path in (("qwen2", qwen2), ("llama", llama)):
        done = alone(name, path)
        assert done.log_probs.std() > 0.5
        assert done.values.std() > 0.1
        actor, critic, later, _ = done.metrics
        assert actor["actor/grad_norm"] > 0.5 < critic["critic/grad_norm"]  # clipped
        assert 0 < actor["actor/pg_clipfrac"] < 1
        assert 0 < critic["critic/vf_clipfrac"] < 1
        assert abs(later["actor/pg_loss"] - actor["actor/pg_loss"]) > 1e-3
