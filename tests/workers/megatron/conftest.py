from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.ranks import Ranks
from tests.workers.jobs import TWO_ROWS, Round, both, layout, work

Alone = Callable[[Path], Round]


@pytest.fixture(scope="session")
def alone(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Alone:
    """What one rank does with two rows a micro-batch, computed once for each model."""
    rounds: dict[Path, Round] = {}

    def alone(path: Path) -> Round:
        if path not in rounds:
            spec = both(path, layout())
            with ranks.job(1, spec) as pool:
                rounds[path] = work(pool, spec, tmp_path_factory.mktemp("alone"), TWO_ROWS, None)
        return rounds[path]

    return alone
