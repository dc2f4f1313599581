"""Adapters as PEFT folders: adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from mrl.config.check_lora import PEFT_CONFIG_FILE, PEFT_WEIGHTS_FILE, peft_mismatches
from mrl.config.schema import LoraConfig
from mrl.resharding.coverage import view_of
from mrl.resharding.layout import Layout
from mrl.resharding.lora import shared_a, whole_on
from mrl.resharding.planner import plan
from mrl.resharding.sync import Resharder
from mrl.resharding.transports import Distributed


def save_adapter(
    folder: Path, layout: Layout, params: Mapping[str, Tensor], lora: LoraConfig, model_path: str
) -> list[Path]:
    """Write a PEFT folder from what the ranks hold; all ranks of the role take part.

    Gives the files that this rank wrote.
    """
    rank, writer = dist.get_rank(), layout.ranks[0]
    files = whole_on(layout, (writer,))
    device = next(iter(params.values())).device
    tensors: dict[str, Tensor] = {}
    if rank == writer:
        tensors = {
            name: torch.empty(info.shape, dtype=getattr(torch, info.dtype), device=device)
            for name, info in files.tensors.items()
        }
    Resharder(plan(layout, files), rank, params, tensors, Distributed()).run()
    if rank == writer:
        folder.mkdir(parents=True, exist_ok=True)
        modules = {name.split(".")[-3] for name in tensors}
        host = {name: tensor.cpu() for name, tensor in tensors.items()}
        save_file(host, folder / PEFT_WEIGHTS_FILE, metadata={"format": "pt"})
        config = _peft_config(lora, sorted(modules), model_path)
        (folder / PEFT_CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n")
    dist.barrier()
    return [folder / PEFT_WEIGHTS_FILE, folder / PEFT_CONFIG_FILE] if rank == writer else []


def load_adapter(
    folder: Path, layout: Layout, params: Mapping[str, Tensor], lora: LoraConfig
) -> None:
    """Fill this rank's A's and B's from a PEFT folder.

    Raises ValueError where folder and settings differ, tensors are missing, unknown or misshapen,
    or the A's of layers that Megatron fuses differ.
    """
    path = folder / PEFT_WEIGHTS_FILE
    if not path.is_file():
        raise ValueError(f"{path} is missing: expected the PEFT folder of an adapter")
    found = json.loads((folder / PEFT_CONFIG_FILE).read_text())
    problems = [f"{key} is {value!r}, {rule}" for key, value, rule in peft_mismatches(found, lora)]
    with safe_open(path, framework="pt") as file:
        problems += _tensor_problems(layout, file)
        if problems:
            raise ValueError(f"{folder}: " + "; ".join(problems))
        with torch.no_grad():
            for piece in layout.pieces_of(dist.get_rank()):
                box = tuple(slice(start, stop) for start, stop in piece.box)
                value = file.get_slice(piece.tensor)[box]
                view_of(params[piece.param], piece.local).copy_(value)


def _tensor_problems(layout: Layout, file: Any) -> Iterator[str]:
    names = set(file.keys())
    yield from (f"missing {name}" for name in layout.tensors if name not in names)
    yield from (f"unknown tensor {name}" for name in sorted(names - layout.tensors.keys()))
    if names != layout.tensors.keys():
        return
    for name, info in layout.tensors.items():
        shape = tuple(file.get_slice(name).get_shape())
        if shape != info.shape:
            yield f"{name} has shape {shape}, expected {info.shape}"
    for one, other in shared_a(layout):
        if not torch.equal(file.get_tensor(one), file.get_tensor(other)):
            yield (
                f"{one} and {other} differ, but these layers are one in Megatron and share their "
                "A: merge that adapter into the model and start a new one"
            )
            return


def _peft_config(lora: LoraConfig, modules: list[str], model_path: str) -> dict[str, Any]:
    """Give the fields that PEFT's LoraConfig and vLLM's PEFTHelper read."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": model_path,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "target_modules": modules,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "use_dora": False,
        "init_lora_weights": True,
        "inference_mode": True,
        "modules_to_save": None,
    }
