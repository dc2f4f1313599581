from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mrl.algorithms.reductions import reduced
from mrl.config.schema import OptimConfig
from mrl.types import PolicyBatch, Ragged, Sequences
from mrl.workers.group import WorkerError
from mrl.workers.host import WorkerHost
from mrl.workers.specs import JobSpec
from tests.marks import slow_but
from tests.ranks import ForkedPool, Ranks
from tests.workers.jobs import (
    OPTIM,
    group,
    job,
    layout,
    policy_batch,
    role,
    sequences,
    value_batch,
    weights_of,
)

SCHEDULED = replace(OPTIM, lr_warmup_steps=3, lr_decay_style="cosine", min_lr=1e-3)
LAYOUTS = {
    "tp2": layout(tp=2),
    "dp2": layout(),
    "dp2-plain-optimizer": layout(use_distributed_optimizer=False),
    "tp2-bfloat16": layout(tp=2, dtype="bfloat16"),
}
STEPS = 2


def both(path: Path, where: Any) -> JobSpec:
    actor = role(path, where, optim=SCHEDULED, total_steps=8)
    return job(actor, replace(actor, name="critic", head="value"))


def train(pool: ForkedPool, spec: JobSpec, start: int) -> list[Any]:
    """Take steps whose batches depend on the step's number; give their metrics."""
    actor, critic = group(pool, spec.actor), group(pool, spec.critic)
    rows, metrics = sequences(), []
    base = Ragged(torch.full((int(rows.response_lengths.sum()),), -2.0), rows.response_lengths)
    for step in range(start, start + STEPS):
        near = base.with_values(base.values + 0.1 * step)
        metrics.append(reduced(actor.update(policy_batch(rows, near))))
        metrics.append(reduced(critic.update(value_batch(rows, near))))
    return metrics


def save(pool: ForkedPool, folder: Path) -> None:
    group(pool, role(folder)).save(folder / "actor")
    group(pool, role(folder, name="critic")).save(folder / "critic")


@pytest.mark.parametrize("name", slow_but(("tp2-bfloat16", "dp2"), LAYOUTS))
def test_a_resumed_run_is_an_uninterrupted_one(
    name: str, ranks: Ranks, qwen2: Path, tmp_path: Path
) -> None:
    spec = both(qwen2, LAYOUTS[name])
    with ranks.job(2, spec) as pool:
        first = train(pool, spec, 0)
        save(pool, tmp_path / "half")
        straight = train(pool, spec, STEPS)
        save(pool, tmp_path / "straight")
    with ranks.job(2, spec) as pool:
        group(pool, spec.actor).load(tmp_path / "half" / "actor")
        group(pool, spec.critic).load(tmp_path / "half" / "critic")
        resumed = train(pool, spec, STEPS)
        save(pool, tmp_path / "resumed")
    assert resumed == straight  # to the last bit, learning rates included
    assert first[0]["actor/lr"] < first[2]["actor/lr"] < straight[0]["actor/lr"]
    for part in ("actor", "critic"):
        wanted = weights_of(tmp_path / "straight" / part)
        found = weights_of(tmp_path / "resumed" / part)
        half = weights_of(tmp_path / "half" / part)
        assert all(torch.equal(found[key], wanted[key]) for key in wanted)
        assert not all(torch.equal(half[key], wanted[key]) for key in wanted)


def rates(optim: OptimConfig, total_steps: int, count: int) -> list[float]:
    from mrl.workers.megatron.optimizer import _schedule

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.0)
    schedule, found = _schedule(optimizer, optim, total_steps), []
    for _ in range(count):
        schedule.step(increment=1)
        found.append(float(optimizer.param_groups[0]["lr"]))
    return found


def half_cosine(part: float) -> float:
    return 0.2 + 0.5 * (1 + math.cos(math.pi * part)) * 0.8


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({"lr_decay_style": "constant"}, [1.0] * 10),
        ({"lr_decay_style": "constant", "lr_warmup_steps": 4}, [0.25, 0.5, 0.75] + [1.0] * 7),
        ({"lr_decay_style": "constant", "lr_warmup_steps_ratio": 0.25}, [0.5] + [1.0] * 7),
        (
            {"lr_decay_style": "cosine", "lr_warmup_steps": 2, "min_lr": 0.2},
            [0.5, 1.0, *(half_cosine(k / 6) for k in range(1, 7)), 0.2, 0.2],
        ),
        (
            {"lr_decay_style": "linear", "lr_warmup_steps": 2, "min_lr": 0.2},
            [0.5, 1.0, *(1 - 0.8 * k / 6 for k in range(1, 7)), 0.2, 0.2],
        ),
        ({"lr_decay_style": "cosine", "lr_warmup_steps": 12}, [k / 12 for k in range(1, 11)]),
    ],
    ids=["constant", "warm-up", "warm-up-ratio", "cosine", "linear", "warm-up-beyond-the-run"],
)
def test_learning_rates(changes: dict[str, Any], wanted: list[float]) -> None:
    found = rates(OptimConfig(lr=1.0, **changes), total_steps=8, count=len(wanted))
    assert found == pytest.approx(wanted)


def state_of(engine: Any) -> list[Tensor]:
    tensors = [param.detach().clone() for param in engine.chunks[0].parameters()]
    for inner in engine.trainer.inner_optimizers:
        for state in inner.state.values():
            tensors += [torch.as_tensor(value).clone() for value in state.values()]
    return [
        *tensors,
        torch.tensor(engine.trainer.lr),
        torch.tensor(engine.trainer.schedule.num_steps),
    ]


def poisoned_step(host: WorkerHost, rows: Sequences, poison: float) -> tuple[str, bool]:
    """Take a good step, then one whose last row is poisoned; say what was raised and kept."""
    actor = host._roles["actor"]
    groups = actor.engine.groups
    mine = list(range(len(rows)))[groups.dp_rank :: groups.dp]
    count = int(rows.response_lengths.sum())
    column = Ragged(torch.ones(count), rows.response_lengths)
    bad = column.values.clone()
    bad[-1] = poison
    old, weights = column.with_values(-column.values), column.with_values(column.values / count)

    def batch(advantages: Tensor) -> PolicyBatch:
        whole = PolicyBatch(rows, old, column.with_values(advantages), weights, None)
        return whole.select(mine)

    cuts = (tuple(range(len(mine))),)
    actor.update(batch(column.values), cuts)
    before = state_of(actor.engine)
    try:
        actor.update(batch(bad), cuts)
    except FloatingPointError as error:
        after = state_of(actor.engine)
        return str(error), all(map(torch.equal, before, after))
    return "nothing was raised", False


@pytest.mark.parametrize(
    "where",
    slow_but(
        (layout(tp=2), layout(dtype="bfloat16")),
        [layout(tp=2), layout(pp=2), layout(), layout(dtype="bfloat16")],
    ),
    ids=["tp2", "pp2", "dp2", "dp2-bfloat16"],
)
@pytest.mark.parametrize("poison", [math.inf, math.nan])
def test_a_gradient_that_is_not_finite_changes_nothing(
    where: Any, poison: float, ranks: Ranks, llama: Path
) -> None:
    with ranks.job(2, job(role(llama, where, optim=SCHEDULED))) as pool:
        answers = pool.each(poisoned_step, rows=sequences(), poison=poison)
    for message, kept in answers:  # on every rank, also where the row is not
        assert message.startswith("gradient norm is ")
        assert kept


def test_clipping_off_still_reports_the_norm(ranks: Ranks, llama: Path) -> None:
    found = []
    for clip_grad in (0.0, 1e9):
        spec = job(role(llama, optim=replace(OPTIM, clip_grad=clip_grad)))
        rows = sequences()
        with ranks.job(1, spec) as pool:
            actor = group(pool, spec.actor)
            batch = policy_batch(rows, actor.log_probs(rows)[0])
            found.append([reduced(actor.update(batch)) for _ in range(2)])
    assert found[0] == found[1]
    assert found[0][0]["actor/grad_norm"] > 0


@pytest.mark.parametrize(
    ("changes", "optim", "rule"),
    [
        ({}, replace(OPTIM, use_precision_aware_optimizer=True), "its fused Adam needs a GPU"),
        ({"gradient_accumulation_fusion": True}, OPTIM, "needs Transformer Engine's layers"),
    ],
    ids=["precision-aware", "fusion"],
)
def test_what_needs_a_gpu_is_refused_on_a_cpu(
    changes: dict[str, Any], optim: OptimConfig, rule: str, ranks: Ranks, llama: Path
) -> None:
    with (
        pytest.raises(WorkerError, match=f"ValueError: .*{rule}"),
        ranks.job(1, job(role(llama, layout(**changes), optim=optim))),
    ):
        pass
