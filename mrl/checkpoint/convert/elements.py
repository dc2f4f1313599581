"""Elements of safetensors files, read and written without holding a file in memory."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from mrl.resharding.hf import StoredTensor
from mrl.resharding.layout import Box, TensorInfo

_NAMES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
_BLOCK_BYTES = 16 * 1024**2


def read_into(stored: StoredTensor, box: Box, out: Tensor) -> None:
    """Read a box of a stored tensor into a view of its extents, converting to the view's dtype.

    Files are read in blocks of rows, not mapped: mapped pages would count as resident memory.
    Raises ValueError where the file ends early.
    """
    shape, item = stored.info.shape, stored.info.item_bytes
    dtype = getattr(torch, stored.info.dtype)
    row_bytes = math.prod(shape[1:]) * item
    step = max(1, _BLOCK_BYTES // max(1, row_bytes))
    (first, last), *rest = box
    columns = tuple(slice(start, stop) for start, stop in rest)
    with stored.file.open("rb") as file:
        for start in range(first, last, step):
            stop = min(start + step, last)
            block = bytearray((stop - start) * row_bytes)
            file.seek(stored.start + start * row_bytes)
            if file.readinto(block) != len(block):
                raise ValueError(f"{stored.file}: ends inside a tensor, the file is damaged")
            values = torch.frombuffer(block, dtype=dtype).view(stop - start, *shape[1:])
            out[start - first : stop - first].copy_(values[(slice(None), *columns)])


def file_bytes(tensors: Mapping[str, TensorInfo]) -> int:
    """Give the size of a file of some tensors."""
    return len(_header(tensors)) + sum(info.num_bytes for info in tensors.values())


def write_file(
    path: Path, tensors: Mapping[str, TensorInfo], produce: Callable[[str], Tensor]
) -> None:
    """Write a safetensors file, asking for one tensor at a time; it appears whole or not at all."""
    draft = path.with_name(f"{path.name}.part")
    with draft.open("wb") as file:
        file.write(_header(tensors))
        for name in _order(tensors):
            tensor = produce(name)
            info = TensorInfo(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
            assert info == tensors[name], (name, info, tensors[name])
            file.write(memoryview(tensor.contiguous().reshape(-1).view(torch.uint8).numpy()))
            del tensor  # gone before the next one comes
        file.flush()
        os.fsync(file.fileno())
    draft.rename(path)


def _order(tensors: Mapping[str, TensorInfo]) -> list[str]:
    # the widest elements first, so that all are aligned
    return sorted(tensors, key=lambda name: -tensors[name].item_bytes)


def _header(tensors: Mapping[str, TensorInfo]) -> bytes:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in _order(tensors):
        info = tensors[name]
        start, end = end, end + info.num_bytes
        header[name] = {
            "dtype": _NAMES[info.dtype],
            "shape": list(info.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
