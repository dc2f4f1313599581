"""The language-model head on one GPU: run with `python -m pytest -m gpu tests/gpu`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from mrl.workers.megatron import fused_head
from mrl.workers.megatron.heads import full_log_probs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]
TEMPERATURE = 0.7
TOKENS, HIDDEN = 300, 256
# bfloat16 keeps 8 bits: logits below 16 are wrong by at most 1/32, over the temperature, and the
# probabilities in a gradient by as large a part
LOGIT_LIMIT = {torch.float32: 1e-4, torch.bfloat16: 0.1}
GRADIENT_LIMIT = {torch.float32: 1e-4, torch.bfloat16: 0.03}


@pytest.fixture(scope="module")
def world() -> Iterator[dist.ProcessGroup]:
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


def close(found: Tensor, wanted: Tensor, relative: float, absolute: float = 0.0) -> None:
    limit = relative * float(wanted.detach().abs().max()) + absolute
    difference = float((found.detach().double() - wanted.detach().double()).abs().max())
    assert difference <= limit, f"differs by {difference:.3e}, at most {limit:.3e}"


def draw(vocab: int, padded: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    hidden = torch.randn(TOKENS, HIDDEN, device="cuda", dtype=dtype)
    weight = (0.1 * torch.randn(padded, HIDDEN, device="cuda")).to(dtype)
    targets = torch.randint(0, vocab, (TOKENS,), device="cuda")
    return hidden, weight, targets, torch.randn(2, TOKENS, device="cuda")


@pytest.mark.parametrize("chunk_columns", [10**6, 384])
@pytest.mark.parametrize("vocab", [10000, 9993])  # the last chunk's width: even, and odd
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_fused_head_is_float64s(
    dtype: torch.dtype,
    vocab: int,
    chunk_columns: int,
    world: dist.ProcessGroup,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bytes_each = torch.empty(0, dtype=dtype).element_size()
    monkeypatch.setattr(fused_head, "CHUNK_BYTES", chunk_columns * TOKENS * bytes_each)
    hidden, weight, targets, weights = draw(vocab, 10112, dtype)
    answers = []
    for kind in (dtype, torch.float64):
        h, w = (x.to(kind, copy=True).requires_grad_() for x in (hidden, weight))
        columns = fused_head.linear_log_probs(h, w, targets, vocab, TEMPERATURE, world)
        (columns[0] @ weights[0].to(columns[0]) + columns[1] @ weights[1].to(columns[1])).backward()
        assert h.grad is not None and w.grad is not None
        answers.append((*columns, h.grad, w.grad))
    found, wanted = answers
    assert found[0].dtype == torch.float32
    for i in (0, 1):
        close(found[i], wanted[i], 1e-5, LOGIT_LIMIT[dtype])
    for i in (2, 3):
        close(found[i], wanted[i], GRADIENT_LIMIT[dtype])
    assert not found[3][vocab:].any()


def test_the_fused_head_is_the_plain_ones(world: dist.ProcessGroup) -> None:
    hidden, weight, targets, weights = draw(10000, 10112, torch.bfloat16)
    answers = []
    for head in (fused_head.linear_log_probs, full_log_probs):
        h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        columns = head(h, w, targets, 10000, TEMPERATURE, world)
        (columns[0] @ weights[0] + columns[1] @ weights[1]).backward()
        assert h.grad is not None and w.grad is not None
        answers.append((*columns, h.grad, w.grad))
    for found, wanted, limit in zip(*answers, (5e-3, 5e-3, 3e-2, 3e-2), strict=True):
        close(found, wanted, limit)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernels_compute_what_torch_does(dtype: torch.dtype) -> None:
    from mrl.workers.megatron import head_kernels

    torch.manual_seed(0)
    tokens, width, split = 257, 20000, 12800
    logits = (6 * torch.randn(tokens, width, device="cuda")).to(dtype)
    targets = torch.randint(0, width, (tokens,), device="cuda")
    ours, plain = (fused_head.new_statistics(logits) for _ in range(2))
    for start, end in ((0, split), (split, width - 7)):
        part = logits[:, start:end]
        head_kernels.update_statistics(ours, part, targets - start, TEMPERATURE)
        fused_head.update_statistics(plain, part, targets - start, TEMPERATURE)
    for row in range(4):
        close(ours[row], plain[row], 1e-5)
    peak, total, weighted, _ = plain
    rows = torch.stack((peak, total.log(), total.log() - weighted / total))
    rows = torch.cat((rows, torch.randn(2, tokens, device="cuda")))
    found, wanted = logits[:, : width - 7], logits.clone()[:, : width - 7]
    head_kernels.logits_to_gradients(found, targets, rows, TEMPERATURE)
    fused_head.logits_to_gradients(wanted, targets, rows, TEMPERATURE)
    close(found, wanted, 1e-5 if dtype == torch.float32 else 0.01)


def test_the_gradient_is_added_to_megatrons_buffer(world: dist.ProcessGroup) -> None:
    hidden, weight, targets, weights = draw(10000, 10112, torch.bfloat16)
    wanted, ours = (weight.clone().requires_grad_() for _ in range(2))
    ours.main_grad = torch.ones(weight.shape, device="cuda")  # type: ignore[attr-defined]
    ours.grad_added_to_main_grad = False  # type: ignore[attr-defined]
    for w in (wanted, wanted, ours, ours):
        columns = fused_head.linear_log_probs(hidden, w, targets, 10000, TEMPERATURE, world)
        (columns[0] @ weights[0]).backward()
    assert wanted.grad is not None and ours.grad_added_to_main_grad  # type: ignore[attr-defined]
    close(ours.main_grad - 1, wanted.grad, 0.01)  # type: ignore[attr-defined]


def test_the_head_takes_a_tenth_of_its_logits_memory(world: dist.ProcessGroup) -> None:
    tokens, vocab, width = 32768, 151936, 1536
    hidden = torch.randn(tokens, width, device="cuda", dtype=torch.bfloat16).requires_grad_()
    weight = (0.02 * torch.randn(vocab, width, device="cuda")).bfloat16().requires_grad_()
    weight.main_grad = torch.zeros(weight.shape, device="cuda")  # type: ignore[attr-defined]
    weight.grad_added_to_main_grad = False  # type: ignore[attr-defined]
    targets = torch.randint(0, vocab, (tokens,), device="cuda")
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    log_probs, _ = fused_head.linear_log_probs(hidden, weight, targets, vocab, 1.0, world)
    log_probs.sum().backward()
    torch.cuda.synchronize()
    logits = tokens * vocab * 2  # bytes in bfloat16
    assert torch.cuda.max_memory_allocated() - before < logits / 10
