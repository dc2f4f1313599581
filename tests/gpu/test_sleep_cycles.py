"""An engine that sleeps and wakes gives its memory back every time, and says when it has none.

Run with `python -m pytest -m gpu tests/gpu`.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mrl.config.schema import MegatronConfig
from mrl.workers.group import WorkerError
from tests.gpu.test_weight_sync import running

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]
CYCLES = 20


def test_memory_after_sleep_is_flat_over_twenty_cycles(tmp_path: Path) -> None:
    """Sleep, train, weights, cache: what is in use after a sleep never grows."""
    in_use = []
    with running(tmp_path, MegatronConfig()) as hands:
        for cycle in range(1, CYCLES + 1):
            groups = hands.generate(seed=cycle)
            in_use += hands.rollout.sleep()
            if cycle <= 2:  # training has made all that it ever makes
                hands.step(groups)
            hands.rollout.sync(cycle)
    later = in_use[2:]
    assert max(later) <= 1.05 * min(later)
    assert later[-1] <= later[0] + 64 * 1024**2


def test_an_engine_that_finds_no_memory_names_its_share_and_what_is_free(tmp_path: Path) -> None:
    with running(tmp_path, MegatronConfig()) as hands:
        hands.generate()
        hands.rollout.sleep()
        free, _ = torch.cuda.mem_get_info()
        taken = torch.empty(int(0.97 * free), dtype=torch.uint8, device="cuda")
        with pytest.raises(
            WorkerError, match=r"no memory for its (weights|cache).* of .* GiB"
        ) as e:
            hands.rollout.sync(1)
        assert "rollout.gpu_memory_utilization=0.2: lower it" in str(e.value)
        del taken
