"""Hugging Face model folders as a layout: what the files hold, and what an export will write.

Only safetensors headers are read here, without torch, so that a launcher can refuse a bad folder
before any worker starts. `hf_files` reads and writes the elements.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mrl.resharding.families import ModelShape
from mrl.resharding.layout import FILE_RANK, Layout, Piece, TensorInfo, volume, whole

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
DEFAULT_SHARD_BYTES = 5 * 10**9  # as transformers writes them

_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_CHUNK_BYTES = 16 * 1024**2


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a safetensors file, by byte range."""

    file: Path
    info: TensorInfo
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Shard:
    """One file of an export and the rank that writes it."""

    file: str
    rank: int
    tensors: tuple[str, ...]


def read_headers(folder: Path) -> dict[str, StoredTensor]:
    """List the tensors of a model folder (one file, or many with an index).

    Raises FileNotFoundError where the folder has no safetensors weights or lacks a file that its
    index names, and ValueError where index and files disagree or a file is damaged.
    """
    folder = Path(folder)
    if (folder / INDEX_FILE).is_file():
        weight_map: dict[str, str] = json.loads((folder / INDEX_FILE).read_text())["weight_map"]
        files = sorted(set(weight_map.values()))
    elif (folder / SINGLE_FILE).is_file():
        weight_map, files = {}, [SINGLE_FILE]
    else:
        raise FileNotFoundError(
            f"{folder}: no model weights; expected {SINGLE_FILE} or {INDEX_FILE}"
        )
    stored: dict[str, StoredTensor] = {}
    for file in files:
        if not (folder / file).is_file():
            raise FileNotFoundError(f"{folder / file}: named by {INDEX_FILE}, but absent")
        stored.update(_read_header(folder / file))
    lost = sorted(name for name in weight_map if name not in stored)
    if lost:
        raise ValueError(f"{folder}: {INDEX_FILE} names {', '.join(lost)}, which no file holds")
    return stored


def _read_header(path: Path) -> Iterator[tuple[str, StoredTensor]]:
    # format: 8 bytes little-endian header length, JSON header, then the elements
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 + length:
            raise ValueError(f"{path}: damaged, header of {length} bytes in a file of {size}")
        header = json.loads(file.read(length))
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        dtype = _DTYPES.get(entry["dtype"], entry["dtype"])
        start, stop = (8 + length + offset for offset in entry["data_offsets"])
        if stop > size:
            raise ValueError(f"{path}: damaged, {name} ends at byte {stop} of {size}")
        yield name, StoredTensor(path, TensorInfo(tuple(entry["shape"]), dtype), start, stop)


def hf_layout(folder: Path, shape: ModelShape, has_lm_head: bool = True) -> Layout:
    """Lay out a checkpoint's tensors, all held by `FILE_RANK` under their own names.

    `has_lm_head` False leaves the head out (critics). A tied model's file may carry an equal copy
    of the embedding as head; it is left out too. Raises ValueError listing missing, unknown and
    misshapen tensors, or a tied head that differs from the embedding.
    """
    stored = read_headers(folder)
    wanted = shape.tensors(lm_head=has_lm_head)
    problems = [f"missing {name}" for name in wanted if name not in stored]
    for name, tensor in stored.items():
        if name in wanted:
            if tensor.info.shape != wanted[name].shape:
                problems.append(
                    f"{name} has shape {tensor.info.shape}, config.json says {wanted[name].shape}"
                )
            if tensor.info.dtype not in _DTYPES.values():
                problems.append(f"{name} has unsupported dtype {tensor.info.dtype}")
        elif not shape.ignores(name) and name != _head(shape):
            problems.append(f"unknown tensor {name}")
    if problems:
        raise ValueError(f"{folder}: " + "; ".join(problems))
    if shape.tie_word_embeddings and _head(shape) in stored:
        _check_tied_head(stored[_head(shape)], stored[_embedding(shape)], folder)
    tensors = {name: stored[name].info for name in wanted}
    pieces = tuple(
        Piece(name, whole(info.shape), (FILE_RANK,), name, whole(info.shape))
        for name, info in tensors.items()
    )
    return Layout("hf", tensors, pieces)


def _head(shape: ModelShape) -> str:
    return shape.family.lm_head.logical[0].name


def _embedding(shape: ModelShape) -> str:
    return shape.family.embedding.logical[0].name


def _check_tied_head(head: StoredTensor, embedding: StoredTensor, folder: Path) -> None:
    if head.info != embedding.info or not _same_bytes(head, embedding):
        raise ValueError(
            f"{folder}: config.json says tie_word_embeddings=true, but the head differs from the "
            f"embedding; set it to false to train the head, or remove the head from the file"
        )


def _same_bytes(a: StoredTensor, b: StoredTensor) -> bool:
    with a.file.open("rb") as file_a, b.file.open("rb") as file_b:
        file_a.seek(a.start)
        file_b.seek(b.start)
        left = a.stop - a.start
        while left > 0:
            count = min(left, _CHUNK_BYTES)
            if file_a.read(count) != file_b.read(count):
                return False
            left -= count
    return True


def group_files(
    infos: Mapping[str, TensorInfo], max_bytes: int = DEFAULT_SHARD_BYTES
) -> dict[str, tuple[str, ...]]:
    """List the tensors of each file: at most `max_bytes` or one tensor, by transformers' names."""
    groups: list[list[str]] = [[]]
    size = 0
    for name, info in infos.items():
        if groups[-1] and size + info.num_bytes > max_bytes:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += info.num_bytes
    if len(groups) == 1:
        return {SINGLE_FILE: tuple(groups[0])}
    return {
        f"model-{index:05d}-of-{len(groups):05d}.safetensors": tuple(names)
        for index, names in enumerate(groups, start=1)
    }


def plan_shards(
    src: Layout, infos: Mapping[str, TensorInfo], max_shard_bytes: int = DEFAULT_SHARD_BYTES
) -> tuple[Shard, ...]:
    """Cut a model into files of at most `max_shard_bytes` and give each file to a rank.

    `infos` are the tensors as they will be written. A file goes to the rank that has been given
    fewest so far and, among those, holds most of the file's elements.
    """
    held: dict[str, dict[int, int]] = defaultdict(lambda: defaultdict(int))
    for piece in src.pieces:
        for rank in piece.ranks:
            held[piece.tensor][rank] += volume(piece.box) * infos[piece.tensor].item_bytes
    given: dict[int, int] = dict.fromkeys(src.ranks, 0)
    shards = []
    for file, names in group_files(infos, max_shard_bytes).items():
        rank = min(
            src.ranks,
            key=lambda rank: (given[rank], -sum(held[name].get(rank, 0) for name in names), rank),
        )
        given[rank] += 1
        shards.append(Shard(file, rank, names))
    return tuple(shards)


def shard_layout(shards: Sequence[Shard], tensors: Mapping[str, TensorInfo]) -> Layout:
    """Lay out the tensors of some shards whole on the ranks that write them."""
    chosen = {name: tensors[name] for shard in shards for name in shard.tensors}
    pieces = tuple(
        Piece(name, whole(tensors[name].shape), (shard.rank,), name, whole(tensors[name].shape))
        for shard in shards
        for name in shard.tensors
    )
    return Layout("hf", chosen, pieces)
