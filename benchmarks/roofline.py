"""The best that a GPU allows: `mrl plan` with nothing lost, and the rates of its data sheet.

Products run at the peak of the data sheet, memory and links at the rate that large copies reach
(mrl/resharding/hardware.py). A CPU has no roofline here: its peak is not known.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mrl.config import Config
from mrl.planning.compute import StepTime
from mrl.planning.hardware import Machine
from mrl.planning.plan import plan_job
from mrl.resharding.hardware import GPU, GPUS
from mrl.tracking.flops import peak_flops

# Of `mrl.planning.hardware.Assumptions`: full efficiency, and a host that costs nothing.
_IDEAL = (
    "update=1", "log_prob=1", "narrow=0", "experts=1", "generation=1", "imbalance=1", "overlap=1",
    "offload=1", "host_step=0", "host_sequence=0", "host_layer=0", "wake=0", "rest=0",
)  # fmt: skip


def gpu_key(device: str) -> str | None:
    """Look up the planner's name of a GPU by its vendor's; None for one that it does not know."""
    words = device.lower().split()
    chips = {key.partition("-")[0]: key for key in GPUS}
    return next((key for chip, key in chips.items() for w in words if w.startswith(chip)), None)


def gpu_of(environment: Mapping[str, Any]) -> GPU | None:
    """Give the GPU of a record's environment."""
    key = gpu_key(device_name(environment))
    return GPUS[key] if key else None


def peak_of(environment: Mapping[str, Any]) -> float | None:
    """Give the dense bfloat16 FLOP/s of one GPU of a record's environment."""
    return peak_flops(device_name(environment))


def device_name(environment: Mapping[str, Any]) -> str:
    """Give the vendor's name of the first GPU; "cpu" without any."""
    gpus = environment["gpus"]
    return str(gpus[0]["name"]) if gpus else "cpu"


def transfer_seconds(gpu: GPU, local_bytes: float, received_bytes: float) -> float:
    """Give the least time to copy bytes on a GPU (read and written) while others arrive."""
    copied = 2 * local_bytes / gpu.memory.bytes_per_s
    return max(copied, received_bytes / gpu.nvlink.bytes_per_s)


def ideal_step(config: Config, device: str, response: float = 1.0) -> StepTime | None:
    """Plan a step with nothing lost; `response` is the mean response over the longest.

    None for a GPU that the planner does not know, and for a CPU.
    """
    key = gpu_key(device)
    if key is None:
        return None
    return plan_job(config, Machine.named(key, None, (*_IDEAL, f"response={response}"))).time
