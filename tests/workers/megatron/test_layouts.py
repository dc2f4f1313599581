"""Every layout and every cut of the batch computes what one rank computes."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from mrl.config.schema import MegatronConfig
from mrl.types import Batching
from tests.ranks import Ranks
from tests.workers.jobs import TWO_ROWS, Round, assert_close, both, layout, work

LAYOUTS = {
    "tp2": (2, layout(tp=2), TWO_ROWS),
    "tp2-no-sequence-parallel": (2, layout(tp=2, sequence_parallel=False), TWO_ROWS),
    "tp4-above-kv-heads": (4, layout(tp=4), TWO_ROWS),
    "pp2": (2, layout(pp=2), TWO_ROWS),
    "pp2-one-micro-batch": (2, layout(pp=2), Batching(micro_batch_size=8)),
    "pp4": (4, layout(pp=4), TWO_ROWS),
    "dp2": (2, layout(), TWO_ROWS),
    "dp2-plain-optimizer": (2, layout(use_distributed_optimizer=False), TWO_ROWS),
    "dp4-by-tokens": (4, layout(), Batching(max_tokens=24)),
    "tp2-pp2": (4, layout(tp=2, pp=2), TWO_ROWS),
    "tp2-dp2": (4, layout(tp=2), TWO_ROWS),
    "pp2-dp2-by-tokens": (4, layout(pp=2), Batching(max_tokens=24)),
}
CUTS = {
    "one-by-one": Batching(micro_batch_size=1),
    "four": Batching(micro_batch_size=4),
    "uneven": Batching(micro_batch_size=3),
    "all": Batching(micro_batch_size=8),
    "by-tokens": Batching(max_tokens=24),
}


@pytest.fixture(scope="module", params=["qwen2", "llama"])
def model(request: pytest.FixtureRequest) -> Path:
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="module")
def alone(ranks: Ranks, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Round:
    """What one rank does with two rows a micro-batch."""
    spec = both(model, layout())
    with ranks.job(1, spec) as pool:
        return work(pool, spec, tmp_path_factory.mktemp("alone"), TWO_ROWS, None)


def assert_same(found: Round, expected: Round) -> None:
    for name in ("log_probs", "entropies", "values"):
        assert_close(getattr(found, name), getattr(expected, name), name)
    for step, (metrics, wanted) in enumerate(zip(found.metrics, expected.metrics, strict=True)):
        assert metrics == pytest.approx(wanted, rel=1e-5, abs=1e-6), step
    for role in ("actor", "critic"):
        weights, wanted = getattr(found, role), getattr(expected, role)
        assert weights.keys() == wanted.keys()
        for name, tensor in wanted.items():
            assert_close(weights[name], tensor, f"{role} {name}")


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_agree_with_one_rank(
    name: str, ranks: Ranks, model: Path, alone: Round, tmp_path: Path
) -> None:
    world, where, batching = LAYOUTS[name]
    spec = both(model, where)
    with ranks.job(world, spec) as pool:
        assert_same(work(pool, spec, tmp_path, batching, alone), alone)


@pytest.mark.parametrize("name", CUTS)
def test_micro_batches_do_not_matter(
    name: str, ranks: Ranks, qwen2: Path, cut_alone: Round, tmp_path: Path
) -> None:
    spec = both(qwen2, layout())
    with ranks.job(1, spec) as pool:
        assert_same(work(pool, spec, tmp_path, CUTS[name], cut_alone), cut_alone)
