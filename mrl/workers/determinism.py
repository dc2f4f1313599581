"""The same numbers bit for bit on the same layout: `trainer.full_determinism`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

# What cuBLAS, NCCL and Transformer Engine read once, when they start: the values that Megatron-LM
# found to be bit-exact (megatron/training/determinism.py); the first of each is the default.
_ACCEPTED = {
    "CUBLAS_WORKSPACE_CONFIG": (":4096:8", ":16:8"),
    "NCCL_ALGO": ("Ring", "CollnetDirect", "CollnetChain", "^NVLS"),
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": ("0",),
}


def deterministic_environment(given: Mapping[str, str]) -> dict[str, str]:
    """Give the variables of a deterministic rank; what the user has set is kept.

    They must be set before CUDA starts. Raises ValueError where the user's value contradicts.
    """
    environment, wrong = {}, []
    for name, accepted in _ACCEPTED.items():
        value = given.get(name, accepted[0])
        if not value or any(part.strip() not in accepted for part in value.split(",")):
            wrong.append(f"{name}={value!r}, expected {' or '.join(accepted)}")
        environment[name] = value
    if wrong:
        raise ValueError(
            f"trainer.full_determinism=true contradicts the environment: {'; '.join(wrong)}. "
            "Unset it, or set trainer.full_determinism=false"
        )
    return environment


@contextmanager
def deterministic_algorithms(on: bool) -> Iterator[None]:
    """Let torch run only operations that have a deterministic form inside the block.

    One that has none raises RuntimeError with its name. Does nothing when `on` is false.
    """
    if not on:
        yield
        return
    memory = torch.utils.deterministic
    before = torch.are_deterministic_algorithms_enabled(), memory.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    # every buffer is written before it is read: filling fresh memory would only cost time
    memory.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        memory.fill_uninitialized_memory = before[1]
