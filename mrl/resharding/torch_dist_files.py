"""Files of Megatron-Core's `torch_dist` checkpoints, written and read box by box.

The format is that of `torch.distributed.checkpoint`: blobs of `torch.save` one after another, and
`.metadata`, a pickle that says which box of which key each blob is. Megatron-Core 0.19 itself
cannot store a part of a parameter that is no box (`ShardedTensor.flattened_range` is refused), so
ranks that share the optimizer state out by flat ranges gather it first; boxes need no gathering.
Reading runs no code of the files': the pickle may name the format's own classes alone.
"""

from __future__ import annotations

import collections
import io
import json
import math
import os
import pickle
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from mrl.resharding.layout import Box, intersect, volume
from mrl.resharding.torch_dist import COMMON_STATE, CONFIG_FILE, FORMAT

METADATA_FILE = ".metadata"
_DAMAGED = (RuntimeError, pickle.UnpicklingError, EOFError, OSError, AttributeError, TypeError)
# Classes of a checkpoint's `.metadata` as torch and Megatron-Core write it, by module.
_CLASSES = {
    "torch": {"Size", "float16", "bfloat16", "float32", "float64", "uint8", "int8", "int16"}
    | {"int32", "int64", "bool", "float8_e4m3fn", "float8_e5m2", "complex64"},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.metadata": {
        "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata",
        "TensorProperties", "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.planner": {
        "SavePlan", "WriteItem", "WriteItemType", "TensorWriteData",
    },
    "torch.distributed.checkpoint.storage": {"WriteResult"},
    "megatron.core.dist_checkpointing.strategies.torch": {"MCoreMetadata", "MCoreSavePlan"},
    "collections": {"OrderedDict"},
    "pathlib": {"PosixPath", "PurePosixPath", "Path"},
    "pathlib._local": {"PosixPath", "PurePosixPath", "Path"},
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Chunk:
    """A box of a key."""

    key: str
    shape: tuple[int, ...]  # of the whole key
    box: Box


@dataclass(frozen=True, slots=True)
class Stored:
    """A chunk and where a file has it."""

    chunk: Chunk
    dtype: str
    file: str
    start: int
    length: int


def write_chunks(path: Path, chunks: Iterable[tuple[Chunk, Tensor]]) -> list[Stored]:
    """Write tensors on the CPU one after another; the file is on the disk when it ends."""
    path.parent.mkdir(parents=True, exist_ok=True)
    stored = []
    with path.open("wb") as file:
        for chunk, tensor in chunks:
            start = file.tell()
            # its own elements alone, on all axes of the key
            own = tensor.clone(memory_format=torch.contiguous_format)
            torch.save(own.view(_extents(chunk.box)), file)
            dtype = str(tensor.dtype).removeprefix("torch.")
            stored.append(Stored(chunk, dtype, path.name, start, file.tell() - start))
        file.flush()
        os.fsync(file.fileno())
    return stored


def write_metadata(folder: Path, stored: Collection[Stored], common: dict[str, object]) -> None:
    """Complete a folder of `write_chunks` files: `common` is plain data for Megatron's readers.

    Raises ValueError where the chunks of a key overlap, leave gaps or differ in dtype.
    """
    by_key: dict[str, list[Stored]] = {}
    for item in stored:
        by_key.setdefault(item.chunk.key, []).append(item)
    tensors: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    for key, items in by_key.items():
        _check_whole(key, items)
        tensors[key] = TensorStorageMetadata(
            TensorProperties(dtype=getattr(torch, items[0].dtype)),
            torch.Size(items[0].chunk.shape),
            [ChunkStorageMetadata(_offsets(i.chunk.box), _extents(i.chunk.box)) for i in items],
        )
    places = {
        MetadataIndex(item.chunk.key, _offsets(item.chunk.box)): _StorageInfo(
            item.file, item.start, item.length
        )
        for item in stored
    }
    blob = io.BytesIO()
    torch.save([common], blob)  # a list of one
    name = "common.distcp"
    _write(folder / name, blob.getvalue())
    tensors[COMMON_STATE] = BytesStorageMetadata()
    places[MetadataIndex(COMMON_STATE)] = _StorageInfo(name, 0, len(blob.getvalue()))
    metadata = Metadata(tensors, storage_data=places, version="1.0.0")
    _write(folder / METADATA_FILE, pickle.dumps(metadata))
    _write(folder / CONFIG_FILE, json.dumps(FORMAT).encode())


class DistributedCheckpoint:
    """A `torch_dist` folder, whose tensors are read in boxes."""

    def __init__(self, folder: Path) -> None:
        """Read the metadata.

        Raises ValueError for another format, and for a checkpoint whose files are cut short.
        """
        self.folder = folder
        self._check_format()
        metadata = read_metadata(folder / METADATA_FILE)
        self.tensors: dict[str, TensorStorageMetadata] = {}
        self._chunks: dict[str, _Chunks] = {}
        for key, value in metadata.state_dict_metadata.items():
            if isinstance(value, TensorStorageMetadata):
                self.tensors[key] = value
                self._chunks[key] = _Chunks(value)
        self._places: dict[MetadataIndex, _StorageInfo] = metadata.storage_data
        self._held: tuple[MetadataIndex, Tensor] | None = None  # the last blob read
        self._check_files()

    def read(self, key: str, offset: Sequence[int], extent: Sequence[int]) -> Tensor:
        """Read a box of a key, with all its axes.

        Raises ValueError where elements are missing or cannot be read.
        """
        wanted = tuple((o, o + e) for o, e in zip(offset, extent, strict=True))
        out = torch.empty(tuple(extent), dtype=self.tensors[key].properties.dtype)
        held = 0
        for index, box in self._chunks[key].near(wanted):
            common = intersect(box, wanted)
            if common is not None:
                blob = self._blob(MetadataIndex(key, index), _extents(box))
                out[_inside(common, wanted)] = blob[_inside(common, box)]
                held += volume(common)
        if held != math.prod(extent):
            raise ValueError(
                f"{self.folder}: {key} at {tuple(offset)} holds {held} of {math.prod(extent)} "
                "elements"
            )
        return out

    def _blob(self, index: MetadataIndex, shape: torch.Size) -> Tensor:
        if self._held is not None and self._held[0] == index:
            return self._held[1]
        self._held = None  # given up before the next is read
        place = self._places[index]
        try:
            with (self.folder / place.relative_path).open("rb") as file:
                file.seek(place.offset)
                data = file.read(place.length)
            tensor = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
            value: Tensor = tensor.view(shape)
        except _DAMAGED as error:
            raise ValueError(f"{self.folder}: {index.fqn} cannot be read: {error}") from error
        self._held = index, value
        return value

    def _check_format(self) -> None:
        path = self.folder / CONFIG_FILE
        if not path.is_file() or not (self.folder / METADATA_FILE).is_file():
            raise ValueError(
                f"{self.folder}: no {CONFIG_FILE} and {METADATA_FILE}; its save was cut short, or "
                "it is not a Megatron-Core distributed checkpoint"
            )
        kind = json.loads(path.read_text()).get("sharded_backend")
        if kind != "torch_dist":
            raise ValueError(f"{path}: sharded_backend is {kind!r}, expected 'torch_dist'")

    def _check_files(self) -> None:
        ends: dict[str, int] = {}
        for place in self._places.values():
            end = place.offset + place.length
            ends[place.relative_path] = max(ends.get(place.relative_path, 0), end)
        problems = []
        for name, end in sorted(ends.items()):
            path = self.folder / name
            if path.parent != self.folder:
                problems.append(f"{name} lies outside the folder")
            elif not path.is_file():
                problems.append(f"{name} is missing")
            elif path.stat().st_size < end:
                problems.append(f"{name} has {path.stat().st_size} bytes, {end} were saved")
        if problems:
            raise ValueError(f"{self.folder} is damaged: " + "; ".join(problems))


def read_metadata(path: Path) -> Metadata:
    """Read `.metadata`.

    Raises ValueError where it is damaged, or names a class that is none of the format's.
    """
    try:
        with path.open("rb") as file:
            found = load_plain(file.read())
    except _DAMAGED as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    if not isinstance(found, Metadata):
        raise ValueError(f"{path} cannot be read: it holds a {type(found).__name__}")
    return found


def load_plain(data: bytes) -> Any:
    """Unpickle what is made of the format's own classes and plain data.

    Raises pickle.UnpicklingError for any other class.
    """
    return _Unpickler(io.BytesIO(data)).load()


class _Unpickler(pickle.Unpickler):
    """Refuses every name but the format's own."""

    def find_class(self, module: str, name: str) -> Any:
        if name not in _CLASSES.get(module, ()):
            raise pickle.UnpicklingError(
                f"it names {module}.{name}, which no checkpoint needs: the file is not to be "
                "trusted"
            )
        if module.startswith("megatron."):  # empty classes, and their package is not needed here
            return type(name, (), {})
        return super().find_class(module, name)


class _Chunks:
    """The boxes of a key, found by place: keys that stack layers have very many."""

    def __init__(self, found: TensorStorageMetadata) -> None:
        boxes = [
            (c.offsets, tuple((o, o + s) for o, s in zip(c.offsets, c.sizes, strict=True)))
            for c in found.chunks
        ]
        self._is_stacked = bool(found.size) and all(box[0][1] - box[0][0] == 1 for _, box in boxes)
        self._by_first: dict[int, list[tuple[torch.Size, Box]]] = collections.defaultdict(list)
        for offsets, box in boxes:
            self._by_first[box[0][0] if self._is_stacked else 0].append((offsets, box))

    def near(self, box: Box) -> Iterable[tuple[torch.Size, Box]]:
        """Give the chunks that may meet a box."""
        firsts = range(*box[0]) if self._is_stacked else (0,)
        return (chunk for first in firsts for chunk in self._by_first.get(first, ()))


def _check_whole(key: str, items: Sequence[Stored]) -> None:
    shape, total = items[0].chunk.shape, sum(volume(item.chunk.box) for item in items)
    if total != math.prod(shape):
        raise ValueError(f"{key}: the ranks hold {total} of {math.prod(shape)} elements")
    if len(kinds := sorted({item.dtype for item in items})) > 1:
        raise ValueError(f"{key}: the ranks hold it in {' and '.join(kinds)}")


def _offsets(box: Box) -> torch.Size:
    return torch.Size([start for start, _ in box])


def _extents(box: Box) -> torch.Size:
    return torch.Size([stop - start for start, stop in box])


def _inside(box: Box, outer: Box) -> tuple[slice, ...]:
    return tuple(slice(a - o, b - o) for (a, b), (o, _) in zip(box, outer, strict=True))


def _write(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
