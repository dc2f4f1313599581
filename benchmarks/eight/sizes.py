"""What is measured on four and on eight GPUs, and its tiny stand-in for CPU ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from benchmarks import cases, precision, recipes
from benchmarks.cases import Case, Scale
from benchmarks.eight.layouts import Layouts
from benchmarks.eight.steps import Scaled
from benchmarks.jobs import Repeats
from benchmarks.workload import Model

WORLDS = (4, 8)
GPUS = (8, 2, 1, 4)  # of the scaling, first those that say most
_M = "actor.megatron."
Cuts = Mapping[str, tuple[Case, tuple[str, ...]]]


@dataclass(frozen=True)
class Sizes:
    """Everything that is measured."""

    scale: Scale
    layouts: Mapping[int, Mapping[str, Layouts]]  # by ranks and model
    scaled: Mapping[str, Scaled]  # by model
    ppo: Mapping[str, Scaled]
    steps: int  # of a run, the first warms up
    long: Mapping[int, Cuts]  # by ranks
    long_tokens: int


# Layouts by ranks, the reference first. Those that a model does not allow are told as left out.
DENSE: Mapping[int, tuple[str, ...]] = {
    4: ("tp2", "tp2pp2", "tp2cp2", "tp2dp2", "tp2pp2vpp2", "tp4", "ep4"),
    8: ("tp2", "tp4pp2", "tp2pp2cp2", "tp2dp4", "tp2pp2vpp2dp2", "tp8", "ep8", "tp2ep4"),
}
# 30 billion parameters and their optimizer need all of the GPUs in every layout.
EXPERTS: Mapping[int, tuple[str, ...]] = {
    4: ("tp4", "tp2pp2", "tp2pp2vpp2", "ep4", "tp2ep2", "tp2dp2ep4etp1"),
    8: (
        "tp2dp4", "tp4pp2", "tp2pp2cp2", "tp8", "ep8", "tp2ep4", "tp2dp4ep4etp1",
        "tp2pp2dp2vpp2ep4etp1",
    ),
}  # fmt: skip


def _cut(tp: int, cp: int, kind: str, *sizes: int) -> tuple[str, ...]:
    """Cut a row over tp x cp ranks: Ulysses (a2a), a ring (p2p), or both, of `sizes` ranks."""
    keys = (
        f"{_M}tensor_model_parallel_size={tp}",
        f"{_M}context_parallel_size={cp}",
        f"{_M}cp_comm_type={kind}",
    )
    text = ",".join(map(str, sizes))
    return (*keys, f"{_M}hierarchical_context_parallel_sizes=[{text}]") if sizes else keys


def _cuts(seven: Case, eight: Case) -> Mapping[int, Cuts]:
    """Cut the 7B's row (28 heads) and the 8B's (32, so that Ulysses goes over 8 ranks)."""
    return {
        4: {
            "7b/cp4_a2a": (seven, _cut(1, 4, "a2a")),
            "7b/cp4_p2p": (seven, _cut(1, 4, "p2p")),
            "7b/tp2cp2_a2a": (seven, _cut(2, 2, "a2a")),
            "7b/tp2cp2_p2p": (seven, _cut(2, 2, "p2p")),
        },
        8: {
            "7b/cp8_a2a": (seven, _cut(1, 8, "a2a")),
            "7b/cp8_p2p": (seven, _cut(1, 8, "p2p")),
            "7b/cp8_a2a+p2p": (seven, _cut(1, 8, "a2a+p2p", 4, 2)),
            "7b/tp2cp4_a2a": (seven, _cut(2, 4, "a2a")),
            "7b/tp2cp4_p2p": (seven, _cut(2, 4, "p2p")),
            "7b/tp2cp4_a2a+p2p": (seven, _cut(2, 4, "a2a+p2p", 2, 2)),
            "8b/cp8_a2a": (eight, _cut(1, 8, "a2a")),
            "8b/cp8_p2p": (eight, _cut(1, 8, "p2p")),
            "8b/tp2cp4_a2a": (eight, _cut(2, 4, "a2a")),
        },
    }


_CRITIC = (  # actor: TP2 and data parallel
    "critic.megatron.tensor_model_parallel_size=2",
    "critic.megatron.pipeline_model_parallel_size=2",
)
_CRITIC_OFFLOAD = tuple(f"critic.megatron.{w}_offload=true" for w in ("param", "grad", "optimizer"))
_LEAN = cases.REAL.cases["7b"].overrides  # Adam's moments in bfloat16
_LONG = cases.REAL.long["7b"]  # recomputes every layer
_REAL_REPEATS = Repeats(1, 3)

REAL = Sizes(
    scale=replace(cases.REAL, repeats=_REAL_REPEATS),
    layouts={
        world: {
            "7b": Layouts(
                Model("qwen2.5_7b", "Qwen2.5-7B"), DENSE[world], 128, 512, 3584, 8192,
                _REAL_REPEATS,
            ),
            "30b_a3b": Layouts(
                Model("qwen3_30b_a3b", "Qwen3-30B-A3B"), EXPERTS[world], 128, 512, 1536, 2048,
                Repeats(1, 2), _LEAN,
            ),
        }
        for world in WORLDS
    },
    scaled={
        "1.5b": Scaled(replace(recipes.REAL["1.5b_grpo"], response=512), 32, 16, goal=0.80),
        "7b": Scaled(recipes.REAL["7b_grpo"], 16, 8, goal=0.85),
    },
    ppo={
        "7b": Scaled(
            replace(
                recipes.REAL["1.5b_ppo"],
                recipe="ppo/qwen2.5_7b_8gpu.yaml",
                model="Qwen2.5-7B",
                prompt=256,
                overrides=(*recipes.REAL["1.5b_ppo"].overrides, *_CRITIC, *_CRITIC_OFFLOAD),
            ),
            64,
            16,
        )
    },
    steps=4,
    long=_cuts(_LONG, replace(_LONG, model=Model("llama3.1_8b", "Llama-3.1-8B"))),
    long_tokens=131072,
)  # fmt: skip

# Eight heads and four layers: every layout of eight ranks is legal, interleaved stages too.
_SHAPE = {"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4}
_TINY = Model("tiny_dense", None, {**_SHAPE, "hidden_size": 64, "initializer_range": 0.2})
_TINY_EXPERTS = Model(
    "tiny_experts",
    "Qwen3-30B-A3B",
    {**precision.SMOKE.experts.changes, **_SHAPE, "num_experts": 8, "moe_intermediate_size": 64},
)
_TINY_ROW = replace(cases.SMOKE.long["tiny"], model=_TINY)
_TINY_TP2 = f"{_M}tensor_model_parallel_size=2"
_ONCE = Repeats(0, 1)
SMOKE = Sizes(
    scale=replace(cases.SMOKE, repeats=_ONCE),
    layouts={
        world: {
            "7b": Layouts(_TINY, DENSE[world], 8, 8, 24, 128, _ONCE),
            "30b_a3b": Layouts(_TINY_EXPERTS, EXPERTS[world], 8, 8, 24, 128, _ONCE),
        }
        for world in WORLDS
    },
    scaled={
        "1.5b": Scaled(recipes.SMOKE["tiny_grpo"], 4, 4, goal=0.80),
        "7b": Scaled(
            replace(
                recipes.SMOKE["tiny_grpo"],
                overrides=(*recipes.SMOKE["tiny_grpo"].overrides, _TINY_TP2),
            ),
            4,
            4,
            goal=0.85,
        ),
    },
    ppo={
        "7b": Scaled(
            replace(
                recipes.SMOKE["tiny_ppo"],
                overrides=(*recipes.SMOKE["tiny_ppo"].overrides, _TINY_TP2, *_CRITIC),
            ),
            4,
            4,
        )
    },
    steps=2,
    long=_cuts(_TINY_ROW, _TINY_ROW),
    long_tokens=256,
)
