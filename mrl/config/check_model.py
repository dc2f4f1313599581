"""Rules between the ranks, the parallel layouts and the model's shape."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import gcd
from pathlib import Path
from typing import Any

from mrl.config.errors import ConfigError, Violation
from mrl.config.roles import (
    RoleSettings,
    enabled_roles,
    is_split_unevenly,
    rollout_ranks,
    split_layers,
    trainer_ranks,
)
from mrl.config.schema import Config

_EXPERT_SIZE = {"mixtral": "intermediate_size"}  # else moe_intermediate_size
# config.json keys of the number of experts, the first that is there; none: a dense model
_EXPERTS: dict[str, tuple[str, ...]] = {
    "deepseek_v2": ("n_routed_experts",),
    "deepseek_v3": ("n_routed_experts",),
    "gemma2": (),
    "gemma3_text": (),
    "glm4": (),
    "glm4_moe": ("n_routed_experts",),
    "llama": (),
    "mistral": (),
    "mixtral": ("num_local_experts",),
    "qwen2": (),
    "qwen3": (),
    "qwen3_moe": ("num_experts", "num_local_experts"),
}
MODEL_TYPES = tuple(_EXPERTS)
# Those whose forward pass is built; the others' weights can be laid out, moved and converted.
TRAINABLE_TYPES = ("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe")
_ROLLOUT_TP = "rollout.tensor_model_parallel_size"


@dataclass(frozen=True)
class ModelShape:
    """The sizes in a model folder's `config.json` that layouts depend on."""

    path: str
    model_type: str
    heads: int
    kv_heads: int
    layers: int
    intermediate_size: int
    max_position_embeddings: int
    experts: int  # 0: a dense model
    expert_size: int  # intermediate size of one
    qkv_rows: int  # of the trainer's fused projection; 0: a latent one

    def rejects_tp(self, tp: int) -> str:
        """Say which size a tensor-parallel size cannot cut, "" when all can be.

        The vocabulary is padded, so it always can.
        """
        if self.heads % tp:
            return f"does not divide the {self.heads} attention heads"
        if self.kv_heads % tp and tp % self.kv_heads:
            return f"neither divides nor is a multiple of the {self.kv_heads} key/value heads"
        if self.intermediate_size % tp:
            return f"does not divide the intermediate size {self.intermediate_size}"
        return ""

    def rejects_training_tp(self, tp: int) -> str:
        """Say the same of the trainer, which cuts queries, keys and values as one matrix."""
        if self.qkv_rows % tp:
            return self.rejects_tp(tp) or f"does not divide the {self.qkv_rows} rows of its QKV"
        return self.rejects_tp(tp)


def read_shape(key: str, path: str) -> ModelShape | None:
    """Read the shape of a model folder, None when it has no `config.json`.

    Raises `ConfigError` when the file is not of a supported model.
    """
    file = Path(path) / "config.json"
    if not file.is_file():
        return None
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        kind = found["model_type"]
        experts = [key for key in _EXPERTS.get(kind, ()) if key in found] or _EXPERTS.get(kind)
        shape = ModelShape(
            path=path,
            model_type=kind,
            heads=int(found["num_attention_heads"]),
            kv_heads=int(found.get("num_key_value_heads") or found["num_attention_heads"]),
            layers=int(found["num_hidden_layers"]),
            intermediate_size=int(found["intermediate_size"]),
            max_position_embeddings=int(found["max_position_embeddings"]),
            experts=int(found[experts[0]]) if experts else 0,
            expert_size=int(found[_EXPERT_SIZE.get(kind, "moe_intermediate_size")])
            if experts
            else 0,
            qkv_rows=0 if "kv_lora_rank" in found else _qkv_rows(found),
        )
    except KeyError as error:
        kind = found.get("model_type")
        if kind is None or kind in MODEL_TYPES:
            raise ConfigError([Violation(key, path, f"{file} lacks {error}")]) from error
    except (ValueError, TypeError, OSError) as error:
        raise ConfigError([Violation(key, path, f"{file} cannot be read: {error}")]) from error
    if kind not in MODEL_TYPES:
        rule = f"{file} is of model_type {kind!r}, which is not supported"
        raise ConfigError([Violation(key, path, rule, " or ".join(MODEL_TYPES))])
    return shape


def _qkv_rows(found: Mapping[str, Any]) -> int:
    heads = int(found["num_attention_heads"])
    kv_heads = int(found.get("num_key_value_heads") or heads)
    width = int(found.get("head_dim") or int(found["hidden_size"]) // heads)
    return (heads + 2 * kv_heads) * width


def check_model(config: Config) -> Iterator[Violation]:
    """Check layouts against the ranks and, where the folder exists, the model's shape."""
    shapes: dict[str, ModelShape | None] = {}
    for key, path in (("model.path", config.model.path), ("critic.path", config.critic.path)):
        if path is None:
            continue
        try:
            shapes[key] = read_shape(key, path)
        except ConfigError as error:
            yield from error.violations
    policy = shapes.get("model.path")
    for role in enabled_roles(config):
        shape = shapes.get("critic.path", policy) if role.name == "critic" else policy
        yield from _check_layout(config, role, shape)
    yield from _check_rollout(config, policy)
    yield from _check_lengths(config, policy)


def _check_layout(
    config: Config, role: RoleSettings, shape: ModelShape | None
) -> Iterator[Violation]:
    m, world, section = role.megatron, len(trainer_ranks(config)), role.keys["megatron"]
    tp, pp = m.tensor_model_parallel_size, m.pipeline_model_parallel_size
    cp = m.context_parallel_size
    key = f"{section}.tensor_model_parallel_size"
    rejects = shape.rejects_training_tp if shape is not None else _rejects_none
    legal = _legal_tps(world, pp * cp, rejects)
    if world % role.ranks_a_replica:
        blamed, size, nearest = key, tp, legal
        if not legal:  # no TP helps: the larger of the others is to blame
            name, size = max(("pipeline_model", pp), ("context", cp), key=lambda item: item[1])
            blamed, rest = f"{section}.{name}_parallel_size", role.ranks_a_replica // size
            fits = (n for n in range(1, min(size, world + 1)) if world % (rest * n) == 0)
            nearest = ", ".join(map(str, fits)) or "none with the other sizes"
        rule = f"tp {tp} x pp {pp} x cp {cp} = {role.ranks_a_replica} ranks must divide the "
        yield Violation(blamed, size, f"{rule}{world} ranks", nearest)
    if shape is not None:
        if reason := rejects(tp):
            yield Violation(key, tp, f"{reason} of {shape.path}", legal)
        yield from _check_layers(world, role, shape)
    yield from _check_context(config, role, shape)
    yield from _check_chunks(role)
    yield from _check_experts(world, role, shape)


def _check_context(
    config: Config, role: RoleSettings, shape: ModelShape | None
) -> Iterator[Violation]:
    m, section = role.megatron, role.keys["megatron"]
    cp, tp = m.context_parallel_size, m.tensor_model_parallel_size
    kind, sizes = m.cp_comm_type, m.hierarchical_context_parallel_sizes
    sizes_key = f"{section}.hierarchical_context_parallel_sizes"
    if kind != "a2a+p2p" and sizes is not None:
        yield Violation(sizes_key, sizes, "is for cp_comm_type=a2a+p2p", "null")
        return
    if cp == 1:
        if kind != "a2a":
            rule = "has no effect with context_parallel_size=1"
            yield Violation(f"{section}.cp_comm_type", kind, rule, "a2a")
        return
    if kind == "a2a+p2p" and (sizes is None or sizes[0] * sizes[1] != cp):
        rule = f"cp_comm_type=a2a+p2p needs two sizes whose product is cp {cp}: all-to-all, ring"
        yield Violation(sizes_key, sizes, rule, f"[2, {cp // 2}]" if cp % 2 == 0 else "")
        return
    on_cpu = config.trainer.device == "cpu"
    if kind != "a2a" and (on_cpu or m.transformer_impl == "local" or m.dtype == "float32"):
        rule = "runs through Transformer Engine, in bfloat16 on a GPU"
        yield Violation(f"{section}.cp_comm_type", kind, rule, "a2a")
    exchanged = {"a2a": cp, "p2p": 1, "a2a+p2p": sizes[0] if sizes else 1}[kind]
    if shape is not None and not shape.rejects_tp(tp) and shape.heads // tp % exchanged:
        yield Violation(
            f"{section}.context_parallel_size",
            cp,
            f"its all-to-all over {exchanged} ranks must divide the {shape.heads // tp} attention "
            f"heads that tp {tp} leaves a rank; cp_comm_type=p2p needs no such thing",
            str(gcd(cp, shape.heads // tp)),
        )


def _check_layers(world: int, role: RoleSettings, shape: ModelShape) -> Iterator[Violation]:
    m = role.megatron
    pp, vpp = m.pipeline_model_parallel_size, m.virtual_pipeline_model_parallel_size or 1
    if is_split_unevenly(m):
        try:
            split_layers(m, shape.layers)
        except ValueError as error:
            key = f"{role.keys['megatron']}.pipeline_model_parallel_size"
            yield Violation(key, pp, f"{shape.layers} layers of {shape.path}: {error}")
        return
    if shape.layers % (pp * vpp) == 0:
        return
    others = role.ranks_a_replica // pp
    legal = [
        str(p)
        for p in range(1, shape.layers + 1)
        if shape.layers % (p * vpp) == 0 and world % (p * others) == 0
    ]
    stages = f"{pp} stages" if vpp == 1 else f"{pp} x {vpp} stages"
    yield Violation(
        f"{role.keys['megatron']}.pipeline_model_parallel_size",
        pp,
        f"the {shape.layers} layers of {shape.path} do not divide over {stages}; an uneven split "
        "needs num_layers_in_first_pipeline_stage or num_layers_in_last_pipeline_stage",
        ", ".join(legal) or "none with this virtual_pipeline_model_parallel_size",
    )


def _check_chunks(role: RoleSettings) -> Iterator[Violation]:
    m = role.megatron
    vpp = m.virtual_pipeline_model_parallel_size
    if vpp is not None and vpp > 1 and m.pipeline_model_parallel_size == 1:
        yield Violation(
            f"{role.keys['megatron']}.virtual_pipeline_model_parallel_size",
            vpp,
            "needs pipeline_model_parallel_size above 1",
            "null",
        )


def _check_experts(world: int, role: RoleSettings, shape: ModelShape | None) -> Iterator[Violation]:
    m = role.megatron
    ep, key = m.expert_model_parallel_size, f"{role.keys['megatron']}.expert_model_parallel_size"
    tp, given = m.tensor_model_parallel_size, m.expert_tensor_parallel_size
    if shape is not None and not shape.experts:
        if ep > 1:
            yield Violation(key, ep, f"{shape.path} has no experts", "1")
        if given is not None and given != tp:
            etp_key = f"{role.keys['megatron']}.expert_tensor_parallel_size"
            yield Violation(etp_key, given, f"{shape.path} has no experts", "null")
        return
    if shape is not None and tp > 1 and not m.sequence_parallel:
        # each rank would send the same tokens to the experts, whose gradients then count them all
        rule = "experts under tensor parallelism need sequence parallelism"
        yield Violation(f"{role.keys['megatron']}.sequence_parallel", False, rule, "true")
    etp = given or tp
    if shape is not None and shape.expert_size % etp:
        etp_key = f"{role.keys['megatron']}.expert_tensor_parallel_size"
        rule = f"does not divide the intermediate size {shape.expert_size} of an expert"
        yield Violation(etp_key, etp, f"{rule} of {shape.path}", "1")
    if ep == 1 and given is None:
        return
    if shape is not None and shape.experts % ep:
        legal = [str(e) for e in range(1, shape.experts + 1) if shape.experts % e == 0]
        rule = f"does not divide the {shape.experts} experts of {shape.path}"
        yield Violation(key, ep, rule, ", ".join(legal))
    ranks = etp * ep * m.pipeline_model_parallel_size
    if world % ranks:
        legal = [str(e) for e in range(1, world + 1) if world % (ranks // ep * e) == 0]
        yield Violation(
            key,
            ep,
            f"expert tp {etp} x ep {ep} x pp {m.pipeline_model_parallel_size} = {ranks} ranks "
            f"must divide the {world} ranks",
            ", ".join(legal) or "none with this expert_tensor_parallel_size and pp",
        )


def _check_rollout(config: Config, shape: ModelShape | None) -> Iterator[Violation]:
    tp, world = config.rollout.tensor_model_parallel_size, len(rollout_ranks(config))
    legal = _legal_tps(world, 1, shape.rejects_tp if shape is not None else _rejects_none)
    if world % tp:
        yield Violation(_ROLLOUT_TP, tp, f"must divide the engine's {world} ranks", legal)
    if shape is not None and (reason := shape.rejects_tp(tp)):
        yield Violation(_ROLLOUT_TP, tp, f"{reason} of {shape.path}", legal)
    if config.rollout.name == "hf" and tp > 1:
        yield Violation(_ROLLOUT_TP, tp, "rollout.name=hf generates on one rank a replica", "1")
    if shape is not None and shape.experts and config.rollout.name == "hf":
        rule = "cannot be written: transformers keeps the experts of a layer in one tensor"
        yield Violation("rollout.name", "hf", rule, "vllm")
    if shape is not None:
        yield from _check_engine_experts(config, shape)
    if config.resharding.mode == "gather" and config.resharding.forward_within_node:
        key = "resharding.forward_within_node"
        yield Violation(
            key, True, "is for resharding.mode=direct: gather forwards nothing", "false"
        )


def _check_engine_experts(config: Config, shape: ModelShape) -> Iterator[Violation]:
    tp, key = config.rollout.tensor_model_parallel_size, "rollout.enable_expert_parallel"
    if not config.rollout.enable_expert_parallel:
        if shape.expert_size % tp:
            rule = f"rollout TP {tp} does not divide the intermediate size {shape.expert_size}"
            yield Violation(key, False, f"{rule} of an expert of {shape.path}", "true")
    elif not shape.experts:
        yield Violation(key, True, f"{shape.path} has no experts", "false")
    elif shape.experts < tp:
        rule = f"rollout TP {tp} leaves ranks without any of the {shape.experts} experts"
        yield Violation(key, True, f"{rule} of {shape.path}", "false")


def _check_lengths(config: Config, shape: ModelShape | None) -> Iterator[Violation]:
    data, rollout = config.data, config.rollout
    longest = data.max_prompt_length + data.max_response_length
    limit = rollout.max_model_len
    sum_key = "data.max_prompt_length + data.max_response_length"
    if limit is not None and limit < longest:
        yield Violation(
            "rollout.max_model_len",
            limit,
            f"less than {sum_key} = {data.max_prompt_length} + {data.max_response_length} = "
            f"{longest}",
            f"{longest} or null",
        )
    if shape is not None:
        most = shape.max_position_embeddings
        rule = f"more than max_position_embeddings = {most} of {shape.path}"
        if longest > most:
            yield Violation(sum_key, longest, rule, str(most))
        elif limit is not None and limit > most:
            yield Violation("rollout.max_model_len", limit, rule, str(most))
    engine = longest if limit is None else limit
    tokens = rollout.max_num_batched_tokens
    if not rollout.enable_chunked_prefill and tokens < engine:
        yield Violation(
            "rollout.max_num_batched_tokens",
            tokens,
            f"less than the longest sequence {engine}, which rollout.enable_chunked_prefill=false "
            "does not cut",
            str(engine),
        )
    if tokens < rollout.max_num_seqs:
        yield Violation(
            "rollout.max_num_batched_tokens",
            tokens,
            f"less than rollout.max_num_seqs={rollout.max_num_seqs}: a step takes at least one "
            "token of each sequence",
            str(rollout.max_num_seqs),
        )


def _legal_tps(world: int, others: int, rejects: Callable[[int], str]) -> str:
    legal = (tp for tp in range(1, world + 1) if world % (tp * others) == 0)
    return ", ".join(str(tp) for tp in legal if not rejects(tp))


def _rejects_none(tp: int) -> str:
    return ""
