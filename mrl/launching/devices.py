"""Which GPUs a process sees: what the variables say, and where they contradict each other.

`python -m mrl.launching.devices` prints the number of visible GPUs; no CUDA context is made.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence

CUDA = "CUDA_VISIBLE_DEVICES"
_OTHERS = ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
_RAY_KEEPS = "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"


def visible_devices(given: Mapping[str, str], installed: int) -> tuple[str, ...]:
    """Name the GPUs that a process sees, in its order; all `installed` ones by default.

    As CUDA reads its variable: the list ends at the first entry that names no GPU, as in
    `NoDevFiles`, which Slurm writes into a job without GPUs.
    """
    if CUDA not in given:
        return tuple(map(str, range(installed)))
    seen: list[str] = []
    for entry in map(str.strip, given[CUDA].split(",")):
        by_number = entry.isdecimal() and int(entry) < installed
        if not by_number and not entry.startswith(("GPU-", "MIG-")):
            break
        seen.append(entry)
    return tuple(seen)


def device_of_rank(local_rank: int, seen: Sequence[str], device: str) -> str:
    """Say which device a rank uses: `cuda:1 = GPU 4`, `cpu`, or `cuda:1 = none`."""
    if device == "cpu":
        return "cpu"
    if local_rank >= len(seen):
        return f"cuda:{local_rank} = none"
    name = seen[local_rank]  # a number, or the head of an identifier such as GPU-5a1f9e02-...
    return f"cuda:{local_rank} = " + (f"GPU {name}" if name.isdecimal() else name[:12])


def contradictions(given: Mapping[str, str], installed: int, ranks: int, ray: bool) -> list[str]:
    """List what in the environment keeps `ranks` of a host from a GPU each, by variable."""
    seen, found = visible_devices(given, installed), []
    said = f"{CUDA}={given[CUDA]}" if CUDA in given else f"{CUDA} is not set"
    twice = sorted({name for name in seen if seen.count(name) > 1})
    if twice:
        found.append(f"{said} names GPU {twice[0]} twice: name every GPU once")
    if CUDA in given and len(seen) < given[CUDA].count(",") + 1 and given[CUDA]:
        found.append(f"{said}: {len(seen)} of it are GPUs of this host, which has {installed}")
    if len(seen) < ranks:
        found.append(
            f"{ranks} ranks a host (trainer.n_gpus_per_node), {len(seen)} GPUs are visible "
            f"of this host's {installed} ({said}): make them equal"
        )
    for name in _OTHERS:
        if given.get(name, given.get(CUDA)) != given.get(CUDA):
            found.append(f"{name}={given[name]} beside {said}: unset {name}, this is CUDA")
    if ray and given.get(_RAY_KEEPS, "0").lower() in ("1", "true") and ranks > 1:
        found.append(
            f"{_RAY_KEEPS}={given[_RAY_KEEPS]} would put all ranks of a host on its first GPU: "
            "unset it where Ray is started"
        )
    return found


def installed_gpus() -> int:
    """Count the GPUs of this host by its driver; 0 without one."""
    if shutil.which("nvidia-smi") is None:
        return 0
    listed = subprocess.run(
        ["nvidia-smi", "--list-gpus"], capture_output=True, text=True, check=False
    )
    return sum(line.startswith("GPU ") for line in listed.stdout.splitlines())


if __name__ == "__main__":
    print(len(visible_devices(os.environ, installed_gpus())))
