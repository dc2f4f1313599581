"""Whose work the others wait for: what a rank does itself, without its waiting."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from mrl import RayPPOTrainer, load_config, trainer
from mrl.tracking.jsonl import read_metrics
from mrl.workers import busy
from mrl.workers.busy import BusyClock, RankSeconds, Timed, rank_metrics
from mrl.workers.group import Answers
from mrl.workers.host import WorkerHost
from tests.runs import Inputs, Recording, overrides


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(busy.time, "perf_counter", lambda: now[0])
    return now


def test_a_call_is_own_work_until_it_meets_ranks_of_other_rows(clock: list[float]) -> None:
    timed = BusyClock(torch.device("cpu"))

    def wait_for_peers(seconds: float) -> str:
        clock[0] += seconds
        return "reduced"

    meet = timed.until(wait_for_peers)
    timed.start()
    clock[0] += 2
    assert meet(seconds=5.0) == "reduced"
    clock[0] += 1
    assert timed.seconds() == 2
    timed.start()  # a call that meets nobody
    clock[0] += 3
    assert timed.seconds() == 3


def test_answers_take_the_seconds_off_their_values() -> None:
    answers = Answers([4, 7])
    answers.take(4, Timed("a", 1.5))
    answers.take(7, "b")  # a rank that does not tell
    assert answers.result() == ["a", "b"]
    assert answers.seconds == {4: 1.5}


def test_seconds_are_summed_until_they_are_taken() -> None:
    seconds = RankSeconds()
    seconds.add([{0: 1.0}, {1: 2.0}])
    seconds.add([{1: 0.5}])
    assert seconds.take() == {0: 1.0, 1: 2.5}
    assert seconds.take() == {}


def test_one_slow_rank_of_eight_stands_out() -> None:
    seconds = {rank: 3.0 if rank == 5 else 1.0 for rank in range(8)}
    assert rank_metrics("update_actor", seconds) == {
        "perf/rank_seconds/update_actor": 1.25,
        "perf/rank_spread/update_actor": 2.4,
        "perf/slowest_rank/update_actor": 5.0,
    }
    assert rank_metrics("gen", {0: 1.0}) == {}
    assert rank_metrics("gen", {0: 0.0, 1: 0.0})["perf/rank_spread/gen"] == 1.0


def slow_down(host: WorkerHost, slow: int, folder: str) -> None:
    """Make the actor's updates of a rank longer than those of rank 0, whatever those take."""
    engine: Any = host._roles["actor"].engine
    told, meeting, pack = (
        Path(folder) / "told",
        engine.config.finalize_model_grads_func,
        engine._pack,
    )

    def tell(*args: Any, **kwargs: Any) -> Any:
        draft = told.with_suffix(".draft")
        draft.write_text(str(time.perf_counter() - host._busy._begun))
        draft.rename(told)
        return meeting(*args, **kwargs)

    def late(*args: Any) -> Any:
        if torch.is_grad_enabled():  # it is the update's
            while not told.exists():  # until its peer waits at the reduction
                time.sleep(0.01)
            time.sleep(2 * float(told.read_text()))
        return pack(*args)

    if host.rank == slow:
        engine._pack = late
    else:
        engine.config.finalize_model_grads_func = host._busy.until(tell)


def test_a_rank_that_computes_longer_is_named_and_its_waiting_peer_is_not(
    warm_pools: list[Recording], inputs: Inputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups = trainer.roles_on

    def with_a_slow_rank(recording: Any, *args: Any) -> Any:
        recording.pool.each(slow_down, slow=1, folder=str(tmp_path))
        return groups(recording, *args)

    monkeypatch.setattr(trainer, "roles_on", with_a_slow_rank)
    changes = (
        "algorithm={adv_estimator: grpo, use_kl_in_reward: false}",
        "actor={ppo_mini_batch_size: 8, megatron: {tensor_model_parallel_size: 1}}",
        "trainer={critic_warmup: 0, test_freq: -1, val_before_train: false}",
    )
    config = load_config(inputs.config, overrides(tmp_path / "run", *changes))
    RayPPOTrainer(config, AutoTokenizer.from_pretrained(config.model.path)).fit(1)
    (row,) = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert row["perf/slowest_rank/update_actor"] == 1
    # both ranks leave the update together; only one of them worked so long
    assert row["perf/rank_spread/update_actor"] > 1.2
    assert row["perf/imbalance/actor"] < 1.2
