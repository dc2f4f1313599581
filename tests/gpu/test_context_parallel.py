"""Context parallelism through Transformer Engine's attention, ranks sharing a GPU where need be.

Run with `python -m pytest -m gpu -s tests/gpu`; without a GPU Ulysses runs on the local layers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from mrl.config.schema import MegatronConfig
from mrl.workers.group import WorkerError
from tests.gpu.ranks import (
    ON_GPU,
    REFERENCE,
    TESTED,
    YARDSTICK,
    Errors,
    Outcome,
    Pools,
    job,
    train,
    write_wide,
)
from tests.workers.jobs import role

pytestmark = [pytest.mark.gpu, pytest.mark.multiprocess]
CP2 = replace(TESTED, context_parallel_size=2)
CP4 = replace(TESTED, context_parallel_size=4)
TP2 = replace(CP2, tensor_model_parallel_size=2)
BOTH = replace(CP4, cp_comm_type="a2a+p2p", hierarchical_context_parallel_sizes=(2, 2))
AGAIN = {"recompute_granularity": "selective", "recompute_modules": ("core_attn",)}
CASES: dict[str, tuple[int, MegatronConfig]] = {
    "cp2-a2a": (2, CP2),
    "cp2-p2p": (2, replace(CP2, cp_comm_type="p2p")),
    "cp2-a2a-recompute": (2, replace(CP2, **AGAIN)),  # type: ignore[arg-type]
    "cp2-p2p-recompute": (2, replace(CP2, cp_comm_type="p2p", **AGAIN)),  # type: ignore[arg-type]
    "cp4-a2a-of-2-kv-heads": (4, CP4),
    "cp4-a2a+p2p": (4, BOTH),
    "cp2-tp2-a2a": (4, TP2),
    "cp2-tp2-p2p": (4, replace(TP2, cp_comm_type="p2p")),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_wide(tmp_path_factory.mktemp("model"))


@dataclass(frozen=True)
class Alone:
    """One rank's outcomes."""

    reference: Outcome
    tested: Outcome
    yardstick: Errors


@pytest.fixture(scope="module")
def alone(pools: Pools, model: Path) -> Alone:
    found: list[Outcome] = []
    for layout in (REFERENCE, YARDSTICK, TESTED):
        spec = job(role(model, layout))
        like = found[0] if found else None
        found.append(train(pools.open(1, spec), spec, like))
    return Alone(found[0], found[2], Errors.of(found[1], found[0]))


def test_one_rank_computes_what_float32_does(alone: Alone) -> None:
    Errors.of(alone.tested, alone.reference).assert_within(alone.yardstick)


@pytest.mark.parametrize("case", CASES)
def test_the_parts_of_a_row_attend_as_the_whole_does(
    case: str, pools: Pools, model: Path, alone: Alone
) -> None:
    world, layout = CASES[case]
    if layout.cp_comm_type != "a2a" and not ON_GPU:
        pytest.skip("runs through Transformer Engine")
    spec = job(role(model, layout))
    try:
        found = train(pools.open(world, spec), spec, alone.reference)
    finally:
        pools.forget()
    Errors.of(found, alone.tested).assert_within(alone.yardstick)


@pytest.mark.parametrize("kind", ["a2a", "p2p"])
def test_two_runs_are_the_same_bit_for_bit(kind: str, pools: Pools, model: Path) -> None:
    if kind != "a2a" and not ON_GPU:
        pytest.skip("runs through Transformer Engine")
    spec = job(role(model, replace(CP2, cp_comm_type=kind)), deterministic=True)
    try:
        first, second = (train(pools.open(2, spec), spec) for _ in range(2))
    except WorkerError as error:
        if "determinis" not in str(error).lower():
            raise
        pytest.skip(f"refused: {error}")
    finally:
        pools.forget()
    assert torch.equal(first.log_probs.values, second.log_probs.values)
    assert first.grad_norms == second.grad_norms
    assert first.grad_norms[0] != first.grad_norms[1]  # it trains
