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

    def wait_stream(self, *args: Any) -> None:
        """Do nothing: the CPU is in order."""

    def record_event(self, event: Any = None) -> _NoStream:
        """Give an event that has happened."""
        return event or _NoStream()

    wait_event = record = synchronize = wait = wait_stream


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(factory)
    def build(*args: Any, **kwargs: Any) -> torch.Tensor:
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == "cuda":
            kwargs["device"] = CPU
        return factory(*args, **kwargs)

    return build


def _all_to_all_single(
    output: torch.Tensor,
    input: torch.Tensor,
    output_split_sizes: Any = None,
    input_split_sizes: Any = None,
    **kwargs: Any,
) -> Any:
    # The token dispatcher of experts gives its split sizes as tensors; gloo wants lists.
    return _ALL_TO_ALL(
        output, input, _listed(output_split_sizes), _listed(input_split_sizes), **kwargs
    )


def _all_gather(
    outputs: list[torch.Tensor], tensor: torch.Tensor, group: Any = None, **kwargs: Any
) -> Any:
    # Expert tensor parallelism gathers rows of unequal number, which gloo refuses.
    most = max(len(output) for output in outputs)
    if all(len(output) == most for output in outputs):
        return _ALL_GATHER(outputs, tensor, group=group, **kwargs)
    assert not kwargs, f"rows of unequal number are gathered at once, without {list(kwargs)}"
    padded = [output.new_empty(most, *output.shape[1:]) for output in outputs]
    own = tensor.new_zeros(most, *tensor.shape[1:])
    own[: len(tensor)] = tensor
    _ALL_GATHER(padded, own, group=group)
    for output, rows in zip(outputs, padded, strict=True):
        output.copy_(rows[: len(output)])
    return None


def _reduce_scatter(output: torch.Tensor, inputs: list[torch.Tensor], group: Any) -> None:
    # As above, backwards: a sum, at once.
    total = torch.cat(inputs)
    torch.distributed.all_reduce(total, group=group)
    output.copy_(total.split([len(part) for part in inputs])[group.rank()])


def _listed(sizes: Any) -> list[int] | None:
    return None if sizes is None else [int(size) for size in sizes]


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
_ALL_TO_ALL = torch.distributed.all_to_all_single
_ALL_GATHER = torch.distributed.all_gather


def _patches() -> list[tuple[Any, str, Any]]:
    import megatron.core.tensor_parallel.random as megatron_random

    cuda = torch.cuda
    patches: list[tuple[Any, str, Any]] = [
        (torch, name, _on_cpu(getattr(torch, name))) for name in _FACTORIES
    ]
    patches += [
        (torch.Tensor, "cuda", lambda tensor, *args, **kwargs: tensor),
        (torch.Tensor, "type", _cuda_type_name),
        (torch.Tensor, "record_stream", lambda tensor, stream: None),
        (torch.distributed, "all_to_all_single", _all_to_all_single),
        (torch.distributed, "all_gather", _all_gather),
        (torch.distributed, "reduce_scatter", _reduce_scatter),
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
