"""One rank computes what transformers computes, gradients included."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from mrl.algorithms.reductions import reduced
from mrl.types import PolicyBatch
from mrl.workers.host import WorkerHost
from tests.marks import slow_but
from tests.models import write_model
from tests.ranks import Ranks
from tests.workers.jobs import (
    LOSS,
    OPTIM,
    assert_close,
    both,
    group,
    job,
    layout,
    policy_batch,
    role,
    sequences,
    value_batch,
)
from tests.workers.transformers_twin import Twin, policy_twin, score, value_twin

UNCLIPPED = replace(OPTIM, clip_grad=1e9)
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


def export_gradients(host: WorkerHost, name: str, folder: Path) -> Tensor | None:
    """Write a role's gradients as if they were its weights; give the value head's."""
    from mrl.resharding.hf_files import HFWriter
    from mrl.resharding.transports import Distributed

    engine = host._roles[name].engine
    weights, source = engine.weights, Path(engine.spec.path)
    gradients = {name: engine.chunks[0].get_parameter(name).main_grad for name in weights.params()}
    HFWriter(
        folder, source, weights.layout, host.rank, gradients, Distributed(), dtype="float32"
    ).write()
    head = dict(engine.chunks[0].named_parameters()).get("output_layer.weight")
    return head.main_grad if engine.spec.head == "value" and head is not None else None


def gradients_of(pool: Any, name: str, folder: Path) -> dict[str, Tensor]:
    heads = pool.each(export_gradients, name=name, folder=folder)
    gradients = load_file(folder / "model.safetensors")
    found = [head for head in heads if head is not None]  # replicated over the last stage
    return gradients | ({"value_head": found[0]} if found else {})


def assert_gradients(found: dict[str, Tensor], twin: Twin) -> None:
    assert found.keys() == twin.gradients.keys()
    # what little a k bias gets is the rest of large terms that cancel
    largest = max(float(gradient.abs().max()) for gradient in twin.gradients.values())
    for name, gradient in twin.gradients.items():
        scale = max(float(gradient.abs().max()), 0.1 * largest)
        assert float((found[name] - gradient).abs().max()) <= 1e-5 * scale, name


def norm_of(twin: Twin) -> float:
    return math.sqrt(sum(float(g.double().square().sum()) for g in twin.gradients.values()))


@pytest.mark.parametrize(
    ("model", "temperature", "world", "where"),
    [
        ("qwen2", 1.0, 1, layout()),
        ("llama", 0.7, 1, layout()),
        ("qwen2", 0.7, 4, layout(tp=2, pp=2)),
        ("llama", 1.0, 4, layout(tp=4)),
    ],
)
def test_outputs_loss_and_gradients_are_those_of_autograd(
    model: str,
    temperature: float,
    world: int,
    where: Any,
    ranks: Ranks,
    request: pytest.FixtureRequest,
    tmp_path: Path,
) -> None:
    path = request.getfixturevalue(model)
    rows = sequences()
    log_probs, _ = ranks.run(1, score, path=path, rows=rows, temperature=temperature)[0]
    policies, targets = policy_batch(rows, log_probs), value_batch(rows, log_probs)
    policy = ranks.run(1, policy_twin, path=path, batch=policies, temperature=temperature)[0]
    value = ranks.run(1, value_twin, path=path, batch=targets, cliprange=0.5)[0]
    spec = both(path, where, temperature)
    spec = replace(
        spec,
        actor=replace(spec.actor, optim=UNCLIPPED),
        critic=replace(spec.critic, optim=UNCLIPPED),
    )
    with ranks.job(world, spec) as pool:
        actor, critic = group(pool, spec.actor), group(pool, spec.critic)
        for name, found, wanted in zip(
            ("log-probs", "entropies", "values"),
            (*actor.log_probs(rows), critic.values(rows)),
            (*policy.outputs, *value.outputs),
            strict=True,
        ):
            assert_close(found.values, wanted, name)
        metrics = {**reduced(actor.update(policies)), **reduced(critic.update(targets))}
        assert_gradients(gradients_of(pool, "actor", tmp_path / "actor"), policy)
        assert_gradients(gradients_of(pool, "critic", tmp_path / "critic"), value)
    loss = (
        metrics["actor/pg_loss"]
        - LOSS.entropy_coeff * metrics["actor/entropy_loss"]
        + LOSS.kl_loss_coef * metrics["actor/kl_loss"]
    )
    assert loss == pytest.approx(policy.loss, rel=1e-5)
    assert metrics["critic/vf_loss"] == pytest.approx(value.loss, rel=1e-5)
    assert metrics["actor/grad_norm"] == pytest.approx(norm_of(policy), rel=1e-5)
    assert metrics["critic/grad_norm"] == pytest.approx(norm_of(value), rel=1e-5)


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("llama", {"rope_parameters": LLAMA3_ROPE}),
        ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}),
        ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0}}),
        ("llama", {"head_dim": 16, "rms_norm_eps": 1e-2}),
        ("qwen2", {"tie_word_embeddings": False, "num_key_value_heads": 8}),
    ],
    ids=["llama3-rope", "linear-rope", "rope-theta", "wide-heads", "untied-one-head-a-group"],
)
def test_the_shapes_of_a_config_are_honoured(
    kind: str, changes: dict[str, Any], ranks: Ranks, tmp_path: Path
) -> None:
    ranks.run(1, write_model, folder=tmp_path, kind=kind, num_hidden_layers=2, **changes)
    rows = sequences(lengths=(60, 7), responses=(50, 3))
    wanted = ranks.run(1, score, path=tmp_path, rows=rows, temperature=1.0)[0]
    spec = job(role(tmp_path, optim=None))
    with ranks.job(1, spec) as pool:
        found = group(pool, spec.actor).log_probs(rows)
    assert_close(found[0].values, wanted[0].values, "log-probs")
    assert_close(found[1].values, wanted[1].values, "entropies")


@pytest.mark.parametrize("tp", slow_but((2,), [1, 2, 4]))
def test_padded_vocabulary_takes_no_probability(tp: int, ranks: Ranks, tmp_path: Path) -> None:
    # five tokens, sixteen rows a rank: with TP 2 and 4 some ranks hold padding alone
    ranks.run(1, write_model, folder=tmp_path, kind="llama", vocab_size=5)
    rows = sequences(vocab=5)
    log_probs, entropies = ranks.run(1, score, path=tmp_path, rows=rows, temperature=0.7)[0]
    batch = policy_batch(rows, log_probs)
    twin = ranks.run(1, policy_twin, path=tmp_path, batch=batch, temperature=0.7)[0]
    spec = job(role(tmp_path, layout(tp=tp), temperature=0.7, optim=UNCLIPPED))
    with ranks.job(tp, spec) as pool:
        actor = group(pool, spec.actor)
        found = actor.log_probs(rows)
        actor.update(batch)
        gradients = gradients_of(pool, "actor", tmp_path / "gradients")
        padding = pool.each(padded_rows, name="actor")
    assert_close(found[0].values, log_probs.values, "log-probs")
    assert_close(found[1].values, entropies.values, "entropies")
    assert_gradients(gradients, twin)
    assert sum(len(rows) for rows, _ in padding) == 16 * tp - 5
    assert not any(rows.any() or gradients.any() for rows, gradients in padding)


def padded_rows(host: WorkerHost, name: str) -> tuple[Tensor, Tensor]:
    """Give a rank's rows of the head past the vocabulary, and their gradients."""
    engine = host._roles[name].engine
    weight = engine.chunks[0].output_layer.weight
    real = min(max(5 - engine.groups.tp_rank * len(weight), 0), len(weight))
    return weight[real:].detach(), weight.main_grad[real:]


def test_two_passes_and_the_first_ratio_are_exact(ranks: Ranks, qwen2: Path) -> None:
    spec = job(role(qwen2), ref=role(qwen2, name="ref", optim=None))
    rows = sequences()
    with ranks.job(1, spec) as pool:
        actor, ref = group(pool, spec.actor), group(pool, spec.ref)
        first, second = actor.log_probs(rows)[0], actor.log_probs(rows)[0]
        assert torch.equal(first.values, second.values)
        assert torch.equal(ref.log_probs(rows).values, first.values)
        ones = first.with_values(torch.ones_like(first.values))
        weights = ones.with_values(ones.values / len(ones.values))
        metrics = reduced(actor.update(PolicyBatch(rows, first, ones, weights, first)))
    assert metrics["actor/ppo_kl"] == 0
    assert metrics["actor/pg_clipfrac"] == 0
    assert metrics["actor/kl_loss"] == 0
    assert metrics["actor/pg_loss"] == pytest.approx(-1, abs=1e-6)  # the ratio is 1 everywhere


def dropouts(host: WorkerHost) -> set[float]:
    from torch.nn import Dropout

    engine = host._roles["actor"].engine
    config = engine.chunks[0].config
    layers = {m.p for m in engine.chunks[0].modules() if isinstance(m, Dropout)}
    return {config.attention_dropout, config.hidden_dropout} | layers


def test_nothing_drops_out(ranks: Ranks, qwen2: Path) -> None:
    with ranks.job(1, job(role(qwen2))) as pool:
        assert pool.each(dropouts) == [{0.0}]
