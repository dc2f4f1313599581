"""Write a Hugging Face model as a Megatron-Core distributed checkpoint, tensor by tensor.

PyTorch's own `torch.distributed.checkpoint` writer makes the files, as if ranks came one after
another: each writes one file, whose record is kept, so that a rerun goes on after it.
"""

from __future__ import annotations

import io
import json
import pickle
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter, SavePlan
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from mrl.checkpoint.atomic import sync_to_disk
from mrl.checkpoint.convert.draft import Draft
from mrl.checkpoint.convert.elements import read_into
from mrl.checkpoint.convert.progress import Progress
from mrl.resharding.hf import StoredTensor
from mrl.resharding.layout import DTYPE_BYTES, Box, intersect, translate, volume
from mrl.resharding.torch_dist import (
    COMMON_STATE,
    CONFIG_FILE,
    FORMAT,
    KEY_FORMS,
    Slab,
    extra_states,
    form_of,
)
from mrl.resharding.torch_dist_files import load_plain

_RECORDS = "records"


class CheckpointWriter(DefaultSavePlanner):
    """The plan of a checkpoint's files, and the source of their elements."""

    def __init__(
        self,
        slabs: Sequence[Slab],
        stored: Mapping[str, StoredTensor],
        dtypes: Mapping[str, str],
        max_file_bytes: int,
    ) -> None:
        """Plan; `dtypes` gives each logical tensor's dtype in the checkpoint.

        Raises ValueError where tensors of one key would differ in dtype.
        """
        super().__init__(flatten_state_dict=False)
        self._stored = stored
        self._dtypes = _key_dtypes(slabs, dtypes)
        self._slabs: dict[MetadataIndex, tuple[Slab, Box]] = {}
        self._bytes: dict[MetadataIndex, io.BytesIO] = {}
        self._last = torch.empty(0)
        plans = [SavePlan(items) for items in self._files(slabs, max_file_bytes)]
        self.plans: list[SavePlan]
        self.metadata: Metadata
        self.plans, self.metadata = create_default_global_save_plan(plans)

    @property
    def num_bytes(self) -> list[int]:
        """Give the bytes of the elements of each file."""
        return [sum(map(self._item_bytes, plan.items)) for plan in self.plans]

    def write(self, draft: Draft, progress: Progress) -> None:
        """Write the files that the draft lacks, then the metadata."""
        writer = FileSystemWriter(draft.path, thread_count=1, per_thread_copy_ahead=0)
        writer.set_up_storage_writer(is_coordinator=True)
        results, sizes = [], self.num_bytes
        for index, plan in enumerate(writer.prepare_global_plan(self.plans)):
            record = draft.path / _RECORDS / f"{index:05d}.pickle"
            done = _read_record(record, draft.path)
            is_kept = done is not None
            if done is None:
                done = writer.write_data(plan, self).wait()
                _write_record(record, done)
            results.append(done)
            progress.advance(sizes[index], is_kept)
        self._release()
        writer.finish(self.metadata, results)
        (draft.path / CONFIG_FILE).write_text(json.dumps(FORMAT))
        for record in sorted((draft.path / _RECORDS).iterdir()):
            record.unlink()
        (draft.path / _RECORDS).rmdir()

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        """Read one item's elements; the previous item's are given up.

        PyTorch's writer keeps every tensor of a file until the file is complete, so their memory
        is taken from under it.
        """
        self._release()
        if write_item.type == WriteItemType.BYTE_IO:
            return self._bytes[write_item.index]
        slab, box = self._slabs[write_item.index]
        value = torch.zeros(slab.extent(box), dtype=getattr(torch, self._dtypes[slab.key]))
        inner = value.view(value.shape[len(slab.axes) :])
        for part in slab.parts:
            common = intersect(part.local, box)
            if common is None:
                continue
            place = tuple(
                slice(start - first, stop - first)
                for (start, stop), (first, _) in zip(common, box, strict=True)
            )
            source = translate(common, part.local, part.box)
            read_into(self._stored[part.tensor], source, inner[place])
        self._last = value
        return value

    def _release(self) -> None:
        self._last.untyped_storage().resize_(0)

    def _files(self, slabs: Sequence[Slab], max_bytes: int) -> Iterator[list[WriteItem]]:
        items = [self._object(key, [None]) for key in extra_states(slabs)]
        items.append(self._object(COMMON_STATE, [_common_state(slabs)]))
        size = 0
        for slab in slabs:
            for box in slab.cuts:
                item = self._tensor(slab, box)
                if size and size + self._item_bytes(item) > max_bytes:
                    yield items
                    items, size = [], 0
                items.append(item)
                size += self._item_bytes(item)
        yield items

    def _object(self, key: str, value: object) -> WriteItem:
        stream, index = io.BytesIO(), MetadataIndex(key)
        torch.save(value, stream)
        self._bytes[index] = stream
        return WriteItem(index, WriteItemType.BYTE_IO)

    def _tensor(self, slab: Slab, box: Box) -> WriteItem:
        offsets, sizes = torch.Size(slab.offset(box)), torch.Size(slab.extent(box))
        index = MetadataIndex(slab.key, offsets)
        self._slabs[index] = slab, box
        properties = TensorProperties(dtype=getattr(torch, self._dtypes[slab.key]))
        chunk = ChunkStorageMetadata(offsets=offsets, sizes=sizes)
        data = TensorWriteData(chunk, properties, torch.Size(slab.global_shape))
        return WriteItem(index, WriteItemType.SHARD, tensor_data=data)

    def _item_bytes(self, item: WriteItem) -> int:
        if item.type == WriteItemType.BYTE_IO:
            return self._bytes[item.index].getbuffer().nbytes
        slab, box = self._slabs[item.index]
        return volume(box) * DTYPE_BYTES[self._dtypes[slab.key]]


def _common_state(slabs: Sequence[Slab]) -> dict[str, object]:
    # 3.0 tells Megatron-LM that query, key and value rows need no reordering
    state: dict[str, object] = {"checkpoint_version": 3.0}
    form = form_of({slab.key for slab in slabs})
    if form != "stacked":  # Megatron-LM then asks its model for the same keys
        state["content_metadata"] = dict(KEY_FORMS[form])
    return state


def _key_dtypes(slabs: Sequence[Slab], dtypes: Mapping[str, str]) -> dict[str, str]:
    found: dict[str, dict[str, str]] = {}
    for slab in slabs:
        for part in slab.parts:
            found.setdefault(slab.key, {}).setdefault(dtypes[part.tensor], part.tensor)
    mixed = [
        f"{key} ({', '.join(f'{tensor}: {dtype}' for dtype, tensor in kinds.items())})"
        for key, kinds in found.items()
        if len(kinds) > 1
    ]
    if mixed:
        raise ValueError(
            "tensors of one Megatron key have different dtypes; choose one with --dtype: "
            + "; ".join(mixed)
        )
    return {key: next(iter(kinds)) for key, kinds in found.items()}


def _write_record(path: Path, results: list[WriteResult]) -> None:
    path.parent.mkdir(exist_ok=True)
    draft = path.with_name(f"{path.name}.part")
    draft.write_bytes(pickle.dumps(results))
    sync_to_disk(draft)
    draft.rename(path)
    sync_to_disk(path.parent)


def _read_record(path: Path, folder: Path) -> list[WriteResult] | None:
    """Give what a file holds when it was written completely before, else None."""
    if not path.is_file():
        return None
    results: list[WriteResult] = load_plain(path.read_bytes())
    ends: dict[str, int] = {}
    for result in results:
        place = result.storage_data
        ends[place.relative_path] = max(
            ends.get(place.relative_path, 0), place.offset + place.length
        )
    complete = all(
        (folder / name).is_file() and (folder / name).stat().st_size == end
        for name, end in ends.items()
    )
    return results if complete else None
