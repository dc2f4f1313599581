"""Files of tensors that are written and read one after another: never all of them in memory."""

from __future__ import annotations

import io
import os
import struct
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

_LENGTH = struct.Struct("<Q")  # bytes of the head

Next = Callable[[torch.dtype, tuple[int, ...]], Tensor]


def write_shards(path: Path, head: Any, tensors: Iterable[Tensor]) -> None:
    """Write a head of plain data, then the bytes of tensors on the CPU; on disk when it ends."""
    buffer = io.BytesIO()
    torch.save(head, buffer)
    with path.open("wb") as file:
        file.write(_LENGTH.pack(buffer.tell()))
        file.write(buffer.getbuffer())
        for tensor in tensors:
            file.write(_bytes(tensor.contiguous()))
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def read_shards(path: Path) -> Iterator[tuple[Any, Next]]:
    """Give a file's head, and what reads the next tensor of a dtype and shape.

    Raises ValueError where the file ends too early.
    """
    with path.open("rb") as file:
        (length,) = _LENGTH.unpack(file.read(_LENGTH.size))
        head = torch.load(io.BytesIO(file.read(length)), weights_only=True)
        yield head, lambda dtype, shape: _next(path, file, dtype, shape)


def _next(path: Path, file: BinaryIO, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    tensor = torch.empty(shape, dtype=dtype)
    place = _bytes(tensor)
    found = file.readinto(place)  # type: ignore[attr-defined]
    if found != len(place):
        raise ValueError(f"{path} ends early: found {found} bytes of a tensor of {len(place)}")
    return tensor.clone()  # memory that numpy has seen can no longer be given back


def _bytes(tensor: Tensor) -> memoryview:
    return memoryview(tensor.view(-1).view(torch.uint8).numpy())
