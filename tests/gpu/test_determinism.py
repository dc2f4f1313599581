"""Training on one GPU gives the same bits twice: run with `python -m pytest -m gpu tests/gpu`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mrl.workers.spmd import rank_environment
from tests.models import write_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]
# What cuBLAS and Transformer Engine are told is read once in a process: each run is one of its own.
RUN = """
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from dataclasses import replace

from mrl.check_layout.batch import Targets, make_rows, policy_batch, random_prompts
from mrl.config.schema import OptimConfig
from mrl.types import Batching
from mrl.workers.host import WorkerHost
from tests.gpu.test_engine import job

folder, impl, deterministic, out = sys.argv[1:]
spec = job(Path(folder), impl)
actor = replace(spec.actor, optim=OptimConfig(lr=1e-3), total_steps=9)
spec = replace(spec, actor=actor, deterministic=deterministic == "true")
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
host = WorkerHost(spec, store)
rows = make_rows(random_prompts(16, 32, range(2, 50), 7), 200, range(2, 50), 7)
cuts = (tuple(range(8)), tuple(range(8, 16)))
found = []
for _ in range(4):
    log_probs, entropies, *_ = host.call("actor", "log_probs", (rows, cuts))
    metrics = host.call("actor", "update", (policy_batch(rows, log_probs, Targets()), cuts))
    found.append((log_probs.values, entropies.values, metrics["actor/grad_norm"].value))
host.close()
torch.save(found, out)
"""


def run(folder: Path, impl: str, deterministic: bool, out: Path) -> list[tuple[object, ...]]:
    environment = rank_environment(0, 0, 1, 1, "cuda", {}, deterministic)
    subprocess.run(
        [sys.executable, "-c", RUN, str(folder), impl, str(deterministic).lower(), str(out)],
        env={**os.environ, **environment, "PYTHONPATH": os.pathsep.join(["", *sys.path])},
        check=True,
        timeout=300,
    )
    return torch.load(out)  # type: ignore[no-any-return]


@pytest.mark.parametrize("impl", ["local", "transformer_engine"])
@pytest.mark.parametrize("kind", ["qwen2", "qwen3_moe"])
def test_two_runs_are_the_same_bit_for_bit(impl: str, kind: str, tmp_path: Path) -> None:
    folder = write_model(
        tmp_path / "model", kind, hidden_size=256, num_attention_heads=4, num_key_value_heads=2,
        head_dim=64, intermediate_size=512, max_position_embeddings=256, initializer_range=0.05,
    )  # fmt: skip
    first, second = (run(folder, impl, True, tmp_path / f"{name}.pt") for name in ("a", "b"))
    for (log_probs, entropies, norm), wanted in zip(first, second, strict=True):
        assert torch.equal(log_probs, wanted[0])  # type: ignore[arg-type]
        assert torch.equal(entropies, wanted[1])  # type: ignore[arg-type]
        assert norm == wanted[2]
    assert first[0][2] != first[-1][2]  # it trains
