"""Wait for a Ray cluster: `python -m mrl.workers.ray_nodes NODES SECONDS`, at RAY_ADDRESS."""

from __future__ import annotations

import os
import sys
import time

import ray


def wait_for_nodes(address: str, nodes: int, limit_s: float) -> int:
    """Wait until a cluster has `nodes` live hosts; gives how many it has at last."""
    deadline, alive = time.monotonic() + limit_s, 0
    while alive < nodes and time.monotonic() < deadline:
        try:
            if not ray.is_initialized():
                ray.init(address=address, logging_level="ERROR", log_to_driver=False)
            alive = sum(node["Alive"] for node in ray.nodes())
        except ConnectionError:  # the head is not up yet
            ray.shutdown()
        time.sleep(0.5)
    return alive


if __name__ == "__main__":
    wanted, limit = int(sys.argv[1]), float(sys.argv[2])
    found = wait_for_nodes(os.environ["RAY_ADDRESS"], wanted, limit)
    if found < wanted:
        sys.exit(f"Ray: {found} of {wanted} nodes came up within {limit:.0f} s")
