"""Write a Megatron-Core distributed checkpoint as a Hugging Face model, tensor by tensor."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from mrl.resharding.families import ModelShape
from mrl.resharding.layout import Box, TensorInfo, volume
from mrl.resharding.torch_dist import Part, Slab, form_of, model_keys, slabs
from mrl.resharding.torch_dist_files import DistributedCheckpoint


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
