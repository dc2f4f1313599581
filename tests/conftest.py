from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:  # the tests of the config import no torch, and start at once
    from mrl.workers.specs import JobSpec
    from tests.ranks import Ranks
    from tests.runs import Inputs, Recording

_RANKS = pytest.StashKey["Ranks"]()
os.environ["MRL_STRICT_METRICS"] = "1"  # also for the commands that tests run


def pytest_collection_finish(session: pytest.Session) -> None:
    """Let the ranks' imports run beside the first tests, if any test wants ranks."""
    wanted = any("ranks" in getattr(item, "fixturenames", ()) for item in session.items)
    # one of several test processes does not know yet whether those tests are its own
    is_one_of_several = hasattr(session.config, "workerinput")
    if wanted and not session.config.option.collectonly and not is_one_of_several:
        _start_ranks(session.config)


def _start_ranks(config: pytest.Config) -> Ranks:
    from tests.ranks import Ranks

    config.stash[_RANKS] = Ranks()
    return config.stash[_RANKS]


def pytest_unconfigure(config: pytest.Config) -> None:
    """End the ranks' source, also after an interrupt."""
    if _RANKS in config.stash:
        config.stash[_RANKS].close()


@pytest.fixture(scope="session")
def ranks(request: pytest.FixtureRequest) -> Ranks:
    """Warm ranks: `ranks.run(world, function)` and `ranks.job(world, spec)`."""
    config = request.config
    return config.stash[_RANKS] if _RANKS in config.stash else _start_ranks(config)


@pytest.fixture(scope="session")
def qwen2(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen2 folder: tied embeddings, biases on q, k and v."""
    from tests.models import write_model

    return ranks.run(1, write_model, folder=tmp_path_factory.mktemp("qwen2"), kind="qwen2")[0]


@pytest.fixture(scope="session")
def llama(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama folder: untied embeddings, no biases."""
    from tests.models import write_model

    return ranks.run(1, write_model, folder=tmp_path_factory.mktemp("llama"), kind="llama")[0]


@pytest.fixture(scope="session")
def qwen3_moe(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3-MoE folder: norms on q and k, a dense layer and three of experts."""
    from tests.models import write_model

    folder = tmp_path_factory.mktemp("qwen3_moe")
    return ranks.run(1, write_model, folder=folder, kind="qwen3_moe")[0]


@pytest.fixture(scope="session")
def experts(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3-MoE folder that vLLM can serve."""
    from tests.models import write_model

    shape = {
        "hidden_size": 128,
        "num_attention_heads": 4,
        "head_dim": 32,
        "max_position_embeddings": 256,
    }
    folder = tmp_path_factory.mktemp("experts")
    return ranks.run(1, write_model, folder=folder, kind="qwen3_moe", **shape)[0]


@pytest.fixture(scope="session")
def policy(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen2 folder that vLLM can serve: its attention needs heads of 32 and more."""
    from tests.models import write_model

    shape = {"hidden_size": 128, "num_attention_heads": 4, "max_position_embeddings": 256}
    return ranks.run(
        1, write_model, folder=tmp_path_factory.mktemp("policy"), kind="qwen2", **shape
    )[0]


@pytest.fixture(scope="session")
def inputs(policy: Path, tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    """Rows, reward function and config of a small PPO run."""
    from tests.runs import write_inputs

    return write_inputs(tmp_path_factory.mktemp("inputs"), policy)


@pytest.fixture(scope="session")
def spawned_run(inputs: Inputs, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished `mrl train`: four steps of PPO on ranks that it spawned."""
    from tests.runs import MRL, overrides, run_command

    run = tmp_path_factory.mktemp("spawned") / "run"
    run_command([*MRL, "train", str(inputs.config), *overrides(run)], run.parent)
    return run


@pytest.fixture
def warm_pools(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> list[Recording]:
    """Let trainers in this process run on warm ranks; gives the pools they used, as they come."""
    from tests.runs import RUN_LIMIT_S, Recording

    pools: list[Recording] = []

    def start(world_size: int, spec: JobSpec, log_folder: Path) -> Recording:
        pools.append(Recording(ranks.job(world_size, spec, RUN_LIMIT_S)))
        return pools[-1]

    monkeypatch.setattr("mrl.workers.job.SpawnedPool", start)
    return pools
