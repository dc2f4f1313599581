"""Let Megatron-Core run where there is no GPU.

Megatron asks torch.cuda for the device, streams and random states, and builds a few small tensors
on "cuda" by name. `cuda_on_cpu()` answers for the CPU while it is entered and restores torch when
it is left, so that the engine in the same process sees an untouched torch. On a machine with a GPU
it does nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

CPU = torch.device("cpu")
_FACTORIES = ("tensor", "zeros", "ones", "empty", "full", "arange")


class _NoStream:
    """A CUDA stream's or event's methods, without effect."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def wait_stream(self, stream: Any) -> None:
        """Do nothing: the CPU is in order."""

    wait_event = record_event = record = synchronize = wait = wait_stream


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(factory)
    def build(*args: Any, **kwargs: Any) -> torch.Tensor:
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == "cuda":
            kwargs["device"] = CPU
        return factory(*args, **kwargs)

    return build


def _cuda_type_name(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    # The distributed optimizer accepts only the torch.cuda spelling of a dtype.
    name = _TENSOR_TYPE(tensor, *args, **kwargs)
    if isinstance(name, str) and not name.startswith("torch.cuda."):
        return name.replace("torch.", "torch.cuda.")
    return name


def _rng_state(device: Any = None) -> torch.Tensor:
    return torch.get_rng_state()


def _set_rng_state(state: torch.Tensor, device: Any = None) -> None:
    torch.set_rng_state(state)


def _seed(seed: int) -> None:
    torch.manual_seed(seed)


def _set_megatron_rng_state(
    state: torch.Tensor, device: Any = -1, graph_safe: bool = False
) -> None:
    torch.set_rng_state(state)


_TENSOR_TYPE = torch.Tensor.type


def _patches() -> list[tuple[Any, str, Any]]:
    import megatron.core.tensor_parallel.random as megatron_random

    cuda = torch.cuda
    patches: list[tuple[Any, str, Any]] = [
        (torch, name, _on_cpu(getattr(torch, name))) for name in _FACTORIES
    ]
    patches += [
        (torch.Tensor, "cuda", lambda tensor, *args, **kwargs: tensor),
        (torch.Tensor, "type", _cuda_type_name),
        (cuda, "current_device", lambda: CPU),
        (cuda, "synchronize", lambda device=None: None),
        (cuda, "current_stream", lambda device=None: _NoStream()),
        (cuda, "stream", lambda stream: nullcontext()),
        (cuda, "Stream", _NoStream),
        (cuda, "Event", _NoStream),
        (cuda, "empty_cache", lambda: None),
        (cuda, "get_rng_state", _rng_state),
        (cuda, "set_rng_state", _set_rng_state),
        (cuda, "manual_seed", _seed),
        (cuda.random, "get_rng_state", _rng_state),
        (cuda.random, "set_rng_state", _set_rng_state),
        (megatron_random, "_set_cuda_rng_state", _set_megatron_rng_state),
    ]
    return patches


_INHERITED = object()  # in place of an attribute that the owner's base class holds
_depth = 0


@contextmanager
def cuda_on_cpu() -> Iterator[None]:
    """Answer torch.cuda for the CPU inside the block; nested blocks are one."""
    global _depth
    if torch.cuda.is_available() or _depth:
        yield
        return
    patches = _patches()
    before = [(owner, name, vars(owner).get(name, _INHERITED)) for owner, name, _ in patches]
    _depth += 1
    try:
        for owner, name, value in patches:
            setattr(owner, name, value)
        yield
    finally:
        _depth -= 1
        for owner, name, value in before:
            if value is _INHERITED:
                delattr(owner, name)
            else:
                setattr(owner, name, value)
