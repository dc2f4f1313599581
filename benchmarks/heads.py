"""How fast is the language-model head, and what memory does it take, fused and plain?

One GPU, bfloat16, random weights, one rank's part of the vocabulary, without messages. Forward is
one matrix product (2 M h V FLOPs), backward two; the fused head computes its logits again. TFLOP/s
count three products for both, so that they compare.
Saves after every case: python -m benchmarks.heads --name heads_h200 [--smoke]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks import record
from mrl.workers.megatron import fused_head
from mrl.workers.megatron.heads import full_log_probs

NAME = "heads"
Head = Callable[..., tuple[Tensor, Tensor]]
HEADS: dict[str, Head] = {"fused": fused_head.linear_log_probs, "plain": full_log_probs}


@dataclass(frozen=True, slots=True)
class Shape:
    """The output weight of one rank."""

    name: str
    hidden: int
    rows: int


SHAPES = (
    Shape("1.5B", 1536, 151936),
    Shape("7B", 3584, 152064),
    Shape("7B tp2", 3584, 76032),
    Shape("7B tp8", 3584, 19008),
)
TOKENS = (4096, 16384, 32768)
SMOKE = (Shape("tiny", 64, 1024),)


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _milliseconds(work: Callable[[], Any]) -> tuple[float, Any]:
    _synchronize()
    start = time.perf_counter()
    answer = work()
    _synchronize()
    return 1e3 * (time.perf_counter() - start), answer


def measure(head: Head, shape: Shape, tokens: int, device: str, repeats: int) -> dict[str, float]:
    """Time a head: the best of some forward and backward passes, and their peak memory.

    The weight has a gradient buffer like Megatron's, which its gradient is added to.
    """
    group = dist.group.WORLD
    hidden = torch.randn(tokens, shape.hidden, device=device).bfloat16().requires_grad_()
    weight: Any = (0.02 * torch.randn(shape.rows, shape.hidden, device=device)).bfloat16()
    weight.requires_grad_()
    weight.main_grad = torch.zeros(weight.shape, device=device)
    weight.grad_added_to_main_grad = False
    targets = torch.randint(0, shape.rows, (tokens,), device=device)
    scale = torch.randn(2, tokens, device=device)

    def forward() -> Tensor:
        log_probs, entropies = head(hidden, weight, targets, shape.rows, 1.0, group)
        return log_probs @ scale[0] + entropies @ scale[1]

    def backward(loss: Tensor) -> None:
        loss.backward()
        if not weight.grad_added_to_main_grad:
            weight.main_grad.add_(weight.grad)
        weight.grad = hidden.grad = None

    before = torch.cuda.memory_allocated() if device == "cuda" else 0
    times = []
    for step in range(repeats + 1):
        if step == 1 and device == "cuda":  # the first one compiles
            torch.cuda.reset_peak_memory_stats()
        weight.grad_added_to_main_grad = False
        forth, loss = _milliseconds(forward)
        back, _ = _milliseconds(partial(backward, loss))
        times.append((forth, back))
    forth, back = (min(column) for column in zip(*times[1:], strict=True))
    peak = torch.cuda.max_memory_allocated() - before if device == "cuda" else 0
    product = 2 * tokens * shape.hidden * shape.rows
    return {
        "forward_ms": forth,
        "backward_ms": back,
        "peak_mb": peak / 1e6,
        "forward_tflops": product / forth / 1e9,
        "tflops": 3 * product / (forth + back) / 1e9,
    }


def measure_kernels(shape: Shape, tokens: int, repeats: int) -> dict[str, float]:
    """Time the two kernels alone on a chunk of logits."""
    from mrl.workers.megatron import head_kernels

    width = min(fused_head.CHUNK_BYTES // (2 * tokens) // 128 * 128, shape.rows)
    logits = torch.randn(tokens, width, device="cuda").bfloat16()
    statistics = fused_head.new_statistics(logits)
    rows = torch.zeros(5, tokens, device="cuda")
    targets = torch.randint(0, width, (tokens,), device="cuda")
    works = {
        "statistics": (
            lambda: head_kernels.update_statistics(statistics, logits, targets, 1.0),
            logits.nbytes,
        ),
        "gradients": (
            lambda: head_kernels.logits_to_gradients(logits, targets, rows, 1.0),
            2 * logits.nbytes,
        ),
    }
    answers: dict[str, float] = {"columns": width}
    for name, (work, moved) in works.items():
        best = min(_milliseconds(work)[0] for _ in range(repeats + 1))
        answers |= {f"{name}_ms": best, f"{name}_tb_s": moved / best / 1e9}
    return answers


def main() -> None:
    """Measure every shape and length; save after each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--name", default=NAME)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, on the CPU without a GPU")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not args.smoke:
        raise SystemExit("the heads are measured on a GPU; --smoke runs tiny ones anywhere")
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    cases: list[dict[str, Any]] = []
    for shape in SMOKE if args.smoke else SHAPES:
        for tokens in (64,) if args.smoke else TOKENS:
            case: dict[str, Any] = {**asdict(shape), "tokens": tokens}
            case["logits_mb"] = 2 * tokens * shape.rows / 1e6
            for name, head in HEADS.items():
                try:
                    case[name] = measure(head, shape, tokens, device, args.repeats)
                except torch.OutOfMemoryError:
                    case[name] = None  # does not fit
                if device == "cuda":
                    torch.cuda.empty_cache()
            if device == "cuda":
                case["kernels"] = measure_kernels(shape, tokens, args.repeats)
            cases.append(case)
            print(case, flush=True)
            record.write(args.name, {"chunk_bytes": fused_head.CHUNK_BYTES, "cases": cases})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
