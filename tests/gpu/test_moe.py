"""Experts through Transformer Engine on one GPU: run with `python -m pytest -m gpu tests/gpu`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

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
BALANCED = {
    "moe_router_load_balancing_type": "seq_aux_loss",
    "moe_aux_loss_coeff": 0.01,
    "moe_z_loss_coeff": 0.001,
}
REFERENCE = MegatronConfig(transformer_impl="local", dtype="float32", **BALANCED)
GROUPED = MegatronConfig(transformer_impl="transformer_engine", **BALANCED)
ONE_BY_ONE = replace(GROUPED, moe_grouped_gemm=False)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> dist.TCPStore:
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Write experts with sizes that Transformer Engine's kernels take."""
    return write_model(
        tmp_path / "model", "qwen3_moe", hidden_size=256, num_attention_heads=4, head_dim=64,
        num_key_value_heads=2, intermediate_size=512, moe_intermediate_size=128, num_experts=8,
        max_position_embeddings=256, initializer_range=0.05,
    )  # fmt: skip


@contextmanager
def actor(store: dist.TCPStore, path: Path, layout: MegatronConfig, name: str) -> Iterator[Any]:
    role = RoleSpec(
        name="actor", path=str(path), head="lm", layout=layout, optim=OptimConfig(lr=1e-4),
        total_steps=9, temperature=1.0, trust_remote_code=False, router_replay="R2",
    )  # fmt: skip
    loss = PolicyLossSpec(0.2, 0.2, 3.0, 0.0, 0.0, "k3")
    spec = JobSpec(role, loss, None, 0.5, None, None, "cuda", 1, 1, 60.0)
    host = WorkerHost(spec, dist.PrefixStore(name, store))
    try:
        yield lambda method, *args: host.call("actor", method, args)
    finally:
        host.close()


def random_sequences() -> Sequences:
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(2, 50, (length,), generator=generator) for length in LENGTHS]
    return Sequences(Ragged.from_rows(rows), torch.tensor(RESPONSES))


def policy_batch(rows: Sequences, old: Ragged, routing: Ragged) -> PolicyBatch:
    noise = torch.randn(len(old.values), generator=torch.Generator().manual_seed(1))
    weights = torch.full_like(old.values, 1 / len(old.values))
    return PolicyBatch(rows, old, old.with_values(noise), old.with_values(weights), None, routing)


def numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    names = ("actor/grad_norm", "actor/moe_aux_loss", "actor/moe_z_loss")
    return {name: metrics[name].value for name in names}


@pytest.mark.parametrize("layout", [GROUPED, ONE_BY_ONE], ids=["grouped", "one-by-one"])
def test_bfloat16_experts_follow_float32_ones_that_chose_alike(
    layout: MegatronConfig, store: dist.TCPStore, model: Path
) -> None:
    rows = random_sequences()
    with actor(store, model, REFERENCE, "reference") as call:
        old, _, routing = call("log_probs", rows, IN_PAIRS)
        batch = policy_batch(rows, old, routing)
        wanted = numbers(call("update", batch, IN_PAIRS))
    with actor(store, model, layout, "engine") as call:
        found = call("log_probs", rows, IN_PAIRS, routing)[0]
        _, _, free = call("log_probs", rows, IN_PAIRS)
        metrics = numbers(call("update", batch, IN_PAIRS))
    assert (found.values - old.values).abs().mean() < 0.02
    assert metrics == pytest.approx(wanted, rel=0.05)
    alike = free.values.sort(-1).values == routing.values.sort(-1).values
    assert alike.float().mean() > 0.95


def test_replay_makes_the_first_ratio_exact(store: dist.TCPStore, model: Path) -> None:
    rows = random_sequences()
    with actor(store, model, GROUPED, "engine") as call:
        old, _, routing = call("log_probs", rows, IN_PAIRS)
        metrics = call("update", policy_batch(rows, old, routing), IN_PAIRS)
    kl = metrics["actor/ppo_kl"]
    assert kl.total / kl.weight == pytest.approx(0, abs=1e-6)


def test_grouped_experts_are_written_as_they_were_read(
    store: dist.TCPStore, model: Path, tmp_path: Path
) -> None:
    with actor(store, model, GROUPED, "engine") as call:
        call("save", tmp_path)
    written = load_file(tmp_path / "huggingface" / "model.safetensors")
    source = load_file(model / "model.safetensors")
    assert written.keys() == source.keys()
    for name, tensor in source.items():
        assert torch.equal(written[name], tensor.bfloat16()), name
