from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from mrl.config.schema import CustomRewardConfig
from mrl.rewards.registry import ScoreItem
from mrl.rewards.runner import RewardRunner

Item = Callable[[str], ScoreItem]
pytestmark = pytest.mark.multiprocess


def _gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def _children() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True)}


def test_scores_come_in_the_order_of_the_items(pool: RewardRunner, item: Item) -> None:
    answers = ["yes" if i % 3 else "no" for i in range(100)]
    scores = pool.score([item(answer) for answer in answers])
    assert [s.value for s in scores] == [float(a == "yes") for a in answers]
    assert {s.status for s in scores} == {"ok"}


def test_no_items_give_no_scores(pool: RewardRunner) -> None:
    assert pool.score([]) == ()


@pytest.mark.parametrize("fault", ["sleep", "spin", "regex", "bigint"])
def test_a_sample_past_the_limit_is_unscored_and_the_others_are_scored(
    pool: RewardRunner, item: Item, fault: str
) -> None:
    begin = time.monotonic()
    scores = pool.score([item("yes"), item(fault), item("yes"), item("no"), item("yes")])
    assert time.monotonic() - begin < 1.0 + 2.0
    assert [s.value for s in scores] == [1.0, None, 1.0, 0.0, 1.0]
    assert scores[1].status == "timeout"
    assert "reward.timeout_s=1" in scores[1].detail
    assert pool.score([item("yes")])[0].value == 1.0


def test_items_behind_a_stuck_one_in_its_chunk_are_scored(pool: RewardRunner, item: Item) -> None:
    items = [item("yes")] * 200
    items[3] = items[150] = item("sleep")
    scores = pool.score(items)
    assert [i for i, s in enumerate(scores) if s.value is None] == [3, 150]


@pytest.mark.parametrize(
    ("fault", "detail"),
    [
        ("boom", "KeyError: 'boom'"),
        ("leave", "SystemExit: 0"),
        ("die", "exit code 3"),
        ("none", "returned None"),
        ("nan", "returned nan"),
        ("text", "returned '1.0'"),
        ("no_score", "without 'score'"),
    ],
)
def test_a_failure_is_unscored_with_its_cause(
    pool: RewardRunner, item: Item, fault: str, detail: str
) -> None:
    bad, good = pool.score([item(fault), item("yes")])
    assert (bad.value, bad.status, good.value) == (None, "error", 1.0)
    assert detail in bad.detail


def test_failures_are_counted_and_shown(
    pool: RewardRunner, item: Item, caplog: pytest.LogCaptureFixture
) -> None:
    pool.score([item("boom"), item("sleep"), item("yes"), item("boom")])
    assert "3 of 4 samples unscored (2 error, 1 timeout)" in caplog.text
    assert "KeyError: 'boom'" in caplog.text


def test_a_dict_gives_its_score_and_its_other_numbers(pool: RewardRunner, item: Item) -> None:
    (score,) = pool.score([item("scored")])
    assert score.value == 0.5
    assert score.extra == {"format": 1.0, "parsed": 7.0}


def test_scoring_processes_hold_no_torch(pool: RewardRunner, item: Item) -> None:
    assert pool.score([item("torch")])[0].value == 0.0


def test_a_timeout_kills_what_the_function_started(
    custom_file: Path, item: Item, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pids = tmp_path / "pids"
    monkeypatch.setenv("PIDS", str(pids))
    with RewardRunner(CustomRewardConfig(str(custom_file)), 1, timeout_s=1.0) as runner:
        assert runner.score([item("orphans")])[0].status == "timeout"
        started = [int(line) for line in pids.read_text().split()]
        assert len(started) == 2
        assert all(_gone(pid) for pid in started)


def test_close_leaves_no_process(
    custom_file: Path, item: Item, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pids = tmp_path / "pids"
    monkeypatch.setenv("PIDS", str(pids))
    before = _children()
    with RewardRunner(CustomRewardConfig(str(custom_file)), 2, timeout_s=5.0) as runner:
        runner.score([item("left_child"), item("yes")])
    assert _children() == before
    assert _gone(int(pids.read_text()))


def test_the_pool_keeps_its_size_over_many_failures(pool: RewardRunner, item: Item) -> None:
    before = len(_children())
    pool.score([item("die")] * 10)
    assert len(_children()) == before
    assert pool.score([item("pid")])[0].value in _children()


def test_a_closed_pool_says_so(pool: RewardRunner, item: Item) -> None:
    pool.close()
    with pytest.raises(RuntimeError, match="closed"):
        pool.score([item("yes")])


def test_a_broken_custom_function_fails_at_construction(tmp_path: Path) -> None:
    file = tmp_path / "broken.py"
    file.write_text("import no_such_module\n")
    before = _children()
    with pytest.raises(ValueError, match=r"broken\.py failed to load: ModuleNotFoundError"):
        RewardRunner(CustomRewardConfig(str(file)), 2, timeout_s=1.0)
    assert _children() == before


def test_a_misspelt_function_name_gets_the_nearest(custom_file: Path) -> None:
    with pytest.raises(ValueError, match="did you mean 'compute_score'"):
        RewardRunner(CustomRewardConfig(str(custom_file), "compute_scor"), 1, timeout_s=1.0)


@pytest.mark.parametrize(("workers", "timeout"), [(0, 1.0), (1, 0.0), (1, float("nan"))])
def test_a_pool_without_workers_or_time_is_refused(workers: int, timeout: float) -> None:
    with pytest.raises(ValueError, match="expected"):
        RewardRunner(CustomRewardConfig(), workers, timeout)


def test_built_in_functions_load_outside_the_limit_of_a_sample() -> None:
    """Their libraries take longer to import than this limit."""
    with RewardRunner(CustomRewardConfig(), 1, timeout_s=0.5) as runner:
        scores = runner.score(
            [
                ScoreItem("openai/gsm8k", "so #### 72", "72", {}),
                ScoreItem("math", r"\boxed{\frac{1}{3}}", "1/3", {}),
                ScoreItem("unheard/of", "1", "1", {}),
            ]
        )
    assert [s.value for s in scores] == [1.0, 1.0, None]
    assert "'unheard/of' has no reward function" in scores[2].detail
