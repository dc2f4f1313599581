"""The two directions of `mrl convert`: check everything, then write file by file."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from mrl.checkpoint.convert.draft import Draft, check_free, check_space, check_whole, draft_of
from mrl.checkpoint.convert.elements import file_bytes, write_file
from mrl.checkpoint.convert.progress import Progress, size
from mrl.checkpoint.convert.to_huggingface import CheckpointTensors
from mrl.checkpoint.convert.to_megatron import CheckpointWriter
from mrl.config.stages import layers_of_chunk
from mrl.resharding.families import ModelShape
from mrl.resharding.hf import (
    DEFAULT_SHARD_BYTES,
    INDEX_FILE,
    SINGLE_FILE,
    group_files,
    hf_layout,
    read_headers,
)
from mrl.resharding.hf_files import copy_description
from mrl.resharding.layout import DTYPE_BYTES, TensorInfo
from mrl.resharding.megatron import MegatronLayout
from mrl.resharding.torch_dist import CONFIG_FILE, KEY_FORMS, form_of, slabs
from mrl.resharding.torch_dist_files import DistributedCheckpoint

DIRECTIONS = ("megatron", "hf")
DESCRIPTION = "huggingface"  # in a Megatron checkpoint: config, tokenizer, generation settings
_RECORD = "mrl_convert.json"  # in there too: the files that the model came from
_KEPT_WEIGHTS = ("value_head.safetensors",)  # a critic's: no tensor of the model
_TRACKER = "latest_checkpointed_iteration.txt"  # Megatron-LM's, beside its checkpoints
_SLACK_BYTES = 16 * 1024**2


@dataclass(frozen=True, slots=True)
class Options:
    """How to convert."""

    to: str | None = None  # a member of DIRECTIONS; None: the other than the source's
    tp: int = 1  # of the ranks that will load it: each then reads its own slices alone
    pp: int = 1
    vpp: int = 1
    ep: int = 1
    etp: int | None = None  # None: tp
    keys: str = "auto"  # auto, or one of KEY_FORMS
    dtype: str | None = None  # None: as stored
    max_shard_bytes: int | None = None  # None: the source's own files, else 5 GB
    config: Path | None = None  # a Hugging Face folder that describes a Megatron checkpoint


Say = Callable[[str], None]


def convert(source: Path, target: Path, options: Options, say: Say = print) -> None:
    """Write `source` in the other format as `target`; all is checked before the first byte.

    Raises ValueError or FileNotFoundError saying what is wrong with the source, the target, the
    options or the disk.
    """
    source, target = source.absolute(), target.absolute()
    check_whole(source)
    check_free(target)
    _check_options(options)
    found = _direction(source)
    if options.to is not None and options.to != found:
        kind = "a Megatron checkpoint" if found == "hf" else "a Hugging Face folder"
        raise ValueError(f"--to {options.to}: {source} is {kind} already")
    if found == "megatron":
        _to_megatron(source, target, options, say)
    else:
        _to_huggingface(_iteration(source), target, options, say)


def _check_options(options: Options) -> None:
    problems = [
        f"--{name} {value}: expected a positive number"
        for name in ("tp", "pp", "vpp", "ep", "etp", "max_shard_bytes")
        if (value := asdict(options)[name]) is not None and value < 1
    ]
    if options.dtype is not None and options.dtype not in DTYPE_BYTES:
        problems.append(f"--dtype {options.dtype}: expected one of {', '.join(DTYPE_BYTES)}")
    if options.keys not in ("auto", *KEY_FORMS):
        problems.append(f"--keys {options.keys}: expected auto, {', '.join(KEY_FORMS)}")
    if problems:
        raise ValueError("; ".join(problems))


def _direction(source: Path) -> str:
    if not source.is_dir():
        raise FileNotFoundError(f"{source}: no such folder")
    if (source / CONFIG_FILE).is_file() or (source / _TRACKER).is_file():
        return "hf"
    if (source / "config.json").is_file():
        return "megatron"
    raise ValueError(
        f"{source}: neither a Hugging Face folder (config.json) nor a complete Megatron "
        f"distributed checkpoint ({CONFIG_FILE}, or {_TRACKER} above it)"
    )


def _iteration(source: Path) -> Path:
    """Follow Megatron-LM's tracker to its newest checkpoint."""
    if (source / CONFIG_FILE).is_file():
        return source
    text = (source / _TRACKER).read_text().strip()
    if text != "release" and not text.isdecimal():
        raise ValueError(f"{source / _TRACKER}: found {text!r}, expected a number or release")
    return source / (text if text == "release" else f"iter_{int(text):07d}")


def _to_megatron(source: Path, target: Path, options: Options, say: Say) -> None:
    shape = ModelShape.from_folder(source)
    _check_layout(shape, options)
    stored = read_headers(source)
    held = hf_layout(source, shape).tensors
    wanted = held if options.dtype is None else shape.tensors(options.dtype)
    dtypes = {name: info.dtype for name, info in wanted.items()}
    form = None if options.keys == "auto" else options.keys
    pieces = slabs(shape, form, options.tp, options.etp)
    limit = options.max_shard_bytes or DEFAULT_SHARD_BYTES
    writer = CheckpointWriter(pieces, stored, dtypes, limit)
    sizes = writer.num_bytes
    _check_space(target, sum(sizes))
    say(
        f"{source} ({shape.model_type}, {len(held)} tensors, {_dtypes(held)}) -> {target} "
        f"(Megatron, {len(writer.metadata.state_dict_metadata)} keys, "
        f"{form_of({slab.key for slab in pieces})}, {_dtypes(wanted)}, {size(sum(sizes))})"
    )
    _say_rounding(held, wanted, say)
    head = shape.family.lm_head.logical[0].name  # a tied copy: it comes back from the embedding
    left_out = sorted(stored.keys() - held.keys() - {head})
    if left_out:
        shown = ", ".join(left_out[:4]) + (", ..." if len(left_out) > 4 else "")
        say(f"not converted, as they are no parameters of the model: {len(left_out)}, {shown}")
    draft = Draft(target, _job(source, options))
    _say_draft(draft, say)
    writer.write(draft, Progress(len(sizes), sum(sizes), say))
    _describe(source, draft.path / DESCRIPTION, stored)
    draft.commit()
    say(f"done: {target}")


def _describe(source: Path, folder: Path, stored: Mapping[str, Any]) -> None:
    """Keep what is no tensor, and which file held which tensor."""
    folder.mkdir(exist_ok=True)
    _copy_description(source, folder)
    index = source / INDEX_FILE
    record = {
        "weight_map": {name: tensor.file.name for name, tensor in stored.items()},
        "index": index.read_text() if index.is_file() else None,
    }
    (folder / _RECORD).write_text(json.dumps(record, indent=1) + "\n")


def _copy_description(source: Path, folder: Path) -> None:
    copy_description(source, folder)
    for name in _KEPT_WEIGHTS:
        if (source / name).is_file():
            shutil.copy2(source / name, folder / name)


def _to_huggingface(source: Path, target: Path, options: Options, say: Say) -> None:
    check_whole(source)
    given = Options(to=options.to, dtype=options.dtype, config=options.config)
    if replace(options, max_shard_bytes=None) != given:
        say("tp, pp, vpp, ep, etp and keys play no part: the checkpoint says how it is cut")
    folder = options.config or source / DESCRIPTION
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(
            f"{folder / 'config.json'} is not there: name a Hugging Face folder with the model's "
            "config.json and tokenizer (--config FOLDER)"
        )
    shape = ModelShape.from_folder(folder)
    checkpoint = DistributedCheckpoint(source)
    tensors = CheckpointTensors(checkpoint, shape)
    wanted = dict(tensors.infos if options.dtype is None else shape.tensors(options.dtype))
    record = _record(source / DESCRIPTION / _RECORD)
    copies = _tied_copies(shape, record, wanted)
    files = _files(record, wanted, options)
    _check_space(target, sum(file_bytes(own) for own in files.values()))
    say(
        f"{source} (Megatron, {_dtypes(tensors.infos)}) -> {target} ({shape.model_type}, "
        f"{len(wanted)} tensors in {len(files)} files, {_dtypes(wanted)}, {size(_bytes(wanted))})"
    )
    _say_rounding(tensors.infos, wanted, say)
    others = len(checkpoint.tensors) - tensors.num_keys
    if others:
        say(f"not converted: {others} keys of optimizer or other state")
    draft = Draft(target, _job(source, options))
    _say_draft(draft, say)

    def produce(name: str) -> Tensor:
        return tensors.read(copies.get(name, name), wanted[name].dtype)

    progress = Progress(len(files), _bytes(wanted), say)
    for file, own in files.items():
        path = draft.path / file
        is_kept = path.is_file() and path.stat().st_size == file_bytes(own)
        if not is_kept:
            write_file(path, own, produce)
        progress.advance(_bytes(own), is_kept)
    _write_index(draft.path, files, record)
    _copy_description(folder, draft.path)
    (draft.path / _RECORD).unlink(missing_ok=True)
    _state_dtype(draft.path / "config.json", wanted[next(iter(wanted))].dtype)
    draft.commit()
    say(f"done: {target}")


def _record(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {"weight_map": None, "index": None}
    record: dict[str, Any] = json.loads(path.read_text())
    return record


def _tied_copies(
    shape: ModelShape, record: Mapping[str, Any], wanted: dict[str, TensorInfo]
) -> dict[str, str]:
    """Add to `wanted` the copy of a tied embedding that the source's files held."""
    head = shape.family.lm_head.logical[0].name
    if not shape.tie_word_embeddings or head not in (record["weight_map"] or {}):
        return {}
    embedding = shape.family.embedding.logical[0].name
    wanted[head] = wanted[embedding]
    return {head: embedding}


def _files(
    record: Mapping[str, Any], wanted: Mapping[str, TensorInfo], options: Options
) -> dict[str, dict[str, TensorInfo]]:
    """Give the tensors of each file: as in the model's source when it is known."""
    weight_map: Mapping[str, str] | None = record["weight_map"]
    if weight_map is None or options.max_shard_bytes or not wanted.keys() <= weight_map.keys():
        grouped = group_files(wanted, options.max_shard_bytes or DEFAULT_SHARD_BYTES)
        weight_map = {name: file for file, names in grouped.items() for name in names}
    files: dict[str, dict[str, TensorInfo]] = {}
    for name, info in wanted.items():
        files.setdefault(weight_map[name], {})[name] = info
    return dict(sorted(files.items()))


def _write_index(
    folder: Path, files: Mapping[str, Mapping[str, TensorInfo]], record: Mapping[str, Any]
) -> None:
    if list(files) == [SINGLE_FILE]:
        return
    weight_map = {name: file for file, own in files.items() for name in own}
    infos = [info for own in files.values() for info in own.values()]
    metadata = {
        "total_parameters": sum(math.prod(info.shape) for info in infos),
        "total_size": sum(info.num_bytes for info in infos),
    }
    text = json.dumps(
        {"metadata": metadata, "weight_map": dict(sorted(weight_map.items()))}, indent=2
    )
    if record["index"] is not None:
        before = json.loads(record["index"])
        same_bytes = before.get("metadata", {}).get("total_size") == metadata["total_size"]
        if before["weight_map"] == weight_map and same_bytes:
            text = record["index"].rstrip("\n")
    (folder / INDEX_FILE).write_text(text + "\n")


def _state_dtype(path: Path, dtype: str) -> None:
    config = json.loads(path.read_text())
    # transformers wrote torch_dtype up to version 4 and reads it still
    key = next((key for key in ("dtype", "torch_dtype") if key in config), "dtype")
    if config.get(key, "float32") != dtype:
        config[key] = dtype
        path.write_text(json.dumps(config, indent=2) + "\n")


def _check_layout(shape: ModelShape, options: Options) -> None:
    """Refuse a layout that the model cannot be loaded in, naming what would fit."""
    etp = options.etp or options.tp
    dense = math.lcm(options.tp, etp * options.ep) // options.tp
    MegatronLayout(
        shape,
        tp=options.tp,
        pp=options.pp,
        dp=dense,
        padded_vocab=-(-shape.vocab_size // options.tp) * options.tp,
        vpp=options.vpp,
        ep=options.ep,
        etp=etp,
        layers_of_chunk=layers_of_chunk(shape.num_layers, options.pp, options.vpp),
    )


def _check_space(target: Path, num_bytes: int) -> None:
    draft = draft_of(target)
    written = sum(path.stat().st_size for path in draft.rglob("*") if path.is_file())
    check_space(target.parent, max(0, num_bytes - written) + _SLACK_BYTES)


def _job(source: Path, options: Options) -> dict[str, Any]:
    """Describe what is converted and how, so that only the same job is taken up again."""
    paths = [path for path in sorted(source.rglob("*")) if path.is_file()]
    stats = {str(path.relative_to(source)): path.stat() for path in paths}
    job = asdict(options)
    job["config"] = str(options.config and options.config.absolute())
    return {
        "source": str(source),
        "files": {name: [stat.st_size, stat.st_mtime_ns] for name, stat in stats.items()},
        "options": job,
    }


def _bytes(infos: Mapping[str, TensorInfo]) -> int:
    return sum(info.num_bytes for info in infos.values())


def _dtypes(infos: Mapping[str, TensorInfo]) -> str:
    return "+".join(sorted({info.dtype for info in infos.values()}))


def _say_rounding(
    held: Mapping[str, TensorInfo], wanted: Mapping[str, TensorInfo], say: Say
) -> None:
    changes: dict[tuple[str, str], int] = {}
    for name, info in held.items():
        if info.dtype != wanted[name].dtype:
            pair = (info.dtype, wanted[name].dtype)
            changes[pair] = changes.get(pair, 0) + 1
    for (old, new), count in changes.items():
        say(f"{count} tensors change from {old} to {new}")
    if not changes:
        say("every tensor keeps its dtype and bits")


def _say_draft(draft: Draft, say: Say) -> None:
    if draft.resumed:
        say(f"going on in {draft.path}")
    else:
        say(f"writing to {draft.path}; after an interruption, the same command goes on there")
