"""Read checkpoint files into live parameters, and write live parameters as a checkpoint.

Loading reads only the slices that a rank needs. Exporting moves each tensor to the one rank that
writes its file, through the planner and transport of the weight sync; no rank needs more memory
than one file.
"""

from __future__ import annotations

import json
import shutil
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from mrl.resharding.coverage import padding_of, view_of
from mrl.resharding.families import ModelShape
from mrl.resharding.hf import (
    DEFAULT_SHARD_BYTES,
    INDEX_FILE,
    SINGLE_FILE,
    Shard,
    plan_shards,
    read_headers,
    shard_layout,
)
from mrl.resharding.layout import FILE_RANK, Layout, TensorInfo
from mrl.resharding.planner import DEFAULT_BUCKET_BYTES, Copy, ReshardPlan, plan
from mrl.resharding.sync import Resharder
from mrl.resharding.transports import Transport

_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack")


@torch.no_grad()
def load_into(folder: Path, plan: ReshardPlan, rank: int, params: Mapping[str, Tensor]) -> None:
    """Fill a rank's parameters from a checkpoint folder, converting to their dtypes.

    `plan` starts from `hf.hf_layout(folder, ...)`; `params` are all parameters that the
    destination layout knows. Padding becomes zero. Raises ValueError where parameters and layout
    disagree, before anything is written.
    """
    for view in padding_of(plan.dst, rank, params):
        view.zero_()
    stored = read_headers(folder)
    by_file: dict[Path, list[Copy]] = defaultdict(list)
    for copy in (copy for bucket in plan.share(rank) for copy in bucket):
        if copy.src_rank != FILE_RANK:
            raise ValueError(f"{copy.tensor}: source is rank {copy.src_rank}, not a file")
        by_file[stored[copy.src_param].file].append(copy)
    for path, copies in by_file.items():
        with safe_open(path, framework="pt") as file:
            for copy in sorted(copies, key=lambda copy: stored[copy.src_param].start):
                rows = tuple(slice(start, stop) for start, stop in copy.src_box)
                value = file.get_slice(copy.src_param)[rows]
                view_of(params[copy.dst_param], copy.dst_box).copy_(value)


class HFWriter:
    """Write a model that ranks hold in pieces as a Hugging Face folder.

    `source` is the folder that the model came from: its config.json and tokenizer files are
    copied. Tensors get `dtype`, which the new config.json then states (None: the source's), but for
    those that the family fixes to float32. All ranks of `src` construct and use the writer
    together; `folder` must be visible to all and hold no weights yet, otherwise ValueError.
    """

    def __init__(
        self,
        folder: Path,
        source: Path,
        src: Layout,
        rank: int,
        params: Mapping[str, Tensor],
        transport: Transport,
        max_shard_bytes: int = DEFAULT_SHARD_BYTES,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        dtype: str | None = None,
    ) -> None:
        self._folder, self._source = Path(folder), Path(source)
        self._src, self._rank, self._params = src, rank, params
        self._transport, self._bucket_bytes = transport, bucket_bytes
        if self._folder.is_dir() and list(self._folder.glob("*.safetensors")):
            raise ValueError(f"{self._folder}: already holds weights, export to an empty folder")
        shape = ModelShape.from_folder(self._source)
        self._dtype = dtype or shape.dtype
        exact = shape.tensors(self._dtype)  # what a family keeps in float32 stays so
        self._tensors = {
            name: TensorInfo(info.shape, exact[name].dtype) for name, info in src.tensors.items()
        }
        padding_of(src, rank, params)  # every parameter is known and all of it is exported
        self.shards = plan_shards(src, self._tensors, max_shard_bytes)

    @property
    def rounds(self) -> int:
        """Count the rounds: in each, a rank writes at most one file."""
        return -(-len(self.shards) // len(self._src.ranks))

    def write(self) -> None:
        """Write all files; the folder is complete when it returns on any rank."""
        for index in range(self.rounds):
            resharder, tensors = self.round(index)
            resharder.run()
            self.save(index, tensors)
        self._transport.gather(None)  # all files are there
        self.write_rest()
        self._transport.gather(None)

    def collect(self) -> Callable[[], None]:
        """Copy this rank's files to the host; give what writes them, for any thread to call.

        The folder is complete when all ranks have called it.
        """
        held: list[dict[str, Tensor]] = []
        for index in range(self.rounds):
            resharder, tensors = self.round(index)
            resharder.run()
            held.append({name: tensor.to("cpu", copy=True) for name, tensor in tensors.items()})

        def write() -> None:
            for index in range(self.rounds):
                self.save(index, held[index])
                held[index] = {}
            self.write_rest()

        return write

    @property
    def own_files(self) -> list[Path]:
        """List the files that this rank writes, once they are there."""
        own = [self._folder / shard.file for shard in self.shards if shard.rank == self._rank]
        if self._rank == self._src.ranks[0]:  # others write weights meanwhile
            rest = (path for path in self._folder.iterdir() if path.suffix != ".safetensors")
            own += [path for path in rest if not path.name.startswith(".")]
        return own

    def round(self, index: int) -> tuple[Resharder, dict[str, Tensor]]:
        """Prepare a round: the resharder to run, and the tensors that it fills on this rank."""
        shards = self._shards_of_round(index)
        dst = shard_layout(shards, self._tensors)
        src = self._src.restrict(dst.tensors.keys())
        needed = {piece.param for piece in src.pieces_of(self._rank)}
        device = next(iter(self._params.values())).device
        tensors = {
            name: torch.empty(
                self._tensors[name].shape,
                dtype=getattr(torch, self._tensors[name].dtype),
                device=device,
            )
            for shard in shards
            if shard.rank == self._rank
            for name in shard.tensors
        }
        params = {name: param for name, param in self._params.items() if name in needed}
        steps = plan(src, dst, self._bucket_bytes)
        return Resharder(steps, self._rank, params, tensors, self._transport), tensors

    def save(self, index: int, tensors: Mapping[str, Tensor]) -> None:
        """Write this rank's file of a round, if it has one."""
        for shard in self._shards_of_round(index):
            if shard.rank == self._rank:
                self._folder.mkdir(parents=True, exist_ok=True)
                host = {name: tensors[name].cpu() for name in shard.tensors}
                save_file(host, self._folder / shard.file, metadata={"format": "pt"})

    def write_rest(self) -> None:
        """Write index, config.json and tokenizer files, on the first rank."""
        if self._rank != self._src.ranks[0]:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        if self.shards[0].file != SINGLE_FILE:
            index = {
                "metadata": {"total_size": sum(i.num_bytes for i in self._tensors.values())},
                "weight_map": {name: s.file for s in self.shards for name in s.tensors},
            }
            (self._folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")
        copy_description(self._source, self._folder)
        _state_dtype(self._folder / "config.json", self._dtype)

    def _shards_of_round(self, index: int) -> Sequence[Shard]:
        count = len(self._src.ranks)
        return self.shards[index * count : (index + 1) * count]


def copy_description(source: Path, folder: Path) -> None:
    """Copy config, tokenizer and generation files (all but weights) of a model folder."""
    for path in sorted(Path(source).iterdir()):
        is_weights = path.suffix in _WEIGHT_SUFFIXES or path.name.endswith(".index.json")
        if path.is_file() and not is_weights and not path.name.startswith("."):
            shutil.copy2(path, Path(folder) / path.name)


def _state_dtype(path: Path, dtype: str) -> None:
    config = json.loads(path.read_text())
    # transformers wrote torch_dtype up to version 4 and reads it still
    config[next((key for key in ("dtype", "torch_dtype") if key in config), "dtype")] = dtype
    path.write_text(json.dumps(config, indent=2) + "\n")
