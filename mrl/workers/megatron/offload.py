"""A role's memory on the host between its phases: parameters, gradients, optimizer state.

A storage that is away has no bytes, in place (`resize_(0)`): every view of it, Megatron's buckets
and shards among them, is right again once it is filled. On a GPU its address then is another one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from enum import Enum

import torch
from megatron.core.models.gpt import GPTModel
from torch import Tensor, UntypedStorage

from mrl.config.schema import MegatronConfig
from mrl.workers.megatron.fp8 import forget_quantized
from mrl.workers.megatron.optimizer import Trainer

# torch's pinned allocator rounds up to powers of two, so slabs are powers of two; a large one
# would waste as much as it holds.
_SLAB_BYTES = 256 * 1024**2


class Part(Enum):
    """What of a role's memory moves on its own."""

    PARAMS = "parameters"
    GRADS = "gradients"
    OPTIMIZER = "optimizer state"  # with the float32 main parameters


@dataclass(frozen=True, slots=True)
class Phase:
    """What a role needs on its device while it works, and which of that it changes."""

    needs: tuple[Part, ...]
    changes: tuple[Part, ...] = ()
    reads_whole_params: bool = True  # of the whole data-parallel group, before the phase starts


READ = Phase(needs=(Part.PARAMS,))  # log-probs, values, export, sync
TRAIN = Phase(tuple(Part), tuple(Part), reads_whole_params=False)  # gathered by layer, if need be
LOAD = Phase((Part.PARAMS, Part.OPTIMIZER), (Part.PARAMS, Part.OPTIMIZER), reads_whole_params=False)


class RoleMemory:
    """The memory of one role on one rank; the layout says which parts leave the device."""

    def __init__(
        self,
        chunks: Sequence[GPTModel],
        trainer: Trainer | None,
        layout: MegatronConfig,
        device: torch.device,
    ) -> None:
        """Find what there is to move; `trainer` is None where the role is frozen."""
        self._device, self._trainer, self._chunks = device, trainer, chunks
        lane = torch.cuda.Stream(device) if device.type == "cuda" else None
        moved: dict[Part, _Moved] = {}
        if layout.param_offload:
            moved[Part.PARAMS] = _Moved(lambda: _params(chunks), lane)
        if layout.grad_offload and trainer is not None:
            # zeroed before every step: their memory is given up, what is in it does not matter
            moved[Part.GRADS] = _Moved(trainer.gradients, lane, is_kept=False)
        if layout.optimizer_offload and trainer is not None:
            # main parameters in float32 are the parameters themselves
            moved[Part.OPTIMIZER] = _Moved(trainer.state, lane, but=lambda: _params(chunks))
        self._moved = moved

    @property
    def moves_params(self) -> bool:
        """Say whether parameters leave the device, and have other addresses when they are back."""
        return Part.PARAMS in self._moved

    @property
    def away(self) -> frozenset[Part]:
        """Give the parts that are not on the device."""
        return frozenset(part for part, moved in self._moved.items() if moved.is_away)

    @property
    def host_bytes(self) -> int:
        """Count the bytes of the host buffers."""
        return sum(moved.host.nbytes for moved in self._moved.values())

    def enter(self, phase: Phase) -> None:
        """Bring what a phase needs; all ranks of the role call it together."""
        for part in phase.needs:
            if part in self._moved:
                self._moved[part].bring(changes=part in phase.changes)
        if phase.reads_whole_params and self._trainer is not None:
            gathered = self._trainer.finish_param_sync()
            if gathered and Part.PARAMS in self._moved:  # the host has this rank's shards alone
                self._moved[Part.PARAMS].bring(changes=True)

    def read(self, tensor: Tensor) -> Tensor:
        """Give a copy of a tensor on the CPU, wherever its storage is."""
        for moved in self._moved.values():
            if moved.is_away and (value := moved.read(tensor)) is not None:
                return value
        # a copy: memory that numpy has seen can no longer be given back
        return tensor.detach().to("cpu", copy=True)

    def give_back(self, keep_params: bool = False) -> None:
        """Free what the layout lets leave the device; it comes back when a phase needs it."""
        leaving = [
            moved
            for part, moved in self._moved.items()
            if not moved.is_away and not (keep_params and part is Part.PARAMS)
        ]
        if not leaving:
            return
        for moved in leaving:
            moved.copy()
        if self._device.type == "cuda":
            # the copies' end, and the end of all that computes on what is freed
            torch.cuda.synchronize(self._device)
        for moved in leaving:
            moved.free()
        if Part.PARAMS in self.away:
            forget_quantized(self._chunks)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # an engine in the same process has its own allocator


class HostBuffer:
    """Host memory that is taken once, in slabs, and kept; pinned beside a GPU."""

    def __init__(self, is_pinned: bool) -> None:
        self._is_pinned = is_pinned
        self.slabs: list[Tensor] = []  # uint8

    @property
    def nbytes(self) -> int:
        """Count the bytes taken."""
        return sum(slab.numel() for slab in self.slabs)

    def reserve(self, nbytes: int) -> None:
        """Take what is missing of so many bytes."""
        while (missing := nbytes - self.nbytes) > 0:
            size = min(_SLAB_BYTES, 1 << (missing - 1).bit_length())
            self.slabs.append(torch.empty(size, dtype=torch.uint8, pin_memory=self._is_pinned))

    def read(self, start: int, end: int) -> Tensor:
        """Give a copy of the bytes from `start` to `end`."""
        pieces, first = [], 0
        for slab in self.slabs:
            low, high = max(start - first, 0), min(end - first, slab.numel())
            if low < high:
                pieces.append(slab[low:high])
            first += slab.numel()
        return torch.cat(pieces)


class _Moved:
    """The storages of one part and, where they are kept, their bytes on the host."""

    def __init__(
        self,
        tensors: Callable[[], Iterable[Tensor]],
        lane: torch.cuda.Stream | None,
        is_kept: bool = True,
        but: Callable[[], Iterable[Tensor]] = tuple,
    ) -> None:
        """Take the storages of `tensors` without those of `but`; copy on the stream `lane`."""
        self._tensors, self._but, self._lane, self._is_kept = tensors, but, lane, is_kept
        self.host = HostBuffer(is_pinned=lane is not None)
        self.is_away = False
        self._storages: list[_Sized] = []
        self._stored: list[_Sized] = []  # those whose bytes the host has as they are

    def copy(self) -> None:
        """Start to copy to the host, unless it has these bytes."""
        # looked up each time: an optimizer makes its state in its first step, or reads another
        self._storages = _storages(self._tensors(), without=self._but())
        if self._is_kept and self._stored != self._storages:
            with self._beside():
                for device, host in self._pairs():
                    host.copy_(device, non_blocking=True)
            self._stored = self._storages

    def free(self) -> None:
        """Empty the storages; the copy has ended."""
        for storage, _ in self._storages:
            storage.resize_(0)
        self.is_away = True

    def bring(self, changes: bool) -> None:
        """Fill the storages; say whether what is in them is going to change."""
        if self.is_away:
            for storage, nbytes in self._storages:
                storage.resize_(nbytes)
            self.is_away = False
            if self._is_kept:
                with self._beside():
                    for device, host in self._pairs():
                        device.copy_(host, non_blocking=True)
                if self._lane is not None:
                    torch.cuda.current_stream(self._lane.device).wait_stream(self._lane)
        if changes:
            self._stored = []

    def read(self, tensor: Tensor) -> Tensor | None:
        """Give the value of a tensor that is away, None where it is not one of these."""
        start, wanted = 0, tensor.untyped_storage()._cdata
        for storage, nbytes in self._storages:
            if storage._cdata == wanted:
                value = torch.empty(0, dtype=tensor.dtype)
                value.set_(
                    self.host.read(start, start + nbytes).untyped_storage(),
                    tensor.storage_offset(),
                    tensor.shape,
                    tensor.stride(),
                )
                return value
            start += nbytes
        return None

    def _beside(self) -> AbstractContextManager[object]:
        """Run on the stream, after what the current one has under way."""
        if self._lane is None:
            return nullcontext()
        self._lane.wait_stream(torch.cuda.current_stream(self._lane.device))
        return torch.cuda.stream(self._lane)

    def _pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Give runs of bytes on the device with their places on the host."""
        self.host.reserve(sum(nbytes for _, nbytes in self._storages))
        slabs = iter(self.host.slabs)
        place = torch.empty(0, dtype=torch.uint8)
        for storage, nbytes in self._storages:
            rest = torch.empty(0, dtype=torch.uint8, device=storage.device)
            rest.set_(storage, 0, (nbytes,), (1,))
            while rest.numel():
                if not place.numel():
                    place = next(slabs)
                count = min(rest.numel(), place.numel())
                yield rest[:count], place[:count]
                rest, place = rest[count:], place[count:]


_Sized = tuple[UntypedStorage, int]  # with its bytes


def _params(chunks: Sequence[GPTModel]) -> Iterator[Tensor]:
    for chunk in chunks:
        yield from chunk.parameters()


def _storages(tensors: Iterable[Tensor], without: Iterable[Tensor]) -> list[_Sized]:
    """Give each storage once."""
    found = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors}
    for tensor in without:
        found.pop(tensor.untyped_storage()._cdata, None)
    return [(storage, storage.nbytes()) for storage in found.values()]
