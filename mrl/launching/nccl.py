"""One all-reduce between the GPUs of this host, in ranks of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import time

_LIMIT_S = 120.0
_TAIL = 3  # lines of a failure that are shown
_NUMBERS = 1 << 24


def try_all_reduce(ranks: int) -> tuple[str | None, float]:
    """Run it; gives what went wrong (None: nothing) and the seconds it took."""
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone",
        "--nproc-per-node", str(ranks), "--max-restarts", "0", "-m", "mrl.launching.nccl",
    ]  # fmt: skip
    start = time.monotonic()
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"no end within {_LIMIT_S:.0f} s", time.monotonic() - start
    if done.returncode == 0:
        return None, time.monotonic() - start
    lines = [line for line in done.stderr.splitlines() if "Error" in line]
    return " / ".join(lines[:_TAIL]) or f"status {done.returncode}", time.monotonic() - start


def _rank() -> None:
    import torch
    import torch.distributed as dist

    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    numbers = torch.full((_NUMBERS,), float(dist.get_rank() + 1), device=device)
    dist.all_reduce(numbers)
    expected = dist.get_world_size() * (dist.get_world_size() + 1) / 2
    wrong = int((numbers != expected).sum())
    dist.destroy_process_group()
    if wrong:
        raise ArithmeticError(f"Error: all-reduce gave {wrong} wrong numbers of {_NUMBERS}")


if __name__ == "__main__":
    _rank()
