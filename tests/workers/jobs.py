"""Jobs of tiny models: their specs, their batches, and one round of work on them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from mrl.algorithms.reductions import reduced
from mrl.config.schema import MegatronConfig, OptimConfig
from mrl.types import Batching, PolicyBatch, Ragged, Sequences, ValueBatch
from mrl.workers.group import MegatronRanks, RankPool, TrainGroup
from mrl.workers.specs import JobSpec, PolicyLossSpec, RoleSpec
from tests.models import HIDDEN, VOCAB

# Adam divides by the gradient's size: a large eps keeps a gradient of nearly nothing from turning
# rounding into a whole step. Clipping is in force at every step.
OPTIM = OptimConfig(lr=1e-2, eps=1e-2, clip_grad=0.5, weight_decay=0.1)
LOSS = PolicyLossSpec(
    clip_low=0.2,
    clip_high=0.3,
    clip_c=3.0,
    entropy_coeff=0.01,
    kl_loss_coef=0.05,
    kl_loss_type="k3",
)
# A prompt of one token, a response of one token, both at once, odd lengths, equal lengths.
LENGTHS = (5, 9, 12, 7, 20, 6, 2, 11)
RESPONSES = (3, 4, 5, 2, 10, 1, 1, 10)
TWO_ROWS = Batching(micro_batch_size=2)
ALL_ROWS = Batching(micro_batch_size=len(LENGTHS))  # least traffic between ranks


def layout(tp: int = 1, pp: int = 1, **rest: Any) -> MegatronConfig:
    """Give a parallel layout."""
    return MegatronConfig(tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp, **rest)


def role(
    path: Path,
    where: MegatronConfig | None = None,
    name: str = "actor",
    optim: OptimConfig | None = OPTIM,
    temperature: float = 1.0,
    total_steps: int = 10,
) -> RoleSpec:
    """Give a role; a critic has a value head."""
    return RoleSpec(
        name=name,
        path=str(path),
        head="value" if name == "critic" else "lm",
        layout=where or layout(),
        optim=optim,
        total_steps=total_steps,
        temperature=temperature,
        trust_remote_code=False,
    )


def job(actor: RoleSpec, critic: RoleSpec | None = None, ref: RoleSpec | None = None) -> JobSpec:
    """Give a job without an engine."""
    return JobSpec(
        actor=actor,
        policy_loss=LOSS,
        critic=critic,
        cliprange_value=0.5,
        ref=ref,
        rollout=None,
        device="cpu",
        ranks_per_node=4,
        seed=1,
        timeout_s=60.0,
    )


def both(path: Path, where: MegatronConfig, temperature: float = 1.0) -> JobSpec:
    """Give a job of an actor and a critic of one layout."""
    actor = role(path, where, temperature=temperature)
    return job(actor, replace(actor, name="critic", head="value"))


def group(
    pool: RankPool, spec: RoleSpec, batching: Batching = ALL_ROWS, world: int | None = None
) -> TrainGroup:
    """Give the controller's hand on a role, of the first `world` ranks (None: all)."""
    tp, pp = spec.layout.tensor_model_parallel_size, spec.layout.pipeline_model_parallel_size
    cp = spec.layout.context_parallel_size
    interleaved = spec.layout.virtual_pipeline_model_parallel_size is not None
    ranks = MegatronRanks(tp, cp, (world or pool.world_size) // (tp * cp * pp), pp, interleaved)
    return TrainGroup(pool, spec.name, ranks, batching, batching, HIDDEN)


def sequences(
    lengths: tuple[int, ...] = LENGTHS, responses: tuple[int, ...] = RESPONSES, vocab: int = VOCAB
) -> Sequences:
    """Draw random rows without the pad token, whose embedding transformers does not train."""
    generator = torch.Generator().manual_seed(7)
    rows = [torch.randint(1, vocab, (n,), generator=generator) for n in lengths]
    return Sequences(Ragged.from_rows(rows), torch.tensor(responses))


def policy_batch(rows: Sequences, log_probs: Ragged) -> PolicyBatch:
    """Make a mini-batch near a policy: ratios on both sides of the clip, some tokens masked."""
    generator = torch.Generator().manual_seed(8)

    def noise(scale: float) -> Tensor:
        return scale * torch.randn(log_probs.values.shape, generator=generator)

    weights = (noise(1.0) < 1.0).float()
    return PolicyBatch(
        rows,
        log_probs.with_values(log_probs.values + noise(0.3)),
        log_probs.with_values(noise(1.0)),
        log_probs.with_values(weights / weights.sum()),
        log_probs.with_values(log_probs.values + noise(0.3)),
    )


def value_batch(rows: Sequences, values: Ragged) -> ValueBatch:
    """Make a mini-batch near a value model: some values are clipped, some tokens masked."""
    batch = policy_batch(rows, values)
    returns = batch.old_log_probs.values + 2 * batch.advantages.values
    return ValueBatch(rows, batch.old_log_probs, values.with_values(returns), batch.weights)


@dataclass(frozen=True)
class Round:
    """What a job of actor and critic did: outputs, two steps each, and the weights after."""

    log_probs: Tensor
    entropies: Tensor
    values: Tensor
    metrics: tuple[dict[str, float], ...]  # actor, critic, actor, critic
    actor: dict[str, Tensor]
    critic: dict[str, Tensor]


def work(
    pool: RankPool, spec: JobSpec, folder: Path, batching: Batching, around: Round | None
) -> Round:
    """Score and train actor and critic in turns, and export them.

    The batches are made near the outputs of `around`, by default near this job's own.
    """
    assert spec.critic is not None
    actor, critic = group(pool, spec.actor, batching), group(pool, spec.critic, batching)
    rows = sequences()
    log_probs, entropies = actor.log_probs(rows)
    values = critic.values(rows)
    base = (
        (log_probs.values, values.values) if around is None else (around.log_probs, around.values)
    )
    policies = policy_batch(rows, log_probs.with_values(base[0]))
    targets = value_batch(rows, values.with_values(base[1]))
    metrics = []
    for _ in range(2):
        metrics += [reduced(actor.update(policies)), reduced(critic.update(targets))]
    actor.save(folder / "actor")
    critic.save(folder / "critic")
    return Round(
        log_probs.values,
        entropies.values,
        values.values,
        tuple(metrics),
        weights_of(folder / "actor"),
        weights_of(folder / "critic"),
    )


def weights_of(checkpoint: Path) -> dict[str, Tensor]:
    """Read all tensors of a role's checkpoint, a value head as `value_head`."""
    folder = checkpoint / "huggingface"
    weights = load_file(folder / "model.safetensors")
    if (head := folder / "value_head.safetensors").exists():
        weights["value_head"] = load_file(head)["weight"]
    return weights


def assert_close(actual: Tensor, expected: Tensor, name: str, relative: float = 1e-5) -> None:
    """Compare to a part of the largest magnitude."""
    assert actual.shape == expected.shape, name
    limit = relative * float(expected.abs().max())
    found = float((actual - expected).abs().max())
    assert found <= limit, f"{name}: differs by {found:.3e}, at most {limit:.3e}"


def of_the_layout(name: str) -> bool:
    """Tell metrics that speak of how a batch was cut and shared out."""
    return name.startswith("perf/")


def assert_same_round(found: Round, expected: Round) -> None:
    """Compare all numbers of two rounds, to rounding."""
    for name in ("log_probs", "entropies", "values"):
        assert_close(getattr(found, name), getattr(expected, name), name)
    for number, (metrics, wanted) in enumerate(zip(found.metrics, expected.metrics, strict=True)):
        assert metrics.keys() == wanted.keys()
        for name, value in wanted.items():
            if of_the_layout(name):
                continue
            limit = 1e-5 * abs(value) + 1e-6
            assert abs(metrics[name] - value) <= limit, f"{name} of update {number}"
    for role in ("actor", "critic"):
        weights, wanted_weights = getattr(found, role), getattr(expected, role)
        assert weights.keys() == wanted_weights.keys()
        for name, tensor in wanted_weights.items():
            assert_close(weights[name], tensor, f"{role} {name}")
