from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tests.ranks import Ranks
from tests.workers.jobs import assert_close


def head(
    logits: Tensor, targets: Tensor, vocab: int, temperature: float, weights: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Give log-probs, entropies and the gradient of their weighted sum by this rank's columns."""
    import torch.distributed as dist

    from mrl.workers.megatron.heads import vocab_parallel_log_probs

    world, rank = dist.get_world_size(), dist.get_rank()
    mine = logits.chunk(world, dim=1)[rank].clone().requires_grad_()
    log_probs, entropies = vocab_parallel_log_probs(
        mine, targets, vocab, temperature, dist.group.WORLD
    )
    (log_probs @ weights[0] + entropies @ weights[1]).backward()
    assert mine.grad is not None
    return log_probs.detach(), entropies.detach(), mine.grad


def on_ranks(ranks: Ranks, world: int, *args: object) -> tuple[Tensor, Tensor, Tensor]:
    names = ("logits", "targets", "vocab", "temperature", "weights")
    answers = ranks.run(world, head, **dict(zip(names, args, strict=True)))
    assert all(torch.equal(a[i], answers[0][i]) for a in answers for i in (0, 1))
    return answers[0][0], answers[0][1], torch.cat([answer[2] for answer in answers], dim=1)


ONE = (torch.ones(1), torch.zeros(1))


@pytest.mark.parametrize("world", [1, 2, 4])
def test_padding_takes_no_probability(world: int, ranks: Ranks) -> None:
    logits = torch.full((1, 8), 9.0)
    logits[:, :5] = 1.0
    log_probs, entropies, gradient = on_ranks(ranks, world, logits, torch.tensor([4]), 5, 1.0, ONE)
    assert log_probs.item() == pytest.approx(-math.log(5), abs=1e-6)
    assert entropies.item() == pytest.approx(math.log(5), abs=1e-6)
    assert gradient[0].tolist() == pytest.approx([-0.2] * 4 + [0.8] + [0.0] * 3)


def test_temperature_divides_logits_and_not_log_probs(ranks: Ranks) -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0]])
    log_probs, entropies, _ = on_ranks(ranks, 1, logits, torch.tensor([0]), 3, 0.5, ONE)
    assert log_probs.item() == pytest.approx(-0.14293, abs=1e-5)
    p = torch.tensor([4.0, 2.0, 0.0]).softmax(0)
    assert entropies.item() == pytest.approx(float(-(p * p.log()).sum()), abs=1e-6)


@pytest.mark.parametrize("world", [1, 4])
def test_log_probs_entropies_and_gradients_are_those_of_autograd(world: int, ranks: Ranks) -> None:
    torch.manual_seed(0)
    vocab, temperature = 21, 0.7
    logits = 5 * torch.randn(6, 32)
    targets = torch.randint(0, vocab, (6,))
    weights = (torch.randn(6), torch.randn(6))
    full = logits.double().requires_grad_()
    scores = (full[:, :vocab] / temperature).log_softmax(1)
    wanted = scores.gather(1, targets[:, None])[:, 0], -(scores.exp() * scores).sum(1)
    (wanted[0] @ weights[0].double() + wanted[1] @ weights[1].double()).backward()
    found = on_ranks(ranks, world, logits, targets, vocab, temperature, weights)
    for name, a, b in zip(("log-probs", "entropies"), found, wanted, strict=False):
        assert_close(a, b.detach().float(), name)
    assert full.grad is not None
    assert_close(found[2], full.grad.float(), "gradient")


def test_extreme_logits_stay_finite(ranks: Ranks) -> None:
    logits = torch.tensor([[1e4, -1e4, 0.0, 3e4], [-3e4, -3e4, -3e4, -3e4]])
    log_probs, entropies, gradient = on_ranks(
        ranks, 2, logits, torch.tensor([3, 0]), 4, 0.5, (torch.ones(2), torch.ones(2))
    )
    assert log_probs.tolist() == pytest.approx([0.0, -math.log(4)])
    assert entropies.tolist() == pytest.approx([0.0, math.log(4)])
    assert gradient.isfinite().all()
