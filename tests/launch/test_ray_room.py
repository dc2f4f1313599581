"""A host with room for each node of a job, asked of a real Ray cluster."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import ray
from ray.util.placement_group import placement_group_table, remove_placement_group

from mrl.workers import ray as ranks

pytestmark = pytest.mark.slow


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, configure_logging=False)
    yield
    ray.shutdown()


@pytest.mark.usefixtures("cluster")
def test_each_node_of_a_job_has_one_place_and_no_room_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    places = ranks._reserve(2, 2, 0)
    assert placement_group_table(places)["bundles"] == {0: {"CPU": 2.0}, 1: {"CPU": 2.0}}
    remove_placement_group(places)
    monkeypatch.setattr(ranks, "_ROOM_S", 1.0)
    with pytest.raises(ValueError, match=r"no room for 1 x .*'CPU': 64.* are free on 1 hosts"):
        ranks._reserve(1, 64, 0)
