from __future__ import annotations

import math
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mrl.config.schema import MegatronConfig
from mrl.workers.host import WorkerHost
from tests.marks import slow_but
from tests.ranks import Ranks
from tests.workers.jobs import (
    TWO_ROWS,
    assert_close,
    assert_same_round,
    both,
    group,
    job,
    layout,
    policy_batch,
    role,
    sequences,
    work,
)
from tests.workers.megatron.conftest import Alone

VOCAB, PADDED, TEMPERATURE = 21, 32, 0.7
WHOLE = 2**30
NAMES = ("log-probs", "entropies", "gradient by hidden", "gradient by weight")


def inputs(tokens: int = 6, hidden: int = 8, vocab: int = VOCAB, padded: int = PADDED) -> Any:
    """Draw hidden states, a padded weight whose padding is loud, targets, weights of a loss."""
    generator = torch.Generator().manual_seed(0)
    weight = 2 * torch.randn(padded, hidden, generator=generator)
    weight[vocab:] *= 100
    return {
        "hidden": torch.randn(tokens, hidden, generator=generator),
        "weight": weight,
        "targets": torch.randint(0, vocab, (tokens,), generator=generator),
        "weights": torch.randn(2, tokens, generator=generator),
        "vocab": vocab,
    }


def head(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    weights: Tensor,
    vocab: int,
    chunk_bytes: int,
    temperature: float = TEMPERATURE,
) -> tuple[Tensor, Tensor, Tensor, Tensor, int]:
    """Give log-probs, entropies, this rank's gradients by hidden and weight, and messages sent."""
    import torch.distributed as dist

    from mrl.workers.megatron import fused_head

    messages = []
    send = dist.all_reduce
    dist.all_reduce = lambda *args, **kwargs: messages.append(send(*args, **kwargs))
    fused_head.CHUNK_BYTES = chunk_bytes
    hidden = hidden.clone().requires_grad_()
    mine = weight.chunk(dist.get_world_size())[dist.get_rank()].clone().requires_grad_()
    log_probs, entropies = fused_head.linear_log_probs(
        hidden, mine, targets, vocab, temperature, dist.group.WORLD
    )
    (log_probs @ weights[0] + entropies @ weights[1]).backward()
    assert hidden.grad is not None and mine.grad is not None
    return log_probs.detach(), entropies.detach(), hidden.grad, mine.grad, len(messages)


def on_ranks(
    ranks: Ranks, world: int, chunk_bytes: int = WHOLE, **kwargs: Any
) -> tuple[Tensor, ...]:
    answers = ranks.run(world, head, chunk_bytes=chunk_bytes, **kwargs)
    assert all(torch.equal(a[i], answers[0][i]) for a in answers for i in (0, 1))
    assert {answer[4] for answer in answers} == {2 if world > 1 and len(kwargs["targets"]) else 0}
    by_hidden = torch.stack([answer[2] for answer in answers]).sum(0)
    return *answers[0][:2], by_hidden, torch.cat([answer[3] for answer in answers])


def reference(
    hidden: Tensor, weight: Tensor, targets: Tensor, weights: Tensor, vocab: int
) -> tuple[Tensor, ...]:
    """Compute the same by autograd in float64."""
    hidden, weight = hidden.double().requires_grad_(), weight.double().requires_grad_()
    scores = (hidden @ weight[:vocab].t() / TEMPERATURE).log_softmax(1)
    log_probs = scores.gather(1, targets[:, None])[:, 0]
    entropies = -(scores.exp() * scores).sum(1)
    (log_probs @ weights[0].double() + entropies @ weights[1].double()).backward()
    assert hidden.grad is not None and weight.grad is not None
    answers = (log_probs, entropies, hidden.grad, weight.grad)
    return tuple(answer.detach().float() for answer in answers)


# Bytes of logits at a time: in float32 with 6 tokens, all columns, 5 of them, or one.
@pytest.mark.parametrize(
    ("world", "chunk_bytes"),
    [
        (1, 24),
        (4, 120),
        *(
            pytest.param(world, size, marks=pytest.mark.slow)
            for world, size in ((1, WHOLE), (1, 120), (2, 120), (4, WHOLE))
        ),
    ],
)
def test_every_cut_gives_autograds_numbers(world: int, chunk_bytes: int, ranks: Ranks) -> None:
    drawn = inputs()
    found, wanted = on_ranks(ranks, world, chunk_bytes, **drawn), reference(**drawn)
    for name, a, b in zip(NAMES, found, wanted, strict=True):
        assert_close(a, b, name)
    assert not found[3][VOCAB:].any()  # padding takes no gradient


def test_chunks_of_many_columns_are_aligned_and_give_the_same(ranks: Ranks) -> None:
    drawn = inputs(tokens=3, vocab=700, padded=768)
    found = on_ranks(ranks, 1, 4 * 3 * 300, **drawn)  # at most 300 columns: 3 chunks of 256
    for name, a, b in zip(NAMES, found, reference(**drawn), strict=True):
        assert_close(a, b, name)


def column_chunks(tokens: int, rows: int, vocab: int) -> tuple[int, int]:
    import torch.distributed as dist

    from mrl.workers.megatron.fused_head import _Columns

    hidden, weight = torch.empty(tokens, 1, device="meta"), torch.empty(rows, 1, device="meta")
    weight, hidden = weight.bfloat16(), hidden.bfloat16()
    columns = _Columns.of(hidden, weight, vocab, 1.0, dist.group.WORLD)
    return columns.width, -(-columns.real // columns.width)


@pytest.mark.parametrize(
    ("tokens", "wanted"), [(100, (151936, 1)), (4096, (50688, 3)), (32768, (8064, 19))]
)
def test_chunks_are_few_and_even(tokens: int, wanted: tuple[int, int], ranks: Ranks) -> None:
    found = ranks.run(1, column_chunks, tokens=tokens, rows=152064, vocab=151936)[0]
    assert found == wanted
    assert found[0] * tokens * 2 <= 512 * 2**20


def finite_differences(drawn: Any, chunk_bytes: int) -> bool:
    import torch.distributed as dist

    from mrl.workers.megatron import fused_head

    fused_head.CHUNK_BYTES = chunk_bytes

    def function(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return fused_head.linear_log_probs(
            hidden, weight, drawn["targets"], drawn["vocab"], TEMPERATURE, dist.group.WORLD
        )

    pair = (drawn["hidden"].double().requires_grad_(), drawn["weight"].double().requires_grad_())
    return torch.autograd.gradcheck(function, pair)


@pytest.mark.parametrize("chunk_bytes", [WHOLE, 8 * 4 * 3])
def test_gradients_are_finite_differences(chunk_bytes: int, ranks: Ranks) -> None:
    drawn = inputs(tokens=4, hidden=3, vocab=7, padded=8)
    drawn["weight"][7:] /= 100
    assert ranks.run(1, finite_differences, drawn=drawn, chunk_bytes=chunk_bytes) == [True]


@pytest.mark.parametrize("world", slow_but((4,), [1, 2, 4]))
def test_padding_takes_no_probability(world: int, ranks: Ranks) -> None:
    weight = torch.full((8, 1), 9.0)
    weight[:5] = 1.0
    log_probs, entropies, by_hidden, by_weight = on_ranks(
        ranks, world, hidden=torch.ones(1, 1), weight=weight, targets=torch.tensor([4]),
        weights=torch.tensor([[1.0], [0.0]]), vocab=5, temperature=1.0,
    )  # fmt: skip
    assert log_probs.item() == pytest.approx(-1.60944, abs=1e-5)
    assert entropies.item() == pytest.approx(math.log(5), abs=1e-6)
    assert by_hidden.item() == pytest.approx(0.0, abs=1e-6)
    assert by_weight[:, 0].tolist() == pytest.approx([-0.2] * 4 + [0.8] + [0.0] * 3)


def test_extreme_logits_stay_finite(ranks: Ranks) -> None:
    weight = torch.tensor([[1e4, -3e4], [-1e4, -3e4], [0.0, -3e4], [3e4, -3e4]])
    log_probs, entropies, *gradients = on_ranks(
        ranks, 2, 8, hidden=torch.eye(2), weight=weight, targets=torch.tensor([3, 0]),
        weights=torch.ones(2, 2), vocab=4, temperature=0.5,
    )  # fmt: skip
    assert log_probs.tolist() == pytest.approx([0.0, -math.log(4)])
    assert entropies.tolist() == pytest.approx([0.0, math.log(4)])
    assert all(gradient.isfinite().all() for gradient in gradients)


@pytest.mark.parametrize("world", [1, 2])
def test_no_predicted_tokens_give_no_gradient(world: int, ranks: Ranks) -> None:
    log_probs, entropies, by_hidden, by_weight = on_ranks(ranks, world, **inputs(tokens=0))
    assert log_probs.shape == entropies.shape == (0,)
    assert by_hidden.shape == (0, 8) and by_weight.shape == (PADDED, 8)
    assert not by_weight.any()


def top(
    hidden: Tensor, weight: Tensor, k: int, vocab: int, chunk_bytes: int
) -> tuple[Tensor, Tensor]:
    import torch.distributed as dist

    from mrl.workers.megatron import fused_head

    fused_head.CHUNK_BYTES = chunk_bytes
    mine = weight.chunk(dist.get_world_size())[dist.get_rank()]
    return fused_head.top_log_probs(hidden, mine, k, vocab, TEMPERATURE, dist.group.WORLD)


@pytest.mark.parametrize(("world", "k"), [(1, 3), (2, 3), (2, VOCAB)])  # rank 1 has 5 columns
def test_top_log_probs_are_those_of_all_columns(world: int, k: int, ranks: Ranks) -> None:
    drawn = inputs()
    hidden, weight = drawn["hidden"], drawn["weight"]
    wanted = (hidden @ weight[:VOCAB].t() / TEMPERATURE).log_softmax(1).topk(k)
    for values, ids in ranks.run(
        world, top, hidden=hidden, weight=weight, k=k, vocab=VOCAB, chunk_bytes=120
    ):
        assert_close(values, wanted.values, "top log-probs")
        assert torch.equal(ids, wanted.indices)


def test_top_of_more_tokens_than_there_are_is_refused(ranks: Ranks) -> None:
    drawn = inputs()
    with pytest.raises(Exception, match=r"ValueError: top 22 of 21 tokens: expected 1 to 21"):
        ranks.run(
            1, top, hidden=drawn["hidden"], weight=drawn["weight"], k=22, vocab=VOCAB,
            chunk_bytes=WHOLE,
        )  # fmt: skip


@pytest.mark.parametrize(
    ("model", "world", "where"),
    [
        pytest.param("qwen2", 1, layout(use_fused_kernels=False), marks=pytest.mark.slow),
        ("llama", 2, layout(tp=2, use_fused_kernels=False)),
    ],
)
def test_all_logits_at_once_compute_the_same(
    model: str,
    world: int,
    where: MegatronConfig,
    ranks: Ranks,
    alone: Alone,
    request: pytest.FixtureRequest,
    tmp_path: Path,
) -> None:
    path = request.getfixturevalue(model)
    expected = alone(path)  # by the fused head, without the other's layout
    spec = both(path, where)
    with ranks.job(world, spec) as pool:
        assert_same_round(work(pool, spec, tmp_path, TWO_ROWS, expected), expected)


def is_in_the_buffer(host: WorkerHost) -> bool:
    """Say whether the head put its weight's gradient where Megatron gathers it."""
    chunk = host._roles["actor"].engine.chunks[-1]
    tied = chunk.share_embeddings_and_output_weights
    weight = chunk.shared_embedding_or_output_weight() if tied else chunk.output_layer.weight
    return weight.grad_added_to_main_grad and weight.grad is None


@pytest.mark.parametrize("model", ["qwen2", "llama"])
def test_the_weights_gradient_goes_straight_to_megatrons_buffer(
    model: str, ranks: Ranks, request: pytest.FixtureRequest
) -> None:
    spec = job(role(request.getfixturevalue(model)))
    with ranks.job(1, spec) as pool:
        actor, rows = group(pool, spec.actor), sequences()
        actor.update(policy_batch(rows, actor.log_probs(rows)[0]))
        assert pool.each(is_in_the_buffer) == [True]


def compare_kernels() -> None:
    """Compare the Triton kernels, run by Triton's interpreter, with torch."""
    from mrl.workers.megatron import fused_head

    # asked for before Triton is imported; this rank may have imported it
    os.environ["TRITON_INTERPRET"] = "1"
    for name in list(sys.modules):
        if name.startswith("triton") and not name.startswith("triton._C"):
            del sys.modules[name]
    from mrl.workers.megatron import head_kernels

    torch.manual_seed(0)
    head_kernels._BLOCK = 16  # several blocks a row
    for dtype, limit in ((torch.float32, 1e-5), (torch.bfloat16, 1e-2)):
        tokens, width = 5, 53
        logits = (6 * torch.randn(tokens, 64)).to(dtype)
        targets = torch.tensor([0, 52, 60, -3, 17])
        ours, plain = (fused_head.new_statistics(logits) for _ in range(2))
        for start, end in ((0, width), (width, 64)):
            part = logits[:, start:end]
            head_kernels.update_statistics(ours, part, targets - start, TEMPERATURE)
            fused_head.update_statistics(plain, part, targets - start, TEMPERATURE)
        assert_close(ours, plain, f"statistics of {dtype}")
        peak, total, weighted, _ = plain
        rows = torch.stack((peak, total.log(), total.log() - weighted / total))
        rows = torch.cat((rows, torch.randn(2, tokens)))
        found, wanted = logits[:, :width], logits.clone()[:, :width]
        head_kernels.logits_to_gradients(found, targets, rows, TEMPERATURE)
        fused_head.logits_to_gradients(wanted, targets, rows, TEMPERATURE)
        assert_close(found.float(), wanted.float(), f"gradients of {dtype}", limit)


def test_the_kernels_compute_what_torch_does(ranks: Ranks) -> None:
    ranks.run(1, compare_kernels)
