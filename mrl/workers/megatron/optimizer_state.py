"""Adam's state on disk: in Megatron's `torch_dist` format, for any layout to go on from.

Data-parallel ranks hold flat ranges of their parameters. Every range is cut into boxes of the
checkpoint's keys, which know no layout; a rank writes the boxes that it is the first to hold and
reads those that it needs. Nothing is gathered.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer import ChainedOptimizer, MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params
from torch import Tensor

from mrl.resharding.layout import Box, intersect, translate
from mrl.resharding.torch_dist_files import (
    Chunk,
    DistributedCheckpoint,
    Stored,
    write_chunks,
    write_metadata,
)
from mrl.workers.megatron.places import Place, Places, flat_boxes

FOLDER = "dist_ckpt"  # verl's
SETTINGS_FILE = "optimizer.json"
_PARAM = "fp32_param"  # Megatron's key of a main parameter, beside Adam's own names
_MASTER = "master_param"  # Transformer Engine's
_STEP = "step"
_FORMAT = 1


@dataclass(frozen=True, slots=True)
class _Shard:
    """What an optimizer updates, and the range of a model's parameter that it is."""

    inner: torch.optim.Optimizer
    param: Tensor  # of the optimizer
    name: str  # of the model's parameter
    shape: tuple[int, ...]  # of the model's parameter
    start: int
    stop: int
    sharers: frozenset[int]  # ranks that hold the rest of the parameter


class OptimizerState:
    """What an optimizer and a schedule of one rank remember."""

    def __init__(self, optimizer: MegatronOptimizer, schedule: Any) -> None:
        self.optimizer, self.schedule = optimizer, schedule

    def chunks(
        self, names: Mapping[int, str], places: Places, read: Callable[[Tensor], Tensor]
    ) -> Iterator[tuple[Chunk, Tensor]]:
        """Give what this rank has to write, on the CPU.

        `names` are those of the model's parameters by `id`; `read` gives a tensor's value on the
        CPU wherever it is.
        """
        for shard in self._shards(names):
            own = [p for p in _boxes(shard, places) if p[1].holder in shard.sharers]
            for name, tensor in _tensors(shard) if own else ():
                value = _unscaled(shard, name, read(tensor), read).view(-1)
                for spans, place, box in own:
                    yield _chunk(name, place, box), _part(value, shard.shape, spans)

    def settings(self, read: Callable[[Tensor], Tensor]) -> dict[str, Any]:
        """Give what is no tensor, the same on every rank; `read` as for `chunks`."""
        dtypes: dict[str, set[str]] = {}
        steps: set[int] = set()
        for inner in inner_optimizers(self.optimizer):
            steps |= {int(group[_STEP]) for group in inner.param_groups if _STEP in group}
            for entry in inner.state.values():
                steps |= {int(read(entry[_STEP]))} if _STEP in entry else set()
                for name in entry.keys() - {_STEP}:
                    dtypes.setdefault(name, set()).add(_named(entry[name].dtype))
        return {
            "format": _FORMAT,
            "step": max(steps, default=0),
            "dtypes": {name: sorted(kinds) for name, kinds in sorted(dtypes.items())},
            "schedule": self.schedule.state_dict(),
        }

    def load(self, folder: Path, names: Mapping[int, str], places: Places) -> None:
        """Restore what any layout saved below `folder`; the model's weights are loaded apart.

        Raises ValueError where it is missing, damaged or of other dtypes.
        """
        settings = _read_settings(folder)
        checkpoint = DistributedCheckpoint(folder / FOLDER)
        shards = list(self._shards(names))
        for inner in inner_optimizers(self.optimizer):
            _check_dtypes(folder, inner, settings["dtypes"])
            inner.state.clear()
        for shard in shards:
            found = list(_boxes(shard, places))
            if not found:
                continue  # nothing but padding of the vocabulary: state starts where it is used
            if shard.param.dtype == torch.float32:
                _fill(checkpoint, _PARAM, shard, found, shard.param.data)
            for name, kinds in settings["dtypes"].items():
                _restore(checkpoint, name, "float16" in kinds, shard, found)
            if settings["dtypes"]:
                _set_step(shard, settings[_STEP])
        self.schedule.num_steps = 0  # Megatron adds what it loads to it
        self.schedule.load_state_dict(settings["schedule"])

    def _shards(self, names: Mapping[int, str]) -> Iterator[_Shard]:
        alone = frozenset((dist.get_rank(),))
        for part in parts(self.optimizer):
            inner = part.optimizer
            if isinstance(part, DistributedOptimizer):
                sharers = frozenset(dist.get_process_group_ranks(part.data_parallel_group))
                for model, param in _sharded_pairs(part):
                    span = part._get_model_param_range_map(model)["param"]
                    name, shape = names[id(model)], tuple(model.shape)
                    yield _Shard(inner, param, name, shape, span.start, span.end, sharers)
                continue
            for model, param in _pairs(part):
                name, shape = names[id(model)], tuple(model.shape)
                yield _Shard(inner, param, name, shape, 0, model.numel(), alone)


def parts(optimizer: MegatronOptimizer) -> list[MegatronOptimizer]:
    """Give the optimizers that a role's is made of, where this rank has parameters for them."""
    chained = isinstance(optimizer, ChainedOptimizer)
    found = optimizer.chained_optimizers if chained else [optimizer]
    return [part for part in found if part.optimizer is not None]


def inner_optimizers(optimizer: MegatronOptimizer) -> list[torch.optim.Optimizer]:
    """Give the torch optimizers."""
    return [part.optimizer for part in parts(optimizer)]


def write(folder: Path, chunks: Iterator[tuple[Chunk, Tensor]]) -> tuple[Path, list[Stored]]:
    """Write this rank's chunks below a role's folder; they are on the disk when it ends."""
    path = folder / FOLDER / f"__{dist.get_rank()}_0.distcp"  # as Megatron names it
    return path, write_chunks(path, chunks)


def complete(folder: Path, stored: Sequence[Stored], settings: Mapping[str, Any]) -> None:
    """Write on the first rank what says where all ranks' chunks are; all take part."""
    gathered: list[Sequence[Stored]] = [()] * dist.get_world_size()
    is_first = dist.get_rank() == 0
    dist.gather_object(stored, gathered if is_first else None)
    if is_first:
        every = [item for part in gathered for item in part]
        write_metadata(folder / FOLDER, every, {"checkpoint_version": 3.0})
        with (folder / SETTINGS_FILE).open("w", encoding="utf-8") as file:
            json.dump(settings, file, indent=1)
            file.flush()
            os.fsync(file.fileno())


def _pairs(part: MegatronOptimizer) -> Iterator[tuple[Tensor, Tensor]]:
    """Pair the model's parameters with those that a whole optimizer updates."""
    if isinstance(part, Float16OptimizerWithFloat16Params):
        for models, mains in zip(part.float16_groups, part.fp32_from_float16_groups, strict=True):
            yield from zip(models, mains, strict=True)
        groups = part.fp32_from_fp32_groups
    else:
        groups = [group["params"] for group in part.optimizer.param_groups]
    yield from ((param, param) for group in groups for param in group)


def _sharded_pairs(part: DistributedOptimizer) -> Iterator[tuple[Tensor, Tensor]]:
    """Pair the model's parameters with the ranges of them that this rank updates."""
    # Not by Megatron's own map of places: an optimizer's group has its float32 parameters first,
    # the map has them where the model does.
    precise = part.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8
    half = part.shard_float16_groups if precise else part.shard_fp32_from_float16_groups
    for models, params in (
        (part.model_fp32_groups, part.shard_fp32_groups),
        (part.model_float16_groups, half),
    ):
        for group, own in zip(models, params, strict=True):
            yield from zip(group, own, strict=True)


def _tensors(shard: _Shard) -> Iterator[tuple[str, Tensor]]:
    if shard.param.dtype == torch.float32:  # else the weights' files hold it
        yield _PARAM, shard.param
    for name, value in shard.inner.state.get(shard.param, {}).items():
        if name != _STEP:
            yield name, value


def _boxes(shard: _Shard, places: Places) -> Iterator[tuple[tuple[Box, int, Box], Place, Box]]:
    """Cut a shard: (the run it is in, where that starts in the shard, the box), place, its box."""
    at = 0
    for run in flat_boxes(shard.shape, shard.start, shard.stop):
        for place in places[shard.name]:
            common = intersect(run, place.local)
            if common is not None:
                yield (run, at, common), place, translate(common, place.local, place.box)
        at += math.prod(stop - start for start, stop in run)


def _part(flat: Tensor, shape: Sequence[int], spans: tuple[Box, int, Box]) -> Tensor:
    """Give the view of a box in a shard's elements."""
    run, at, box = spans
    extents = [stop - start for start, stop in run]
    view = flat[at : at + math.prod(extents)].view(extents)
    inner = (slice(a - o, b - o) for (a, b), (o, _) in zip(box, run, strict=True))
    return view[tuple(inner)]


def _chunk(name: str, place: Place, box: Box) -> Chunk:
    slab = place.slab
    index = tuple((i, i + 1) for i in slab.index)
    return Chunk(f"optimizer.state.{name}.{slab.key}", slab.global_shape, (*index, *box))


def _fill(
    checkpoint: DistributedCheckpoint,
    name: str,
    shard: _Shard,
    found: Sequence[tuple[tuple[Box, int, Box], Place, Box]],
    out: Tensor,
) -> None:
    """Read a shard's elements into `out`; the padding of a vocabulary stays as it is."""
    flat = out.view(-1)
    for spans, place, box in found:
        chunk = _chunk(name, place, box)
        if chunk.key not in checkpoint.tensors:
            raise ValueError(f"{checkpoint.folder} lacks {chunk.key}: it is of another model")
        offset = [start for start, _ in chunk.box]
        value = checkpoint.read(chunk.key, offset, [stop - start for start, stop in chunk.box])
        target = _part(flat, shard.shape, spans)
        target.copy_(value.view(target.shape))


def _restore(
    checkpoint: DistributedCheckpoint,
    name: str,
    is_scaled: bool,
    shard: _Shard,
    found: Sequence[tuple[tuple[Box, int, Box], Place, Box]],
) -> None:
    inner, param = shard.inner, shard.param
    keys = {_chunk(name, place, box).key for _, place, box in found} & checkpoint.tensors.keys()
    if not keys and name == _MASTER:  # what is float32 already has none
        return
    dtype = checkpoint.tensors[min(keys)].properties.dtype if keys else torch.float32
    value = torch.zeros(param.shape, dtype=dtype)
    _fill(checkpoint, name, shard, found, value)
    if is_scaled:
        inner.set_scaled_state(param, name, value.to(param.device))
        return
    inner.state[param][name] = value.to(param.device)
    if hasattr(inner, "_scales") and dtype == torch.bfloat16:  # of this dtype they are all 1
        inner._scales.setdefault(param, {})[name] = torch.ones(1, device=param.device)


def _unscaled(shard: _Shard, name: str, value: Tensor, read: Callable[[Tensor], Tensor]) -> Tensor:
    # Transformer Engine's fused Adam divides what it keeps in float16 by a scale a tensor
    if value.dtype != torch.float16:
        return value
    return value.float() * read(shard.inner._scales[shard.param][name])


def _set_step(shard: _Shard, step: int) -> None:
    if isinstance(shard.inner, torch.optim.Adam | torch.optim.AdamW):  # counted a parameter
        shard.inner.state[shard.param][_STEP] = torch.tensor(float(step))
        return
    for group in shard.inner.param_groups:
        group[_STEP] = step


def _check_dtypes(
    folder: Path, inner: torch.optim.Optimizer, saved: Mapping[str, Sequence[str]]
) -> None:
    """Raise ValueError where state was saved in other dtypes than this run's."""
    wanted = {"exp_avg": ["float32"], "exp_avg_sq": ["float32"]}
    if hasattr(inner, "name_to_dtype_map"):  # Transformer Engine's
        wanted = {name: [_named(dtype)] for name, dtype in inner.name_to_dtype_map.items()}
        wanted[_MASTER].append("int16")  # the half of a float32 that bfloat16 parameters lack
        if saved and inner.master_weights and _MASTER not in saved:
            raise ValueError(
                f"{folder} holds no {_MASTER}: it was saved without "
                "optim.use_precision_aware_optimizer; resume without it"
            )
    for name, kinds in saved.items():
        legal = wanted.get(name, [])
        if not set(kinds) <= set(legal):
            raise ValueError(
                f"{folder} holds {name} in {' and '.join(kinds)}, this run's optimizer has "
                f"{legal[0] if legal else 'none'}; resume with the "
                "optim.use_precision_aware_optimizer and optim.*_dtype that saved it"
            )


def _named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _read_settings(folder: Path) -> dict[str, Any]:
    path = folder / SETTINGS_FILE
    if not path.is_file():
        raise ValueError(
            f"{path} is missing: {folder} is of an older mrl, or no checkpoint of a trained role; "
            f"resume with the version that saved it, or start anew from "
            f"model.path={folder / 'huggingface'}"
        )
    settings: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if settings.get("format") != _FORMAT:
        raise ValueError(f"{path} has format {settings.get('format')}, this mrl reads {_FORMAT}")
    return settings
