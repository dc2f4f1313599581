"""The Megatron engine on one GPU: run with `python -m pytest -m gpu tests/gpu`."""

from __future__ import annotations

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
TOGETHER = ((0, 1, 2, 3, 4),)
ONE_BY_ONE = ((0,), (1,), (2,), (3,), (4,))
IN_PAIRS = ((0, 1), (2, 3), (4,))


def job(path: Path, impl: str) -> JobSpec:
    role = RoleSpec(
        name="actor",
        path=str(path),
        head="lm",
        layout=MegatronConfig(transformer_impl=impl),
        optim=None,
        total_steps=1,
        temperature=1.0,
        trust_remote_code=False,
    )
    loss = PolicyLossSpec(0.2, 0.2, 3.0, 0.0, 0.0, "k3")
    return JobSpec(role, loss, None, 0.5, None, None, "cuda", 1, 1, 60.0)


def write_wide(folder: Path, kind: str) -> Path:
    """Write a model with heads of 64, which Transformer Engine's fused attention takes."""
    return write_model(
        folder, kind, hidden_size=256, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=512, max_position_embeddings=256, initializer_range=0.05,
    )  # fmt: skip


def random_sequences() -> tuple[list[torch.Tensor], Sequences]:
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(2, 50, (length,), generator=generator) for length in LENGTHS]
    return rows, Sequences(Ragged.from_rows(rows), torch.tensor(RESPONSES))


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> dist.TCPStore:
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.mark.parametrize("impl", ["local", "transformer_engine"])
@pytest.mark.parametrize("kind", ["qwen2", "llama"])
def test_packed_bfloat16_log_probs_follow_transformers_in_float32(
    tmp_path: Path, alone: dist.TCPStore, kind: str, impl: str
) -> None:
    from transformers import AutoModelForCausalLM

    folder = write_wide(tmp_path, kind)
    rows, sequences = random_sequences()
    host = WorkerHost(job(folder, impl), alone)
    try:
        packed = host.call("actor", "log_probs", (sequences, TOGETHER))[0]
        single = host.call("actor", "log_probs", (sequences, ONE_BY_ONE))[0]
    finally:
        host.close()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    expected = []
    for row, count in zip(rows, RESPONSES, strict=True):
        table = model(row[None]).logits[0].log_softmax(-1)
        expected.append(table[:-1].gather(1, row[1:, None])[-count:, 0].detach())
    twin = torch.cat(expected)
    assert (packed.values - twin).abs().mean() < 0.02
    assert (packed.values - single.values).abs().mean() < 0.01


def test_transformer_engine_trains_as_the_local_layers_do(
    tmp_path: Path, alone: dist.TCPStore
) -> None:
    folder = write_wide(tmp_path / "model", "qwen2")
    _, sequences = random_sequences()
    lengths = sequences.response_lengths
    total = int(lengths.sum())
    advantages = Ragged(torch.randn(total, generator=torch.Generator().manual_seed(1)), lengths)
    weights = Ragged(torch.full((total,), 1 / total), lengths)
    norms = {}
    for impl in ("local", "transformer_engine"):
        spec = job(folder, impl)
        spec = replace(spec, actor=replace(spec.actor, optim=OptimConfig(lr=1e-4), total_steps=9))
        host = WorkerHost(spec, dist.PrefixStore(impl, alone))
        try:
            old, *_ = host.call("actor", "log_probs", (sequences, TOGETHER))
            batch = PolicyBatch(sequences, old, advantages, weights, None)
            for step in range(3):
                if step == 1:
                    host.call("actor", "save", (tmp_path / impl,))
                    host.call("actor", "load", (tmp_path / impl,))
                metrics = host.call("actor", "update", (batch, IN_PAIRS))
                norms[impl, step] = metrics["actor/grad_norm"].value
        finally:
            host.close()
    for step in range(3):
        expected = pytest.approx(norms["local", step], rel=0.03)
        assert norms["transformer_engine", step] == expected
