"""The models, layouts and sizes that a training benchmark measures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from benchmarks import precision
from benchmarks.jobs import Repeats
from benchmarks.workload import Model

_LEAN = (  # Adam's moments in bfloat16: 7B and its optimizer fit one device
    "actor.optim.use_precision_aware_optimizer=true",
    "actor.optim.exp_avg_dtype=bf16",
    "actor.optim.exp_avg_sq_dtype=bf16",
)
_RECOMPUTE = (
    "actor.megatron.recompute_granularity=full",
    "actor.megatron.recompute_method=uniform",
    "actor.megatron.recompute_num_layers=1",
)
_RECOMPUTE_MLP = (
    "actor.megatron.recompute_granularity=selective",
    "actor.megatron.recompute_modules=[mlp]",
)
OFFLOAD = tuple(f"actor.megatron.{what}_offload=true" for what in ("param", "grad", "optimizer"))
_TP2 = ("actor.megatron.tensor_model_parallel_size=2",)
_CP2 = ("actor.megatron.context_parallel_size=2",)


@dataclass(frozen=True)
class Case:
    """A model on a layout: what to measure with it."""

    model: Model
    world: int
    overrides: tuple[str, ...]  # always
    tokens: int  # of a mini-batch
    budgets: Mapping[str, tuple[int, ...]]  # of the update's micro-batches, by variant
    log_prob_budgets: tuple[int, ...]
    variants: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: {"plain": ()})


@dataclass(frozen=True)
class Scale:
    """The sizes of a run."""

    device: str
    cases: Mapping[str, Case]
    prompt: int
    response: int
    repeats: Repeats
    head: Model
    head_tokens: tuple[int, ...]
    growth_steps: int
    cycles: int
    long: Mapping[str, Case]  # mini-batches of one row
    long_tokens: tuple[int, ...]  # of that row
    precision: precision.Sizes


_Q15, _Q7 = Model("qwen2.5_1.5b", "Qwen2.5-1.5B"), Model("qwen2.5_7b", "Qwen2.5-7B")
_FAR = {"max_position_embeddings": 131072}
_LONG = 65536
REAL = Scale(
    device="cuda",
    cases={
        "1.5b": Case(_Q15, 1, (), 131072, {"plain": (8192, 16384, 32768)}, (16384, 32768)),
        "7b": Case(
            _Q7, 1, _LEAN, 65536, {"plain": (4096, 8192), "mlp": (16384,)}, (8192, 16384),
            {"plain": (), "mlp": _RECOMPUTE_MLP},
        ),
        "7b_tp2": Case(_Q7, 2, _TP2, 131072, {"plain": (8192, 16384, 32768)}, (16384, 32768)),
    },
    prompt=512,
    response=3584,
    repeats=Repeats(1, 5),
    head=Model("one_layer_7b", "Qwen2.5-7B", {"num_hidden_layers": 1}),
    head_tokens=(16384, 32768),
    growth_steps=10,
    cycles=3,
    long={
        "1.5b": Case(
            Model("qwen2.5_1.5b_far", "Qwen2.5-1.5B", _FAR), 1, _RECOMPUTE, _LONG,
            {"plain": (_LONG,)}, (),
        ),
        "7b": Case(
            Model("qwen2.5_7b_far", "Qwen2.5-7B", _FAR), 1, (*_LEAN, *_RECOMPUTE), _LONG,
            {"plain": (_LONG,)}, (),
        ),
        "7b_tp2": Case(  # two devices
            Model("qwen2.5_7b_far", "Qwen2.5-7B", _FAR), 2, (*_CP2, *_LEAN, *_RECOMPUTE), _LONG,
            {"plain": (_LONG // 2,)}, (),
        ),
    },
    long_tokens=(_LONG // 4, _LONG),
    precision=precision.REAL,
)  # fmt: skip
_TINY = Model("tiny", None)
_TINY_CASE = Case(_TINY, 1, (), 256, {"plain": (64, 128)}, (128,))
SMOKE = Scale(
    device="cpu",
    cases={"tiny": _TINY_CASE},
    prompt=4,
    response=40,
    repeats=Repeats(1, 2),
    head=Model("one_layer", None, {"num_hidden_layers": 1}),
    head_tokens=(64,),
    growth_steps=3,
    cycles=1,
    long={"tiny": Case(_TINY, 2, (*_CP2, *_RECOMPUTE), 256, {"plain": (128,)}, ())},
    long_tokens=(256,),
    precision=precision.SMOKE,
)
