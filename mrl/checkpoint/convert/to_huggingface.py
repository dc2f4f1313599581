"""Write a Megatron-Core distributed checkpoint as a Hugging Face model, tensor by tensor."""

from __future__ import annotations

import json
import math
import pickle
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint import (
    DefaultLoadPlanner,
    FileSystemReader,
    LoadPlan,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from mrl.checkpoint.convert.torch_dist import CONFIG_FILE, Part, Slab, form_of, model_keys, slabs
from mrl.resharding.families import ModelShape
from mrl.resharding.layout import Box, TensorInfo, volume

METADATA_FILE = ".metadata"
_DAMAGED = (RuntimeError, pickle.UnpicklingError, EOFError, OSError)


class DistributedCheckpoint:
    """A `torch_dist` folder, whose tensors are read in boxes."""

    def __init__(self, folder: Path) -> None:
        """Read the metadata.

        Raises ValueError for another format, and for a checkpoint whose files are cut short.
        """
        self.folder = folder
        self._check_format()
        self._reader = FileSystemReader(folder)
        try:
            metadata = self._reader.read_metadata()
        except _DAMAGED as error:
            raise ValueError(f"{folder / METADATA_FILE} cannot be read: {error}") from error
        self._reader.set_up_storage_reader(metadata, is_coordinator=True)
        self.tensors = {
            key: value
            for key, value in metadata.state_dict_metadata.items()
            if isinstance(value, TensorStorageMetadata)
        }
        self._check_files()

    def read(self, key: str, offset: Sequence[int], extent: Sequence[int]) -> Tensor:
        """Read a box of a key, with all its axes.

        Raises ValueError where elements are missing or cannot be read.
        """
        box = ChunkStorageMetadata(torch.Size(offset), torch.Size(extent))
        items = create_read_items_for_chunk_list(key, self.tensors[key], [box])
        held = sum(math.prod(item.lengths) for item in items)
        if held != math.prod(extent):
            raise ValueError(
                f"{self.folder}: {key} at {tuple(offset)} holds {held} of {math.prod(extent)} "
                "elements"
            )
        out = torch.empty(tuple(extent), dtype=self.tensors[key].properties.dtype)
        try:
            self._reader.read_data(LoadPlan(items), _Into(out)).wait()
        except _DAMAGED as error:
            raise ValueError(f"{self.folder}: {key} cannot be read: {error}") from error
        return out

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
        for place in self._reader.storage_data.values():
            end = place.offset + place.length
            ends[place.relative_path] = max(ends.get(place.relative_path, 0), end)
        problems = []
        for name, end in sorted(ends.items()):
            path = self.folder / name
            if not path.is_file():
                problems.append(f"{name} is missing")
            elif path.stat().st_size < end:
                problems.append(f"{name} has {path.stat().st_size} bytes, {end} were saved")
        if problems:
            raise ValueError(f"{self.folder} is damaged: " + "; ".join(problems))


class CheckpointTensors:
    """The logical tensors of a checkpoint."""

    def __init__(self, checkpoint: DistributedCheckpoint, shape: ModelShape) -> None:
        """Find every tensor of the model.

        Raises ValueError listing missing, unknown and misshapen keys.
        """
        self._checkpoint = checkpoint
        keys = model_keys(checkpoint.tensors)
        every = slabs(shape, form_of(keys))
        self._places = _places(every, checkpoint)
        names = shape.tensors()
        problems = [f"missing {name}" for name in names if name not in self._places]
        problems += _misshapen(every, checkpoint)
        unknown = sorted(set(keys) - {slab.key for slab in every})
        problems += [f"{key} is not of a {shape.model_type} as in config.json" for key in unknown]
        if problems:
            raise ValueError(f"{checkpoint.folder}: " + "; ".join(problems))
        self.infos = {
            name: TensorInfo(info.shape, self._dtype(name)) for name, info in names.items()
        }
        self.num_keys = len(keys)
        self._held: tuple[object, Tensor] | None = None  # the last box read: q, k, v share one

    def read(self, name: str, dtype: str) -> Tensor:
        """Read a logical tensor whole, rounded to `dtype`."""
        out: Tensor | None = None
        for slab, parts in self._places[name]:
            box = _bounds(parts)
            value = self._read_box(slab, box)
            if volume(box) == math.prod(self.infos[name].shape) and len(parts) == 1:
                return value.to(getattr(torch, dtype))
            if out is None:
                out = torch.empty(self.infos[name].shape, dtype=getattr(torch, dtype))
            for part in parts:
                inner = tuple(
                    slice(start - first, stop - first)
                    for (start, stop), (first, _) in zip(part.local, box, strict=True)
                )
                out[tuple(slice(*span) for span in part.box)].copy_(value[inner])
        assert out is not None
        return out

    def _read_box(self, slab: Slab, box: Box) -> Tensor:
        place = (slab.key, slab.index, box)
        if self._held is None or self._held[0] != place:
            self._held = None  # given up before the next is read
            value = self._checkpoint.read(slab.key, slab.offset(box), slab.extent(box))
            self._held = place, value.view(value.shape[len(slab.axes) :])
        return self._held[1]

    def _dtype(self, name: str) -> str:
        slab, _ = self._places[name][0]
        return str(self._checkpoint.tensors[slab.key].properties.dtype).removeprefix("torch.")


class _Into(DefaultLoadPlanner):
    """Put what is read into one tensor."""

    def __init__(self, out: Tensor) -> None:
        super().__init__()
        self._out = out

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        return narrow_tensor_by_index(self._out, read_item.dest_offsets, read_item.lengths)

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Do nothing: it is in place."""


def _places(
    every: Sequence[Slab], checkpoint: DistributedCheckpoint
) -> dict[str, list[tuple[Slab, list[Part]]]]:
    """Map each logical tensor to where it is; of a norm's two names, the one that is there."""
    found: dict[str, list[tuple[Slab, list[Part]]]] = {}
    taken: set[tuple[str, Box]] = set()
    for slab in every:
        if slab.key not in checkpoint.tensors:
            continue
        own: dict[str, list[Part]] = {}
        for part in slab.parts:
            if (part.tensor, part.box) not in taken:
                own.setdefault(part.tensor, []).append(part)
                taken.add((part.tensor, part.box))
        for name, parts in own.items():
            found.setdefault(name, []).append((slab, parts))
    return found


def _misshapen(every: Sequence[Slab], checkpoint: DistributedCheckpoint) -> Iterator[str]:
    shapes = {slab.key: slab for slab in every}
    for key, slab in shapes.items():
        if key not in checkpoint.tensors:
            continue
        stored, wanted = tuple(checkpoint.tensors[key].size), slab.global_shape
        padded = slab.is_vocab and stored[0] >= wanted[0] and stored[1:] == wanted[1:]
        if stored != wanted and not padded:
            yield f"{key} has shape {stored}, config.json says {wanted}"


def _bounds(parts: Sequence[Part]) -> Box:
    sides = [[part.local[dim] for part in parts] for dim in range(len(parts[0].local))]
    return tuple((min(a for a, _ in side), max(b for _, b in side)) for side in sides)
