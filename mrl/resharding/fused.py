"""Many copies between tensors of one device in few launches."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

Pair = tuple[Tensor, Tensor]  # destination, source

# Bits are moved as integers. On an H200, for the shapes of a 7B model: contiguous copies in one
# fused launch reach 3.5 TB/s as int32 (2.8 as bfloat16, 2.9 as int64, read and written); strided
# ones 3.5 TB/s as int64 (1.7 as bfloat16). The driver's own copy reaches more, but it is a launch
# for each, so it takes the large ones.
_LARGE_BYTES = 4 * 1024**2
_FUSED = (torch.int32,)
_STRIDED = (torch.int64, torch.int32)


class FusedCopies:
    """Copies that are listed once and run many times; they allocate nothing.

    Contiguous copies share launches. Dtypes may differ within a pair: the copy converts. Large
    ones take turns on the CUDA streams of `lanes`, beside the rest: one at a time they leave a
    tenth of the memory's rate unused.
    """

    def __init__(self, pairs: Sequence[Pair], lanes: Sequence[torch.cuda.Stream] = ()) -> None:
        self._lanes = lanes
        groups: dict[tuple[object, ...], tuple[list[Tensor], list[Tensor]]] = defaultdict(
            lambda: ([], [])
        )
        self._large: list[Pair] = []
        for pair in pairs:
            target, source = _as_integers(*pair)
            contiguous = target.is_contiguous() and source.is_contiguous()
            if contiguous and target.dtype == source.dtype and target.nbytes >= _LARGE_BYTES:
                self._large.append((target, source))
                continue
            key = (contiguous, target.dtype, source.dtype, target.device, source.device)
            groups[key][0].append(target)
            groups[key][1].append(source)
        self._groups = list(groups.values())

    @property
    def is_empty(self) -> bool:
        """Tell whether there is nothing to copy."""
        return not self._large and not self._groups

    def run(self) -> None:
        """Issue the copies on the current stream."""
        lanes = self._lanes
        if lanes and self._large:
            current = torch.cuda.current_stream(lanes[0].device)
            for index, lane in enumerate(lanes):
                lane.wait_stream(current)
                with torch.cuda.stream(lane):
                    for target, source in self._large[index :: len(lanes)]:
                        target.copy_(source, non_blocking=True)
        else:
            for target, source in self._large:
                target.copy_(source, non_blocking=True)
        for targets, sources in self._groups:
            torch._foreach_copy_(targets, sources)
        for lane in lanes if self._large else ():
            torch.cuda.current_stream(lane.device).wait_stream(lane)


def _as_integers(target: Tensor, source: Tensor) -> Pair:
    """View a pair of one dtype as wide integers, where both ends are aligned to them."""
    if target.dtype != source.dtype:
        return target, source
    widths: tuple[torch.dtype, ...] = _STRIDED
    if target.is_contiguous() and source.is_contiguous():
        target, source, widths = target.view(-1), source.view(-1), _FUSED
    for dtype in widths:
        if _fits(target, dtype) and _fits(source, dtype):
            return target.view(dtype), source.view(dtype)
    return target, source


def _fits(tensor: Tensor, dtype: torch.dtype) -> bool:
    """Tell whether `tensor.view(dtype)` exists and is aligned."""
    if tensor.dim() == 0 or tensor.stride(-1) != 1:
        return False
    ratio, rest = divmod(dtype.itemsize, tensor.element_size())
    counts = (tensor.size(-1), tensor.storage_offset(), *tensor.stride()[:-1])
    return (
        ratio > 0
        and rest == 0
        and tensor.data_ptr() % dtype.itemsize == 0
        and all(count % ratio == 0 for count in counts)
    )
