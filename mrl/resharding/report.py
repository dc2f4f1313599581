"""What a weight update moves, rank by rank, from a config and a model's `config.json` alone.

Nothing here needs a GPU, torch or vLLM: it is the plan that the ranks of a job would compute.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from mrl.config.errors import ConfigError, Violation
from mrl.config.plan import build_plan
from mrl.config.roles import rollout_ranks, split_layers, trainer_ranks, world_size
from mrl.config.schema import Config
from mrl.resharding.estimate import Estimate, estimate
from mrl.resharding.families import ModelShape
from mrl.resharding.hardware import GPUS, NETWORKS
from mrl.resharding.layout import nodes, volume, whole
from mrl.resharding.megatron import MegatronLayout
from mrl.resharding.planner import ReshardPlan, plan
from mrl.resharding.slots import choose_slots
from mrl.resharding.vllm_layout import VLLMLayout
from mrl.resharding.vocab import padded_vocab


@dataclass(frozen=True, slots=True)
class RankTraffic:
    """Bytes of one rank in one update, in the engine's dtype."""

    rank: int
    local: int  # copied within the rank
    sent: int
    received: int
    floor: int  # needed and not held: no scheme can receive less
    allgather: int  # received when every rank gathers the whole model
    peers: int  # ranks that it exchanges with
    buckets: int  # grouped exchanges
    peak_staging: int  # bytes sent and received in its largest bucket


BYTE_COLUMNS = ("local", "sent", "received", "floor", "allgather")


@dataclass(frozen=True)
class ReshardReport:
    """A planned weight update: both layouts, the traffic of each rank, and an estimate."""

    model_path: str
    shape: ModelShape
    parameters: int
    model_bytes: int  # in the engine's dtype
    ranks_a_node: int
    source: MegatronLayout
    target: VLLMLayout
    plan: ReshardPlan
    bucket_bytes: int
    forward_within_node: bool
    ranks: tuple[RankTraffic, ...]
    estimate: Estimate
    adapter_beside: bool = False  # an adapter is sent beside the model

    @property
    def slots(self) -> tuple[int, ...]:
        """Give the engine slot (replica * tp + TP rank) of each engine rank in order."""
        target = self.target
        return target.slots or tuple(range(target.world_size))

    @property
    def source_ranks(self) -> range:
        """Give the ranks of the trainer."""
        first = self.source.first_rank
        return range(first, first + self.source.world_size)

    @property
    def target_ranks(self) -> range:
        """Give the ranks of the engine."""
        first = self.target.first_rank
        return range(first, first + self.target.world_size)

    def hints(self) -> tuple[str, ...]:
        """Say what may shorten the update, and which updates it is."""
        found = []
        if self.adapter_beside:
            found.append(
                "model.lora.merge=false: this is the first update, and every one of an engine on "
                "the trainer's GPUs that sleeps (rollout.free_cache_engine); the others move the "
                "adapter alone"
            )
        replicas = self.ranks_a_node // self.target.tp
        if not self.forward_within_node and replicas > 1 and self.estimate.direct.network:
            found.append(
                f"{replicas} replicas a node receive the same bytes over the network: compare "
                "resharding.forward_within_node=true, which sends them to a node once"
            )
        return tuple(found)

    def totals(self) -> dict[str, int]:
        """Sum the byte columns over the ranks."""
        return {name: sum(self.column(name)) for name in BYTE_COLUMNS}

    def column(self, name: str) -> list[int]:
        """List one field of all ranks."""
        return [getattr(traffic, name) for traffic in self.ranks]

    def mean(self, name: str) -> float:
        """Average one field over the ranks of the engine."""
        engine = self.target_ranks
        return sum(getattr(t, name) for t in self.ranks if t.rank in engine) / len(engine)

    def to_json(self) -> dict[str, Any]:
        """Give the report as JSON types; sizes are bytes, times seconds."""
        source, target = self.source, self.target
        return {
            "model": {
                "path": self.model_path,
                "model_type": self.shape.model_type,
                "parameters": self.parameters,
                "bytes": self.model_bytes,
            },
            "source": {
                **{name: getattr(source, name) for name in ("tp", "pp", "vpp", "cp", "ep")},
                "etp": source.expert_tp,
                "dp": source.dp,
                "dtype": source.dtype,
                "transformer_impl": source.transformer_impl,
                "padded_vocab": source.padded_vocab,
                "first_rank": source.first_rank,
                "ranks": source.world_size,
            },
            "target": {
                "tp": target.tp,
                "ep": target.ep,
                "replicas": target.replicas,
                "dtype": target.dtype,
                "first_rank": target.first_rank,
                "ranks": target.world_size,
                "slots": list(self.slots),
            },
            "ranks_a_node": self.ranks_a_node,
            "bucket_bytes": self.bucket_bytes,
            "forward_within_node": self.forward_within_node,
            "totals": self.totals(),
            "seconds": self.estimate.to_json(),
            "hints": list(self.hints()),
            "ranks": [asdict(traffic) for traffic in self.ranks],
        }


def build_report(
    config: Config, gpu: str = "h100", network: str | None = None, best_slots: bool = True
) -> ReshardReport:
    """Plan the update of a checked config.

    `gpu` and `network` (None: the one that the GPU is usually sold with) are keys of `GPUS` and
    `NETWORKS`. Without `best_slots` rank i takes engine slot i. Raises ValueError where the
    layouts cannot hold the model, FileNotFoundError where `model.path` has no config.json.
    """
    _check_engine(config)
    hardware = _named("--gpu", gpu, GPUS)
    link = _named("--network", network or hardware.network, NETWORKS)
    shape = ModelShape.from_folder(Path(config.model.path))
    ranks_a_node = config.trainer.n_gpus_per_node
    source = source_layout(config, shape)
    target = target_layout(config, shape)
    src, dst = source.layout(), target.layout()
    if best_slots:
        target = replace(target, slots=choose_slots(src, dst, target.tp))
        dst = target.layout()
    bucket_bytes = config.resharding.bucket_bytes
    forward = config.resharding.forward_within_node
    made = plan(src, dst, bucket_bytes, forward)
    return ReshardReport(
        model_path=config.model.path,
        shape=shape,
        parameters=sum(volume(whole(info.shape)) for info in dst.tensors.values()),
        model_bytes=sum(info.num_bytes for info in dst.tensors.values()),
        ranks_a_node=ranks_a_node,
        source=source,
        target=target,
        plan=made,
        bucket_bytes=bucket_bytes,
        forward_within_node=forward,
        ranks=_traffic(made, source, target, _all_ranks(config)),
        estimate=estimate(made, source, bucket_bytes, hardware, link),
        adapter_beside=config.model.lora.rank > 0 and not config.model.lora.merge,
    )


def source_layout(config: Config, shape: ModelShape) -> MegatronLayout:
    """Place the actor as its workers will."""
    actor, megatron = build_plan(config).roles["actor"].layout, config.actor.megatron
    dtype = "bfloat16" if megatron.dtype == "auto" else megatron.dtype
    implementation = megatron.transformer_impl
    if implementation == "auto":  # as the workers resolve it on GPUs
        implementation = "transformer_engine" if dtype == "bfloat16" else "local"
    return MegatronLayout(
        shape,
        tp=actor.tp,
        pp=actor.pp,
        vpp=actor.vpp or 1,
        cp=actor.cp,
        ep=actor.ep,
        etp=actor.etp,
        dp=actor.dp,
        layers_of_chunk=split_layers(megatron, shape.num_layers),
        padded_vocab=padded_vocab(shape.vocab_size, actor.tp),
        transformer_impl=implementation,
        grouped_experts=implementation == "transformer_engine",
        dtype=dtype,
        first_rank=trainer_ranks(config).start,
        node_of_rank=_nodes(config),
    )


def target_layout(config: Config, shape: ModelShape) -> VLLMLayout:
    """Place the engine as it starts on GPUs, in bfloat16, rank i in slot i."""
    ranks, tp = rollout_ranks(config), config.rollout.tensor_model_parallel_size
    return VLLMLayout(
        shape,
        tp=tp,
        replicas=len(ranks) // tp,
        ep=config.rollout.enable_expert_parallel,
        first_rank=ranks.start,
        node_of_rank=_nodes(config),
    )


def _named[T](option: str, name: str, known: Mapping[str, T]) -> T:
    if name not in known:
        raise ValueError(f"{option} {name}: expected one of {', '.join(known)}")
    return known[name]


def _nodes(config: Config) -> dict[int, int]:
    return nodes(world_size(config), config.trainer.n_gpus_per_node)


def _all_ranks(config: Config) -> Sequence[int]:
    return sorted({*trainer_ranks(config), *rollout_ranks(config)})


def _traffic(
    made: ReshardPlan, source: MegatronLayout, target: VLLMLayout, ranks: Sequence[int]
) -> tuple[RankTraffic, ...]:
    """Read the numbers of each rank; what follows from the layouts alone once for equal ranks."""
    floors: dict[tuple[Hashable, Hashable], int] = {}
    gathers: dict[Hashable, int] = {}
    traffic = []
    for rank in ranks:
        held, needed = _held(source, rank), _needed(target, rank)
        if (held, needed) not in floors:
            floors[held, needed] = made.floor_bytes(rank)
        if held not in gathers:
            gathers[held] = made.allgather_bytes(rank)
        traffic.append(
            RankTraffic(
                rank=rank,
                local=made.local_bytes(rank),
                sent=made.sent_bytes(rank),
                received=made.received_bytes(rank),
                floor=floors[held, needed],
                allgather=gathers[held],
                peers=len(made.peers(rank)),
                buckets=made.num_buckets,
                peak_staging=made.peak_buffer_bytes(rank),
            )
        )
    return tuple(traffic)


def _held(source: MegatronLayout, rank: int) -> tuple[int, int, int] | None:
    """Give a key that trainer ranks share where they hold the same; None outside the trainer."""
    index = rank - source.first_rank
    if not 0 <= index < source.world_size:
        return None
    stage, place = divmod(index, source.stage_size)
    return stage, place % source.tp, place % (source.expert_tp * source.ep)


def _needed(target: VLLMLayout, rank: int) -> int | None:
    """Give the shard that an engine rank needs; None outside the engine."""
    index = rank - target.first_rank
    if not 0 <= index < target.world_size:
        return None
    return (index if target.slots is None else target.slots[index]) % target.tp


def _check_engine(config: Config) -> None:
    if config.rollout.name != "vllm":
        rule = "only vLLM's placement is known without starting the engine"
        raise ConfigError([Violation("rollout.name", config.rollout.name, rule, "vllm")])
