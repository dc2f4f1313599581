"""Balancing losses are what their formulas say, whatever the layout; frozen routers stay put."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mrl.algorithms.reductions import reduced
from mrl.config.schema import MegatronConfig
from mrl.types import Batching, PolicyBatch, Ragged, Sequences
from mrl.workers.host import WorkerHost
from tests.ranks import Ranks
from tests.workers.jobs import (
    ALL_ROWS,
    LENGTHS,
    OPTIM,
    TWO_ROWS,
    assert_close,
    both,
    group,
    job,
    layout,
    role,
    sequences,
    weights_of,
    work,
)

AUX, Z = 0.5, 0.02
EXPERTS, TOP_K = 4, 2
# No clipping, no decay: a step of this plain Adam moves by the gradient's own size.
UNCLIPPED = replace(OPTIM, clip_grad=1e9, weight_decay=0.0)


def balanced(kind: str, **rest: Any) -> MegatronConfig:
    """Give a layout with both balancing losses on, whose ranks hold whole gradients."""
    return layout(
        moe_router_load_balancing_type=kind,
        moe_aux_loss_coeff=AUX,
        moe_z_loss_coeff=Z,
        use_distributed_optimizer=False,
        **rest,
    )


def silent(rows: Sequences) -> PolicyBatch:
    """Give a batch whose own loss is nothing: all gradient comes from the balancing losses."""
    lengths = rows.response_lengths
    nothing = Ragged(torch.zeros(int(lengths.sum())), lengths)
    return PolicyBatch(rows, nothing, nothing, nothing, nothing)


def router_gradients(host: WorkerHost) -> dict[int, Tensor]:
    """Give the router gradients of the layers that this rank holds."""
    experts = host._roles["actor"].engine.experts
    assert experts is not None
    return {r.layer_number - 1: r.weight.main_grad.clone() for r in experts.routers}


def embedding_gradient(host: WorkerHost) -> Tensor | None:
    chunk = host._roles["actor"].engine.chunks[0]
    return chunk.embedding.word_embeddings.weight.main_grad.clone() if chunk.pre_process else None


@dataclass(frozen=True)
class Twin:
    """What autograd on transformers' model gives in float64."""

    aux: float
    z: float
    violation: float
    gradients: dict[int, Tensor]
    embedding: Tensor


def twin(path: Path, rows: Sequences, groups: tuple[tuple[int, ...], ...]) -> Twin:
    """Compute the losses in plain torch; `groups` lists the rows that share a load."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float64, experts_implementation="eager"
    )
    gates = {i: x.mlp.gate for i, x in enumerate(model.model.layers) if hasattr(x.mlp, "gate")}
    seen: dict[int, list[Tensor]] = {layer: [] for layer in gates}
    for layer, gate in gates.items():
        gate.register_forward_pre_hook(
            lambda module, args, layer=layer: seen[layer].append(
                args[0].reshape(-1, args[0].shape[-1]) @ module.weight.T
            )
        )
    for tokens in rows.tokens.rows():
        model(tokens[None])
    total = int(rows.tokens.lengths.sum())
    aux = z = violation = torch.zeros([], dtype=torch.float64)
    for logits in seen.values():
        loads = torch.zeros(EXPERTS, dtype=torch.float64)
        for own in groups:
            of_group = torch.cat([logits[i] for i in own])
            chosen = torch.zeros_like(of_group).scatter(1, of_group.topk(TOP_K, 1).indices, 1.0)
            share = chosen.sum(0) / (TOP_K * len(of_group))
            mean = of_group.softmax(1).mean(0)
            aux = aux + len(of_group) / total * EXPERTS * (share * mean).sum()
            loads += chosen.sum(0)
        violation = violation + loads.max() / loads.mean() - 1
        z = z + torch.cat(logits).logsumexp(1).square().sum() / total
    (AUX * aux + Z * z).backward()
    count = len(gates)
    return Twin(
        float(aux.detach()) / count,
        float(z.detach()) / count,
        float(violation) / count,
        {layer: gate.weight.grad.float() for layer, gate in gates.items()},
        model.model.embed_tokens.weight.grad.float(),
    )


Groups = tuple[tuple[int, ...], ...]


@pytest.fixture(scope="module")
def twins(ranks: Ranks, qwen3_moe: Path) -> Callable[[Groups], Twin]:
    """Autograd's results by groups, computed once."""
    rows = sequences()
    return cache(lambda groups: ranks.run(1, twin, path=qwen3_moe, rows=rows, groups=groups)[0])


ROWS = tuple(range(len(LENGTHS)))
ONE = (ROWS,)
EACH = tuple((i,) for i in ROWS)
EP2 = {"expert_model_parallel_size": 2}
# ranks, layout, batching, and the rows of one load
CASES: dict[str, tuple[int, MegatronConfig, Batching, Groups]] = {
    "micro-batch": (1, balanced("aux_loss"), ALL_ROWS, ONE),
    "micro-batches-of-one": (1, balanced("aux_loss"), Batching(micro_batch_size=1), EACH),
    "step": (1, balanced("global_aux_loss"), ALL_ROWS, ONE),
    "step-replayed-dp2": (
        2,
        balanced("global_aux_loss", **EP2),
        Batching(micro_batch_size=1),
        ONE,
    ),
    "step-dp2": (2, balanced("global_aux_loss", **EP2), ALL_ROWS, ONE),
    "sequence": (1, balanced("seq_aux_loss"), Batching(micro_batch_size=3), EACH),
    "sequence-tp2-ep2": (
        2,
        balanced("seq_aux_loss", tp=2, expert_tensor_parallel_size=1, **EP2),
        TWO_ROWS,
        EACH,
    ),
    "sequence-pp2-vpp2": (
        2,
        balanced("seq_aux_loss", pp=2, virtual_pipeline_model_parallel_size=2),
        Batching(max_tokens=24),
        EACH,
    ),
}
SLOW_CASES = {
    "sequence-dp4": (4, balanced("seq_aux_loss"), Batching(max_tokens=24), EACH),
    "micro-batch-tp2": (2, balanced("aux_loss", tp=2), ALL_ROWS, ONE),
    "micro-batch-cp2": (2, balanced("aux_loss", context_parallel_size=2), ALL_ROWS, ONE),
    "sequence-cp2": (2, balanced("seq_aux_loss", context_parallel_size=2), TWO_ROWS, EACH),
    "step-cp2-tp2": (
        4,
        balanced("global_aux_loss", tp=2, context_parallel_size=2),
        ALL_ROWS,
        ONE,
    ),
    "step-dp4-ep2": (4, balanced("global_aux_loss", **EP2), ALL_ROWS, ONE),
    "micro-batch-pp2": (2, balanced("aux_loss", pp=2), ALL_ROWS, ONE),
    "sequence-recomputed-pp2": (
        2,
        balanced(
            "seq_aux_loss",
            pp=2,
            recompute_granularity="full",
            recompute_method="uniform",
            recompute_num_layers=1,
        ),
        TWO_ROWS,
        EACH,
    ),
}


@pytest.mark.parametrize(
    "case", [*CASES, *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW_CASES)]
)
def test_balancing_losses_and_their_gradients_are_those_of_autograd(
    case: str, ranks: Ranks, qwen3_moe: Path, twins: Callable[[Groups], Twin]
) -> None:
    world, where, batching, groups = (CASES | SLOW_CASES)[case]
    rows = sequences()
    wanted = twins(groups)
    replay = "R2" if "replayed" in case else "disabled"
    spec = job(replace(role(qwen3_moe, where, optim=UNCLIPPED), router_replay=replay))
    with ranks.job(world, spec) as pool:
        actor = group(pool, spec.actor, batching)
        _, _, *recorded = actor.log_probs(rows)
        metrics = reduced(actor.update(replace(silent(rows), routing=(*recorded, None)[0])))
        found = pool.each(router_gradients)
        embeddings = [g for g in pool.each(embedding_gradient) if g is not None]
    assert metrics["actor/moe_aux_loss"] == pytest.approx(wanted.aux, rel=1e-5)
    assert metrics["actor/moe_z_loss"] == pytest.approx(wanted.z, rel=1e-5)
    assert metrics["actor/moe_max_violation"] == pytest.approx(wanted.violation, rel=1e-5)
    for gradients in found:
        for layer, gradient in gradients.items():
            assert_close(gradient, wanted.gradients[layer], f"router {layer}")
    if where.tensor_model_parallel_size == 1:
        held = embeddings[0][: wanted.embedding.shape[0]]
        assert_close(held, wanted.embedding, "embedding")


def test_padding_and_empty_micro_batches_add_nothing(ranks: Ranks, qwen3_moe: Path) -> None:
    rows = sequences(lengths=(5, 9, 4), responses=(3, 4, 1))  # one rank has one micro-batch more
    answers = []
    for world, where in ((1, balanced("seq_aux_loss")), (2, balanced("seq_aux_loss", **EP2))):
        spec = job(role(qwen3_moe, where, optim=UNCLIPPED))
        with ranks.job(world, spec) as pool:
            actor = group(pool, spec.actor, Batching(micro_batch_size=1))
            metrics = reduced(actor.update(silent(rows)))
            answers.append({k: v for k, v in metrics.items() if not k.startswith("perf/")})
    assert answers[1] == pytest.approx(answers[0], rel=1e-5, abs=1e-6)
    assert answers[0]["actor/grad_norm"] > 0


def router_weights(folder: Path) -> dict[str, Tensor]:
    return {k: v for k, v in weights_of(folder).items() if k.endswith("mlp.gate.weight")}


@pytest.mark.parametrize(
    ("world", "where"),
    [
        (1, layout(freeze_moe_router=True)),
        (2, layout(freeze_moe_router=True, tp=2, expert_tensor_parallel_size=1, **EP2)),
    ],
    ids=["one", "tp2-ep2"],
)
def test_a_frozen_router_keeps_its_weights_and_the_rest_learns_as_ever(
    world: int, where: MegatronConfig, ranks: Ranks, qwen3_moe: Path, tmp_path: Path
) -> None:
    rounds = {}
    # an even cut of the whole rounds: what differs is the router alone
    for name, size, place in (("free", 1, layout()), ("frozen", world, where)):
        spec = both(qwen3_moe, place)
        with ranks.job(size, spec) as pool:
            rounds[name] = work(pool, spec, tmp_path / name, ALL_ROWS, rounds.get("free"))
    before = {k: v for k, v in _initial(qwen3_moe).items() if k.endswith("mlp.gate.weight")}
    after = router_weights(tmp_path / "frozen" / "actor")
    assert len(after) == 3 and all(torch.equal(after[k], before[k]) for k in before)
    moved = router_weights(tmp_path / "free" / "actor")
    assert not any(torch.equal(moved[k], before[k]) for k in before)
    free, frozen = rounds["free"], rounds["frozen"]
    assert_close(frozen.log_probs, free.log_probs, "log-probs", 1e-4)
    # the first step's norm lacks the routers' part alone
    first, without = free.metrics[0]["actor/grad_norm"], frozen.metrics[0]["actor/grad_norm"]
    assert 0 < without < first
    changed = [k for k in _initial(qwen3_moe) if k not in before]
    assert not any(torch.equal(frozen.actor[k], _initial(qwen3_moe)[k]) for k in changed)


def _initial(folder: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


def test_losses_that_are_off_are_not_reported(ranks: Ranks, qwen3_moe: Path) -> None:
    spec = job(role(qwen3_moe))
    with ranks.job(1, spec) as pool:
        metrics = group(pool, spec.actor).update(silent(sequences()))
    assert {name for name in metrics if "moe" in name} == {"actor/moe_max_violation"}
