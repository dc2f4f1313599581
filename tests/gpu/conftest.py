from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.gpu.ranks import Pools


@pytest.fixture(scope="module")
def pools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pools]:
    """Ranks that load their weights from files, kept for the tests of a module."""
    pools = Pools(tmp_path_factory.mktemp("ranks"))
    yield pools
    pools.close()
