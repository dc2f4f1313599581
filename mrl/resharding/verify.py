"""Checks that the engine holds what the trainer sent."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn

from mrl.resharding.coverage import view_of
from mrl.resharding.hf import read_headers
from mrl.resharding.planner import ReshardPlan
from mrl.resharding.transports import Transport

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CHUNK = 1 << 22  # elements hashed at a time: their int64 form takes 8 bytes each


def checksum(tensor: Tensor) -> int:
    """Hash bits and positions of a tensor of any dtype into 64 bits."""
    flat = tensor.detach().contiguous().view(-1)
    bits = flat.view(_BITS[flat.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start in range(0, bits.numel(), _CHUNK):
        part = bits[start : start + _CHUNK].to(torch.int64)
        odd = 2 * torch.arange(start, start + part.numel(), device=part.device) + 1
        total += (part * odd).sum()  # wraps modulo 2^64
    return int(total)


def checksums(
    plan: ReshardPlan, rank: int, params: Mapping[str, Tensor], side: str
) -> dict[int, int]:
    """Hash this rank's end of every copy, by the copy's index in the plan.

    `side` is "src" or "dst"; the source is hashed in the destination's dtype.
    """
    found = {}
    for index, copy in enumerate(plan.copies):
        if side == "src" and copy.src_rank == rank:
            dtype = getattr(torch, plan.dst.tensors[copy.tensor].dtype)
            found[index] = checksum(view_of(params[copy.src_param], copy.src_box).to(dtype))
        elif side == "dst" and copy.dst_rank == rank:
            found[index] = checksum(view_of(params[copy.dst_param], copy.dst_box))
    return found


def compare_ends(
    plan: ReshardPlan,
    rank: int,
    src_params: Mapping[str, Tensor],
    dst_params: Mapping[str, Tensor],
    transport: Transport,
) -> None:
    """Compare both ends of every copy after a run; all ranks call it together.

    Raises ValueError naming the first copies that differ, with tensor, box and ranks.
    """
    sent: dict[int, int] = {}
    received: dict[int, int] = {}
    ends = (
        checksums(plan, rank, src_params, "src"),
        checksums(plan, rank, dst_params, "dst"),
    )
    for src, dst in transport.gather(ends):
        sent |= src
        received |= dst
    copies = plan.copies
    wrong = [
        f"{c.tensor} from rank {c.src_rank} {c.src_param}{c.src_box} to rank {c.dst_rank} "
        f"{c.dst_param}{c.dst_box}"
        for index, c in enumerate(copies)
        if index in sent and index in received and sent[index] != received[index]
    ]
    if wrong:
        shown = "; ".join(wrong[:3])
        raise ValueError(f"{len(wrong)} of {len(copies)} copies differ after the sync: {shown}")


@torch.no_grad()
def compare_with_reload(model: nn.Module, folder: Path) -> None:
    """Compare a live engine model, bit for bit, with its own load of an exported checkpoint.

    The parameters are filled with NaN first, so that whatever the loader leaves out shows; they
    hold their old values when it returns. Raises ValueError naming the parameters that differ.
    """
    params = {name: param.detach() for name, param in model.named_parameters()}
    before = {name: param.cpu().clone() for name, param in params.items()}
    for param in params.values():
        param.fill_(float("nan") if param.is_floating_point() else -1)
    try:
        model.load_weights(_stored_tensors(folder))
        wrong = [name for name, param in params.items() if not _same_bits(param, before[name])]
    finally:
        for name, param in params.items():
            param.copy_(before[name])
    if wrong:
        raise ValueError(f"engine parameters differ from {folder}: {', '.join(wrong)}")


def _same_bits(a: Tensor, b: Tensor) -> bool:
    bits = _BITS[a.element_size()]
    return torch.equal(a.cpu().contiguous().view(bits), b.contiguous().view(bits))


def _stored_tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    for path in sorted({stored.file for stored in read_headers(folder).values()}):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (not a dict)
                yield name, file.get_tensor(name)
