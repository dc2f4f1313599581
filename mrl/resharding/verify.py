"""Checks that the engine holds what the trainer sent."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn

from mrl.resharding.coverage import view_of
from mrl.resharding.hf import read_headers
from mrl.resharding.planner import Copy, ReshardPlan
from mrl.resharding.transports import Message, Transport
from mrl.resharding.vllm import live_params

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CHUNK_BYTES = 32 * 1024 * 1024  # hashed at a time; the scratch is about four times as large
_STEP = 6364136223846793005  # odd: chunks in another order give another sum


class Checksums:
    """Hashes of tensors on one device: bits and positions, 64 bits a tensor."""

    def __init__(self, device: torch.device) -> None:
        """Prepare the weights of positions."""
        count = _CHUNK_BYTES // 8
        self._odd = torch.arange(1, 2 * count, 2, dtype=torch.int64, device=device)

    @torch.no_grad()
    def of(self, views: Sequence[tuple[Tensor, torch.dtype]]) -> Tensor:
        """Hash each view as if it had the dtype beside it; gives [views] int64 on the device."""
        sums = torch.zeros(len(views), dtype=torch.int64, device=self._odd.device)
        for total, (view, dtype) in zip(sums, views, strict=True):
            for words in self._words(view, dtype):
                total.mul_(_STEP).add_((words * self._odd[: words.numel()]).sum())  # mod 2^64
        return sums

    def _words(self, view: Tensor, dtype: torch.dtype) -> Iterator[Tensor]:
        """Cut a tensor's elements, in order, into chunks of 8-byte words and what is left over.

        The cuts depend on shape and dtype alone, so that both ends of a copy cut alike.
        """
        view = view.view(1) if view.dim() == 0 else view
        row = view[0].numel()
        rows = max(1, _CHUNK_BYTES // (row * dtype.itemsize))
        in_words = 8 // dtype.itemsize
        for part in view.split(rows):
            flat = part.to(device=self._odd.device, dtype=dtype).contiguous().view(-1)
            for piece in flat.split(_CHUNK_BYTES // dtype.itemsize):
                whole = piece.numel() // in_words * in_words
                words, rest = piece[:whole], piece[whole:]
                if words.data_ptr() % 8 or words.storage_offset() % in_words:
                    words = words.clone()
                if whole:
                    yield words.view(torch.int64)
                if rest.numel():
                    yield rest.view(_BITS[dtype.itemsize]).to(torch.int64)


def checksum(tensor: Tensor) -> int:
    """Hash bits and positions of a tensor of any dtype into 64 bits."""
    return int(Checksums(tensor.device).of([(tensor, tensor.dtype)]))


Found = Callable[[], list[str]]


@torch.no_grad()
def start_comparison(
    plan: ReshardPlan,
    rank: int,
    src_params: Mapping[str, Tensor],
    dst_params: Mapping[str, Tensor],
    transport: Transport,
) -> Found:
    """Hash this rank's end of every copy and send the sums to the receivers.

    The returned call lists the copies into this rank that differ; only it waits for the device.
    """
    share = [copy for bucket in plan.share(rank) for copy in bucket]
    params = (*dst_params.values(), *src_params.values())
    if not share or not params:
        return list
    device = params[0].device
    sums = Checksums(device)

    def dtype(copy: Copy) -> torch.dtype:
        found: torch.dtype = getattr(torch, plan.dst.tensors[copy.tensor].dtype)
        return found

    def sources(copies: Iterable[Copy]) -> Tensor:
        ends = ((c, dst_params if c.forwarded else src_params) for c in copies)
        return sums.of([(view_of(held[c.src_param], c.src_box), dtype(c)) for c, held in ends])

    outgoing: dict[int, list[Copy]] = defaultdict(list)
    incoming: dict[int, list[Copy]] = defaultdict(list)
    for copy in share:
        if copy.src_rank == rank:
            outgoing[copy.dst_rank].append(copy)
        if copy.dst_rank == rank:
            incoming[copy.src_rank].append(copy)
    sent = {peer: sources(copies) for peer, copies in outgoing.items()}
    expected = {
        peer: sent[rank]
        if peer == rank
        else torch.empty(len(copies), dtype=torch.int64, device=device)
        for peer, copies in incoming.items()
    }
    received = {
        peer: sums.of([(view_of(dst_params[c.dst_param], c.dst_box), dtype(c)) for c in copies])
        for peer, copies in incoming.items()
    }
    finish = transport.exchange(
        [Message(peer, row.view(torch.uint8)) for peer, row in sent.items() if peer != rank],
        [Message(peer, row.view(torch.uint8)) for peer, row in expected.items() if peer != rank],
    )

    def found() -> list[str]:
        finish()
        copies = [copy for group in incoming.values() for copy in group]
        if not copies:
            return []
        order = list(incoming)
        same = torch.cat([expected[p] for p in order]) == torch.cat([received[p] for p in order])
        return [_words(c) for c, equal in zip(copies, same.tolist(), strict=True) if not equal]

    return found


def compare_ends(
    plan: ReshardPlan,
    rank: int,
    src_params: Mapping[str, Tensor],
    dst_params: Mapping[str, Tensor],
    transport: Transport,
) -> None:
    """Compare both ends of every copy after a run; all ranks call it together.

    Raises ValueError, on every rank, naming the first copies that differ: tensor, box and ranks.
    """
    wrong = start_comparison(plan, rank, src_params, dst_params, transport)()
    raise_if_any([text for part in transport.gather(wrong) for text in part])


def raise_if_any(wrong: Sequence[str]) -> None:
    """Raise ValueError naming the first of the copies that differ."""
    if wrong:
        shown = "; ".join(wrong[:3])
        raise ValueError(f"{len(wrong)} copies differ after the sync: {shown}")


def _words(copy: Copy) -> str:
    return (
        f"{copy.tensor} from rank {copy.src_rank} {copy.src_param}{copy.src_box} to rank "
        f"{copy.dst_rank} {copy.dst_param}{copy.dst_box}"
    )


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Tell whether two tensors have one shape, one dtype and the same bits (NaN equals NaN)."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    bits = _BITS[a.element_size()]
    return torch.equal(
        a.detach().contiguous().view(-1).view(bits),
        b.detach().to(a.device).contiguous().view(-1).view(bits),
    )


def differing(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> list[str]:
    """List the names whose tensors differ in any bit, or that only one side has."""
    names = sorted(found.keys() | expected.keys())
    return [
        name
        for name in names
        if name not in found or name not in expected or not same_bits(found[name], expected[name])
    ]


@torch.no_grad()
def compare_with_reload(model: nn.Module, folder: Path) -> None:
    """Compare a live engine model, bit for bit, with its own load of an exported checkpoint.

    The parameters are filled with NaN first, so that whatever the loader leaves out shows; they
    hold their old values when it returns. Raises ValueError naming the parameters that differ.
    """
    params = live_params(model)
    before = {name: param.cpu().clone() for name, param in params.items()}
    for param in params.values():
        param.fill_(float("nan") if param.is_floating_point() else -1)
    try:
        model.load_weights(_stored_tensors(folder))
        wrong = differing({name: param.cpu() for name, param in params.items()}, before)
    finally:
        for name, param in params.items():
            param.copy_(before[name])
    if wrong:
        raise ValueError(f"engine parameters differ from {folder}: {', '.join(wrong)}")


def _stored_tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    for path in sorted({stored.file for stored in read_headers(folder).values()}):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (not a dict)
                yield name, file.get_tensor(name)
