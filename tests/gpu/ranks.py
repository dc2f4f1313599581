"""Ranks for tests of layouts, and bounds on what 16 bits do to a layout's numbers.

Each rank has a GPU, or all share the first one. Without a GPU the same steps run on the CPU, on
the local layers in float32: everything but the kernels.
"""

from __future__ import annotations

import hashlib
import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks import ranks
from benchmarks.jobs import check_shared_device
from mrl.algorithms.reductions import reduced
from mrl.config.schema import MegatronConfig
from mrl.types import Batching, PolicyBatch, Ragged, Sequences
from mrl.workers.host import WorkerHost
from mrl.workers.specs import JobSpec, PolicyLossSpec, RoleSpec
from mrl.workers.wire import receive, serve
from tests.models import write_model
from tests.workers import jobs

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
REFERENCE = MegatronConfig(transformer_impl="local", dtype="float32")
YARDSTICK = replace(REFERENCE, dtype="bfloat16")
TESTED = replace(YARDSTICK, transformer_impl="transformer_engine") if ON_GPU else REFERENCE
LENGTHS = (2, 3, 7, 133, 40)
RESPONSES = (1, 2, 6, 100, 39)
SOME_ROWS = Batching(micro_batch_size=3)
LIMIT_S = 120.0
STEPS, SEED = 8, 8
# A layout rounds what one rank rounds, in another order: at most twice its error. The largest of
# few differences scatters more than their mean.
TIMES, TIMES_LARGEST = 2.0, 3.0
LEAST_NORM_ERROR = 2.0**-7  # two roundings to 8 bits


class Ranks(ranks.BenchmarkPool):
    """Ranks that take one job after another, with weights from files, and run functions."""

    module = "tests.gpu.ranks"

    def each(self, function: Callable[..., Any], **kwargs: Any) -> list[Any]:
        """Run a module-level function on every rank; it is given the host first."""
        return self.ask("run", f"{function.__module__}:{function.__qualname__}", kwargs)


class OneDeviceRanks(Ranks):
    """Ranks that share the first GPU."""

    arguments = (ranks.ONE_DEVICE,)


class Pools:
    """A pool at a time."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._count = folder, 0
        self._key: tuple[int, bool] | None = None
        self._pool: Ranks | None = None

    def open(self, world: int, spec: JobSpec) -> Ranks:
        """Run a job on `world` ranks in place of the last one."""
        key = (world, spec.deterministic)
        if self._pool is None or self._key != key:
            self.close()
            self._count += 1
            shared = ON_GPU and world > torch.cuda.device_count()
            make = OneDeviceRanks if shared else Ranks
            self._pool = make(world, spec, self._folder / f"ranks_{self._count}")
            self._key = key
            if shared:
                check_shared_device(self._pool, DEVICE)
        self._pool.open(spec)
        return self._pool

    def forget(self) -> None:
        """End ranks that a failure has left unusable."""
        if self._pool is not None and self._pool._failed.is_set():
            self.close()

    def close(self) -> None:
        """End the ranks."""
        if self._pool is not None:
            self._pool.close()
        self._pool = self._key = None


class _Server(ranks.RankServer):
    def call(self, role: str, method: str, args: tuple[Any, ...]) -> Any:
        if role != "run":
            return super().call(role, method, args)
        module, _, name = method.partition(":")
        return getattr(importlib.import_module(module), name)(self.host, **args[0])


def _work(connection: Any, store: dist.Store) -> None:
    receive(connection)  # the spec that the pool was made with
    server = _Server(store)
    serve(connection, server.call)
    server.close()


def write_wide(folder: Path) -> Path:
    """Write a model with heads of 64, four of them to a key/value head."""
    write_model(
        folder, "qwen2", hidden_size=512, num_attention_heads=8, num_key_value_heads=2,
        intermediate_size=1024, max_position_embeddings=256, initializer_range=0.05,
    )  # fmt: skip
    round_file(folder / "model.safetensors")
    return folder


def round_file(path: Path, scale: float = 1.0) -> None:
    """Round what a file holds, scaled, to bfloat16: all dtypes compute with the same weights."""
    given = load_file(path).items()
    tensors = {name: (scale * tensor).bfloat16().float() for name, tensor in given}
    save_file(tensors, path, {"format": "pt"})


def job(actor: RoleSpec, deterministic: bool = False) -> JobSpec:
    """Give a job of an actor."""
    spec = replace(jobs.job(actor), policy_loss=PolicyLossSpec(0.2, 0.2, 3.0, 0.0, 0.0, "k3"))
    return replace(spec, device=DEVICE, timeout_s=LIMIT_S, deterministic=deterministic)


@dataclass(frozen=True)
class Outcome:
    """What one layout made of the batch."""

    log_probs: Ragged
    grad_norms: tuple[float, ...]
    bases: tuple[Ragged, ...]  # the policies around which each step was taken


def rows() -> Sequences:
    """Give rows of one token and of many."""
    return jobs.sequences(LENGTHS, RESPONSES)


def train(
    pool: Ranks, spec: JobSpec, like: Outcome | None = None, batching: Batching = SOME_ROWS
) -> Outcome:
    """Score and take optimizer steps around the policies of another outcome (None: its own)."""
    actor = jobs.group(pool, spec.actor, batching)
    scores, norms, bases = [], [], []
    for step in range(STEPS):
        log_probs, *_ = actor.log_probs(rows())
        base = log_probs if like is None else like.bases[step]
        update = actor.update(policy_batch(base, seed=SEED + step))
        scores.append(log_probs)
        norms.append(reduced(update)["actor/grad_norm"])
        bases.append(base)
    return Outcome(scores[0], tuple(norms), tuple(bases))


def policy_batch(base: Ragged, seed: int) -> PolicyBatch:
    """Make a mini-batch so near a policy that rounding moves no token over the clip.

    Advantages have one sign: the gradient is no rest of terms that cancel.
    """
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(2, len(base.values), generator=generator)
    weights = torch.full_like(base.values, 1 / len(base.values))
    return PolicyBatch(
        rows(),
        base.with_values(base.values + 0.03 * noise[0]),
        base.with_values(noise[1].abs()),
        base.with_values(weights),
        None,
    )


@dataclass(frozen=True)
class Errors:
    """How far two outcomes are apart: log-probs, and gradient norms relatively.

    One norm of a few rows scatters by its own error: what is told is the root of the mean square.
    """

    mean: float
    largest: float
    grad_norm: float

    @staticmethod
    def of(found: Outcome, expected: Outcome) -> Errors:
        difference = (found.log_probs.values - expected.log_probs.values).abs()
        norms = torch.tensor([found.grad_norms, expected.grad_norms], dtype=torch.float64)
        off = norms[0] / norms[1] - 1
        return Errors(
            float(difference.mean()), float(difference.max()), float(off.square().mean().sqrt())
        )

    def assert_within(self, yardstick: Errors) -> None:
        """Bound by what bfloat16 alone does on one rank."""
        print(f"\nerrors {self}\nbfloat16 on one rank {yardstick}")
        assert self.mean <= TIMES * yardstick.mean
        assert self.largest <= TIMES_LARGEST * yardstick.largest
        assert self.grad_norm <= TIMES * max(yardstick.grad_norm, LEAST_NORM_ERROR)


def fingerprints(host: WorkerHost) -> dict[str, str]:
    """Give a digest of every parameter of the actor's that is no adapter's."""
    from mrl.workers.megatron.offload import READ

    engine = host._roles["actor"].engine
    engine.memory.enter(READ)
    return {
        name: hashlib.sha256(bytes_of(param.detach())).hexdigest()
        for name, param in engine.weights.params().items()
    }


def bytes_of(tensor: Tensor) -> bytes:
    """Give a tensor's bytes."""
    # a copy: memory that numpy has seen can no longer be given back
    return tensor.to("cpu", copy=True).contiguous().flatten().view(torch.uint8).numpy().tobytes()


if __name__ == "__main__":
    ranks.main(sys.argv[1:], _work)
