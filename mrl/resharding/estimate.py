"""How long a weight update takes at least on named hardware, from the bytes of each link."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from math import ceil
from typing import Any

from mrl.resharding.buckets import DST, SRC
from mrl.resharding.hardware import GPU, LAUNCH, Network, Rate
from mrl.resharding.megatron import MegatronLayout
from mrl.resharding.planner import ReshardPlan

_EXPERT = ".experts."


@dataclass(frozen=True, slots=True)
class LinkBytes:
    """What one rank moves: the busier way of each link, its memory both ways, and the calls."""

    network: float
    nvlink: float
    memory: float  # read plus written
    calls: int


@dataclass(frozen=True, slots=True)
class Seconds:
    """The parts of an estimate; links and memory work at the same time, calls wait in between."""

    network: float
    nvlink: float
    memory: float
    calls: float

    @property
    def total(self) -> float:
        """Give the time that the slowest part and the calls take together."""
        return max(self.network, self.nvlink, self.memory) + self.calls


@dataclass(frozen=True, slots=True)
class Estimate:
    """Times of the slowest rank, and what they rest on."""

    gpu: str
    network: str
    direct: Seconds
    allgather: Seconds
    assumptions: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Give seconds by part, and the assumptions."""
        return {
            "gpu": self.gpu,
            "network": self.network,
            "direct": asdict(self.direct) | {"total": self.direct.total},
            "allgather": asdict(self.allgather) | {"total": self.allgather.total},
            "assumptions": list(self.assumptions),
        }


def estimate(
    plan: ReshardPlan, source: MegatronLayout, bucket_bytes: int, gpu: GPU, network: Network
) -> Estimate:
    """Estimate a plan and the bucketed all-gather that would bring the same weights."""
    direct = direct_links(plan)
    gather = gather_links(plan, source, bucket_bytes)
    return Estimate(
        gpu.name,
        network.name,
        _slowest(direct, gpu, network),
        _slowest(gather, gpu, network),
        assumptions(gpu, network),
    )


def assumptions(gpu: GPU, network: Network) -> tuple[str, ...]:
    """Say what the estimate counts with, one line a number."""

    def rate(what: str, rate: Rate) -> str:
        reached = f"{rate.nominal * rate.reached:,.0f} of {rate.nominal:,g} GB/s"
        return f"{what}: {reached} ({rate.source})"

    return (
        rate(f"{network.name}, one adapter a GPU, each way", network.link),
        rate("NVLink of a GPU, each way", gpu.nvlink),
        rate("memory, read plus written", gpu.memory),
        f"a grouped exchange or collective: {LAUNCH.seconds * 1e6:g} us ({LAUNCH.source})",
        "links busy in every bucket, memory hidden behind; exchanged bytes packed and unpacked",
    )


def _slowest(ranks: Iterable[LinkBytes], gpu: GPU, network: Network) -> Seconds:
    return max(
        (
            Seconds(
                links.network / network.link.bytes_per_s,
                links.nvlink / gpu.nvlink.bytes_per_s,
                links.memory / gpu.memory.bytes_per_s,
                links.calls * LAUNCH.seconds,
            )
            for links in ranks
        ),
        key=lambda seconds: seconds.total,
    )


def direct_links(plan: ReshardPlan) -> list[LinkBytes]:
    """Count what each rank of a plan moves, by link."""
    node = {**plan.src.node_of_rank, **plan.dst.node_of_rank}
    ways: dict[int, list[float]] = defaultdict(lambda: [0.0] * 4)  # out, in; network first
    for (src, dst), num_bytes in _pair_bytes(plan).items():
        link = 0 if node.get(src, 0) != node.get(dst, 0) else 2
        ways[src][link] += num_bytes
        ways[dst][link + 1] += num_bytes
    found = []
    for rank in sorted({*plan.src.ranks, *plan.dst.ranks}):
        out_net, in_net, out_nvlink, in_nvlink = ways[rank]
        # A sent byte is read, written to a bucket and read by the link; a received one the reverse.
        memory = 2 * plan.local_bytes(rank)
        memory += 3 * (plan.sent_bytes(rank) + plan.received_bytes(rank))
        network, nvlink = max(out_net, in_net), max(out_nvlink, in_nvlink)
        found.append(LinkBytes(network, nvlink, memory, plan.num_buckets))
    return found


def _pair_bytes(plan: ReshardPlan) -> Mapping[tuple[int, int], int]:
    """Sum what each rank sends to each other one."""
    sent: dict[tuple[int, int], int] = defaultdict(int)
    for block in plan.blocks:
        tensors = block.last - block.first
        ends = block.table[:, (SRC, DST)].tolist()
        for (src, dst), num_bytes in zip(ends, block.sizes.tolist(), strict=True):
            if src != dst:
                sent[src, dst] += num_bytes * tensors
    return sent


def gather_links(plan: ReshardPlan, source: MegatronLayout, bucket_bytes: int) -> list[LinkBytes]:
    """Count what each rank moves when whole tensors are gathered and then loaded.

    Each rank first gets its own slices of the other stages from its peers there, then the other
    slices from its expert- and tensor-parallel neighbours. Ranks without a trainer get the
    finished tensors from the first trainer rank.
    """
    sizes = _StageBytes.of(plan, source)
    node = {**plan.src.node_of_rank, **plan.dst.node_of_rank}
    model = sum(info.num_bytes for info in plan.dst.tensors.values())
    trainers = set(plan.src.ranks)
    found = []
    for rank in sorted({*trainers, *plan.dst.ranks}):
        if rank in trainers:
            parts = sizes.parts(source, rank)
        else:
            parts = [(plan.src.ranks[0], float(model))]
        home = node.get(rank, 0)
        network = sum(size for peer, size in parts if node.get(peer, 0) != home)
        nvlink = sum(size for peer, size in parts if node.get(peer, 0) == home)
        need = plan.local_bytes(rank) + plan.received_bytes(rank)
        # Gathered shards are written, put together, and the engine's loader copies its part.
        memory = 3 * (network + nvlink) + 2 * need
        stages = 1 + (source.tp > 1 or source.ep > 1)
        found.append(LinkBytes(network, nvlink, memory, stages * ceil(model / bucket_bytes)))
    return found


@dataclass(frozen=True, slots=True)
class _StageBytes:
    """Bytes of the model's tensors by kind, and by the stage that lacks and the one that has them.

    A tensor of several stages (a tied embedding) is had by the first.
    """

    dense: float
    experts: float
    lacked: Mapping[tuple[int, int, bool], float]  # (lacking stage, having stage, are experts)

    @staticmethod
    def of(plan: ReshardPlan, source: MegatronLayout) -> _StageBytes:
        stages: dict[str, set[int]] = defaultdict(set)
        for piece in plan.src.pieces:
            stages[piece.tensor].add(stage_of(source, piece.ranks[0]))
        totals = {True: 0.0, False: 0.0}
        lacked: dict[tuple[int, int, bool], float] = defaultdict(float)
        for name, info in plan.dst.tensors.items():
            are_experts = _EXPERT in name
            totals[are_experts] += info.num_bytes
            for stage in set(range(source.pp)) - stages[name]:
                lacked[stage, min(stages[name]), are_experts] += info.num_bytes
        return _StageBytes(totals[False], totals[True], lacked)

    def parts(self, source: MegatronLayout, rank: int) -> list[tuple[int, float]]:
        """List (peer, bytes) of what a trainer rank gets in an all-gather."""
        tp, ep, etp = source.tp, source.ep, source.expert_tp
        stage, index = divmod(rank - source.first_rank, source.stage_size)
        parts = [
            (
                rank + (other - stage) * source.stage_size,
                self.lacked.get((stage, other, False), 0.0) / tp
                + self.lacked.get((stage, other, True), 0.0) / (ep * etp),
            )
            for other in range(source.pp)
            if other != stage
        ]
        for total, first, count, stride in (
            (self.dense, index - index % tp, tp, 1),
            (self.experts / etp, index - index // etp % ep * etp, ep, etp),
            (self.experts, index - index % etp, etp, 1),
        ):
            group = [rank - index + first + stride * i for i in range(count)]
            parts += [(peer, total / count) for peer in group if peer != rank]
        return parts


def stage_of(source: MegatronLayout, rank: int) -> int:
    """Give a trainer rank's pipeline stage."""
    return (rank - source.first_rank) // source.stage_size
