"""The same numbers from transformers and autograd, row by row; these functions run on a rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from mrl.algorithms.losses import entropy_loss, kl_loss, policy_loss, value_loss
from mrl.types import PolicyBatch, Ragged, Sequences, ValueBatch
from tests.workers.jobs import LOSS


@dataclass(frozen=True)
class Twin:
    """What one optimizer step sees; gradients by checkpoint name."""

    outputs: tuple[Tensor, ...]  # log-probs and entropies, or values
    loss: float
    gradients: dict[str, Tensor]


def score(path: Path, rows: Sequences, temperature: float) -> tuple[Ragged, Ragged]:
    """Give log-probs and entropies of the response tokens."""
    from transformers import AutoModelForCausalLM

    with torch.no_grad():
        log_probs, entropies = _score(
            AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32), rows, temperature
        )
    return Ragged(log_probs, rows.response_lengths), Ragged(entropies, rows.response_lengths)


def policy_twin(path: Path, batch: PolicyBatch, temperature: float) -> Twin:
    """Compute the actor's loss and gradients."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    log_probs, entropies = _score(model, batch.sequences, temperature)
    weights = batch.weights.values
    policy = policy_loss(
        log_probs, batch.old_log_probs.values, batch.advantages.values, weights,
        LOSS.clip_low, LOSS.clip_high, LOSS.clip_c,
    )  # fmt: skip
    loss = policy.loss - LOSS.entropy_coeff * entropy_loss(entropies, weights)
    if batch.ref_log_probs is not None:
        reference = batch.ref_log_probs.values
        loss = loss + LOSS.kl_loss_coef * kl_loss(log_probs, reference, weights, LOSS.kl_loss_type)
    loss.backward()
    return Twin((log_probs.detach(), entropies.detach()), float(loss), _gradients(model))


def value_twin(path: Path, batch: ValueBatch, cliprange: float) -> Twin:
    """Compute the critic's loss and gradients; the value head's is named `value_head`."""
    from transformers import AutoModel

    model = AutoModel.from_pretrained(path, dtype=torch.float32).eval()
    head = nn.Parameter(load_file(path / "value_head.safetensors")["weight"])
    values = _values(lambda row: model(row[None]).last_hidden_state[0] @ head[0], batch.sequences)
    columns = (batch.old_values.values, batch.returns.values, batch.weights.values)
    loss = value_loss(values, *columns, cliprange).loss
    loss.backward()
    gradients = {f"model.{name}": gradient for name, gradient in _gradients(model).items()}
    return Twin((values.detach(),), float(loss), gradients | {"value_head": head.grad})


def _score(model: nn.Module, rows: Sequences, temperature: float) -> tuple[Tensor, Tensor]:
    log_probs, entropies = [], []
    for row, length in zip(rows.tokens.rows(), rows.response_lengths.tolist(), strict=True):
        logits = model(row[None]).logits[0, -length - 1 : -1].double() / temperature
        scores = logits.log_softmax(-1)
        log_probs.append(scores.gather(1, row[-length:, None])[:, 0])
        entropies.append(-(scores.exp() * scores).sum(-1))
    return torch.cat(log_probs).float(), torch.cat(entropies).float()


def _values(value: Callable[[Tensor], Tensor], rows: Sequences) -> Tensor:
    pairs = zip(rows.tokens.rows(), rows.response_lengths.tolist(), strict=True)
    return torch.cat([value(row)[-length - 1 : -1] for row, length in pairs])


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
