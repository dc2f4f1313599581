"""Memory of the engine on one GPU: run with `python -m pytest -m gpu -s tests/gpu`."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from mrl.config.schema import MegatronConfig, OptimConfig
from mrl.types import PolicyBatch, Ragged, Sequences
from mrl.workers.host import WorkerHost
from mrl.workers.specs import JobSpec, PolicyLossSpec, RoleSpec
from tests.models import write_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]
LENGTHS = (9, 40, 133, 7, 64)
RESPONSES = (3, 30, 100, 1, 63)
IN_PAIRS = ((0, 1), (2, 3), (4,))
MB = 2**20
ALL_AWAY = MegatronConfig(param_offload=True, grad_offload=True, optimizer_offload=True)
PRECISE = OptimConfig(
    lr=1e-4,
    use_precision_aware_optimizer=True,
    main_grads_dtype="bf16",
    exp_avg_dtype="bf16",
    exp_avg_sq_dtype="bf16",
)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> dist.TCPStore:
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write 0.2B parameters, with heads of 64."""
    return write_model(
        tmp_path_factory.mktemp("model"), "qwen2", hidden_size=2048, num_attention_heads=32,
        num_key_value_heads=8, intermediate_size=5632, max_position_embeddings=256,
        initializer_range=0.02,
    )  # fmt: skip


@contextmanager
def host(
    store: dist.Store,
    name: str,
    path: Path,
    layout: MegatronConfig,
    optim: OptimConfig | None = None,
) -> Iterator[WorkerHost]:
    """Give an actor and a reference of one layout."""
    actor = RoleSpec(
        name="actor", path=str(path), head="lm", layout=layout,
        optim=optim or OptimConfig(lr=1e-4), total_steps=30, temperature=1.0,
        trust_remote_code=False,
    )  # fmt: skip
    ref = replace(actor, name="ref", optim=None)
    loss = PolicyLossSpec(0.2, 0.2, 3.0, 0.0, 0.0, "k3")
    spec = JobSpec(actor, loss, None, 0.5, ref, None, "cuda", 1, 1, 60.0)
    worker = WorkerHost(spec, dist.PrefixStore(name, store))
    try:
        yield worker
    finally:
        worker.close()
        del worker
        gc.collect()
        torch.cuda.empty_cache()


def batch() -> PolicyBatch:
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(2, 50, (length,), generator=generator) for length in LENGTHS]
    sequences = Sequences(Ragged.from_rows(rows), torch.tensor(RESPONSES))
    noise = torch.randn(sum(RESPONSES), generator=generator)
    old = Ragged(torch.full_like(noise, -4.0), sequences.response_lengths)
    weights = torch.full_like(noise, 1 / len(noise))
    return PolicyBatch(sequences, old, old.with_values(noise), old.with_values(weights), None)


def step(worker: WorkerHost, part: PolicyBatch) -> Sequence[float]:
    """Score with both roles and update the actor twice; give what came out."""
    scored, *_ = worker.call("actor", "log_probs", (part.sequences, IN_PAIRS))
    wanted = worker.call("ref", "log_probs", (part.sequences, IN_PAIRS))
    norms = [
        worker.call("actor", "update", (part, IN_PAIRS))["actor/grad_norm"].value for _ in range(2)
    ]
    return [float(scored.values.sum()), float(wanted.values.sum()), *norms]


def in_use(worker: WorkerHost) -> tuple[int, int, int]:
    """Give bytes allocated and reserved on the device, and pinned on the host."""
    torch.cuda.synchronize()
    pinned = sum(part.host_bytes for part in worker._memories.values())
    return torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), pinned


def test_ten_steps_with_offload_do_not_grow(store: dist.TCPStore, model: Path) -> None:
    part = batch()
    gc.collect()
    others = torch.cuda.memory_allocated()
    with host(store, "grow", model, ALL_AWAY) as worker:
        seen, peaks = [], []
        for _ in range(10):
            torch.cuda.reset_peak_memory_stats()
            step(worker, part)
            peaks.append(torch.cuda.max_memory_allocated())
            worker._make_room("rollout")  # as before the engine generates
            seen.append(in_use(worker))
        print("allocated, reserved, pinned [MB]:", [[n // MB for n in row] for row in seen])
        print("peaks [MB]:", [peak // MB for peak in peaks])
        allocated, reserved, pinned = zip(*seen, strict=True)
        assert max(allocated[2:]) <= allocated[1] + MB
        assert max(reserved[2:]) <= reserved[1] + 32 * MB
        assert len(set(pinned[1:])) == 1
        assert max(peaks[2:]) <= peaks[1] + 32 * MB
        assert allocated[-1] < others + 200 * MB  # roles are away


def held(worker: WorkerHost) -> list[torch.Tensor]:
    """Copy the actor's parameters and optimizer state to the host, bit for bit."""
    engine = worker._roles["actor"].engine
    params = [param for chunk in engine.chunks for param in chunk.parameters()]
    return [tensor.detach().cpu() for tensor in (*params, *engine.trainer.state())]


def test_what_was_away_is_back_bit_for_bit(store: dist.TCPStore, model: Path) -> None:
    from mrl.workers.megatron.offload import TRAIN

    with host(store, "bits", model, ALL_AWAY) as worker:
        step(worker, batch())
        role, before = worker._memories["actor"], held(worker)
        for _ in range(2):
            role.give_back()
            occupied = torch.full((2**28,), -1.0, device="cuda")  # where the storages were
            role.enter(TRAIN)
            del occupied
            assert all(map(torch.equal, held(worker), before))


def test_steps_with_offload_are_those_without(store: dist.TCPStore, model: Path) -> None:
    part, found = batch(), {}
    for name, layout in (("kept", MegatronConfig()), ("away", ALL_AWAY)):
        with host(store, name, model, layout) as worker:
            found[name] = [number for _ in range(3) for number in step(worker, part)]
    assert found["away"] == pytest.approx(found["kept"], rel=2e-3)  # kernels are not exact


def test_time_of_offload(store: dist.TCPStore, model: Path) -> None:
    from mrl.workers.megatron.offload import TRAIN

    with host(store, "time", model, ALL_AWAY) as worker:
        step(worker, batch())
        role = worker._memories["actor"]
        role.give_back()
        for _ in range(4):
            times = []
            for move in (lambda: role.enter(TRAIN), role.give_back):
                torch.cuda.synchronize()
                start = time.perf_counter()
                move()
                torch.cuda.synchronize()
                times.append(time.perf_counter() - start)
            gb = role.host_bytes / 1e9
            print(f"{gb:.2f} GB: in {times[0]:.3f} s, out {times[1]:.3f} s")


@pytest.mark.parametrize("layout", [MegatronConfig(), ALL_AWAY], ids=["kept", "away"])
def test_a_precision_aware_optimizer_trains_and_resumes(
    store: dist.TCPStore, model: Path, tmp_path: Path, layout: MegatronConfig
) -> None:
    pytest.importorskip("transformer_engine")
    part = batch()
    with host(store, "straight", model, layout, PRECISE) as worker:
        first = step(worker, part)
        saved = held(worker)
        worker.call("actor", "save", (tmp_path,))
        straight = step(worker, part)
        (inner,) = worker._roles["actor"].engine.trainer.inner_optimizers
        kinds = {
            (name, value.dtype) for entry in inner.state.values() for name, value in entry.items()
        }
    assert {("exp_avg", torch.bfloat16), ("exp_avg_sq", torch.bfloat16)} <= kinds
    assert ("master_param", torch.int16) in kinds  # what bfloat16 parameters lack of float32
    with host(store, "resumed", model, layout, PRECISE) as worker:
        worker.call("actor", "load", (tmp_path,))
        assert all(map(torch.equal, held(worker), saved))
        assert step(worker, part) == pytest.approx(straight, rel=2e-3)
    assert straight[0] != first[0]
    with host(store, "usual", model, layout) as worker:
        usual = step(worker, part)
    assert first == pytest.approx(usual, rel=0.03)


def test_recompute_and_fused_accumulation_change_little(store: dist.TCPStore, model: Path) -> None:
    part, found, peaks = batch(), {}, {}
    layouts = {
        "plain": MegatronConfig(gradient_accumulation_fusion=False),
        "fused": MegatronConfig(),
        "full": MegatronConfig(recompute_granularity="full"),
        "mlp": MegatronConfig(recompute_granularity="selective", recompute_modules=("mlp",)),
    }
    for name, layout in layouts.items():
        torch.cuda.reset_peak_memory_stats()
        # A rate of 0: Adam would turn rounding of small gradients into whole steps apart.
        with host(store, name, model, layout, OptimConfig(lr=0.0)) as worker:
            found[name] = [*step(worker, part), *step(worker, part)]
            peaks[name] = torch.cuda.max_memory_allocated() // MB
    print("peaks [MB]:", peaks)
    for name, numbers in found.items():
        assert numbers == pytest.approx(found["plain"], rel=0.02), name
