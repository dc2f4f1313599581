"""Is a layout in 16 bits as near to float32 as one rank is?

Every layout gets the same weights, rows and old log-probs. The reference is one rank in float32
on the local layers; the yardstick is the same rank in bfloat16. What a layout adds (sums in another
order, partial sums rounded once more, other kernels) is of the size of that one rounding, so its
error may be at most twice the yardstick's:

- log-probs: mean and largest difference, over the response tokens;
- loss: it is a weighted sum of ratio * advantage, so twice the yardstick's mean log-prob error
  times the mean advantage bounds it;
- gradient norm: twice the yardstick's relative error, and at least 2 ** -7, two roundings to the
  8 bits of a bfloat16.

FP8 keeps 4 bits (e4m3) where bfloat16 keeps 8, so 16 times that. With experts, a rounding can
send a token elsewhere: the largest difference is reported and not bounded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from benchmarks.jobs import Jobs
from benchmarks.workload import Model, Rows, policy_batch
from mrl.algorithms.reductions import reduced
from mrl.types import PolicyBatch, Sequences

_TIMES_YARDSTICK = 2.0
_FP8_TIMES = 16.0
_LEAST_NORM_ERROR = 2.0**-7
_NOISE = 0.1  # of the old log-probs: ratios near 1, on both sides
_LOCAL = "actor.megatron.transformer_impl=local"
_M = "actor.megatron."


@dataclass(frozen=True, slots=True)
class Layout:
    """A layout to compare."""

    world: int
    overrides: tuple[str, ...]
    needs_te: bool = False
    factor: float = _TIMES_YARDSTICK


@dataclass(frozen=True, slots=True)
class Sizes:
    """Models, rows and layouts."""

    dense: Model
    experts: Model
    rows: Rows
    budget: int
    te: bool  # the layouts run on Transformer Engine


DENSE: Mapping[str, Layout] = {
    "one": Layout(1, ()),
    "recompute_full": Layout(
        1,
        (
            f"{_M}recompute_granularity=full",
            f"{_M}recompute_method=uniform",
            f"{_M}recompute_num_layers=1",
        ),
    ),
    "recompute_selective": Layout(1, (f"{_M}recompute_granularity=selective",)),
    "fp8_tensorwise": Layout(
        1, (f"{_M}fp8=hybrid", f"{_M}fp8_recipe=tensorwise"), True, _FP8_TIMES
    ),
    "tp2": Layout(2, (f"{_M}tensor_model_parallel_size=2",)),
    "cp2_a2a": Layout(2, (f"{_M}context_parallel_size=2",)),
    "cp2_p2p": Layout(2, (f"{_M}context_parallel_size=2", f"{_M}cp_comm_type=p2p"), True),
    "pp2": Layout(2, (f"{_M}pipeline_model_parallel_size=2",)),
    "dp2": Layout(2, ()),
}  # fmt: skip
EXPERTS: Mapping[str, Layout] = {
    "one": Layout(1, ()),
    "ep2": Layout(2, (f"{_M}expert_model_parallel_size=2",)),
}
LAYOUTS = {"dense": DENSE, "experts": EXPERTS}

_SPREAD = {"initializer_range": 0.05}  # far from uniform log-probs
REAL = Sizes(
    dense=Model("qwen2.5_0.5b", "Qwen2.5-0.5B", _SPREAD),
    experts=Model(
        "small_experts",
        "Qwen3-30B-A3B",
        {
            **_SPREAD,
            "hidden_size": 1024,
            "num_hidden_layers": 6,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "num_experts": 16,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 512,
            "intermediate_size": 2048,
            "vocab_size": 32768,
        },
    ),
    rows=Rows("skewed", 64, 960, 8192),
    budget=2048,
    te=True,
)
SMOKE = Sizes(
    dense=Model("tiny_spread", None, {"initializer_range": 0.2}),
    experts=Model(
        "tiny_experts",
        "Qwen3-30B-A3B",
        {
            "initializer_range": 0.2,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "intermediate_size": 48,
            "vocab_size": 128,
        },
    ),
    rows=Rows("skewed", 4, 40, 200),
    budget=64,
    te=False,
)

Attempt = Callable[[dict[str, Any], str, Callable[[], Any]], None]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one layout made of the batch."""

    log_probs: torch.Tensor
    loss: float
    grad_norm: float


def compare(
    jobs: Jobs, sizes: Sizes, attempt: Attempt, into: dict[str, Any], names: Sequence[str] = ()
) -> None:
    """Enter each layout's errors, bounds and whether they hold, by kind of model.

    Of all layouts, or of those in `names`.
    """
    comparisons = {
        "dense": _Comparison(jobs, sizes, sizes.dense, bounded_max=True),
        "experts": _Comparison(jobs, sizes, sizes.experts, bounded_max=False),
    }
    for kind, comparison in comparisons.items():
        comparison.start(attempt, into.setdefault(kind, {}))
    for world in (1, 2):  # ranks start once for all layouts of a size
        for kind, comparison in comparisons.items():
            layouts = {
                name: layout
                for name, layout in LAYOUTS[kind].items()
                if layout.world == world
                and (sizes.te or not layout.needs_te)
                and (not names or name in names)
            }
            comparison.run(layouts, attempt, into[kind])


class _Comparison:
    """The layouts of one model against its float32 outcome."""

    def __init__(self, jobs: Jobs, sizes: Sizes, model: Model, bounded_max: bool) -> None:
        self.jobs, self.sizes, self.model, self.bounded_max = jobs, sizes, model, bounded_max
        self.batch: PolicyBatch | None = None
        self.reference: Outcome | None = None
        self.yardstick: dict[str, float] = {}

    def start(self, attempt: Attempt, into: dict[str, Any]) -> None:
        attempt(into, "float32", self._float32)
        if self.reference is not None:
            attempt(into, "yardstick", self._bfloat16)

    def run(self, layouts: Mapping[str, Layout], attempt: Attempt, into: dict[str, Any]) -> None:
        for name, layout in layouts.items():
            if self.yardstick:  # else there is nothing to compare with
                attempt(into, name, partial(self._layout, layout))

    def _outcome(self, layout: Layout, *overrides: str) -> Outcome:
        rows = self.sizes.rows
        job = self.jobs.open(
            self.model, [*layout.overrides, *overrides], layout.world, (rows.prompt, rows.response)
        )
        actor = job.actor(self.sizes.budget)
        sequences: Sequences = rows.draw(job.shape.vocab_size)
        log_probs, _ = actor.log_probs(sequences)
        if self.batch is None:
            batch = policy_batch(sequences, log_probs, _NOISE)
            # of one sign: signed ones leave a loss of nearly nothing, and no relative error of it
            signed = batch.advantages
            self.batch = replace(batch, advantages=signed.with_values(signed.values.abs()))
        metrics = reduced(actor.update(self.batch))
        return Outcome(log_probs.values, metrics["actor/pg_loss"], metrics["actor/grad_norm"])

    def _float32(self) -> dict[str, float]:
        self.reference = self._outcome(Layout(1, ()), f"{_M}dtype=float32", _LOCAL)
        found = self.reference
        return {
            "log_prob_mean": float(found.log_probs.mean()),
            "loss": found.loss,
            "grad_norm": found.grad_norm,
            "tokens": len(found.log_probs),
        }

    def _bfloat16(self) -> dict[str, float]:
        self.yardstick = self._errors(self._outcome(Layout(1, ()), f"{_M}dtype=bfloat16", _LOCAL))
        return self.yardstick

    def _errors(self, found: Outcome) -> dict[str, float]:
        expected = self.reference
        assert expected is not None
        difference = (found.log_probs - expected.log_probs).abs()
        return {
            "log_prob_mean": float(difference.mean()),
            "log_prob_max": float(difference.max()),
            "loss": abs(found.loss - expected.loss),
            "loss_relative": abs(found.loss / expected.loss - 1),
            "grad_norm_relative": abs(found.grad_norm / expected.grad_norm - 1),
        }

    def _layout(self, layout: Layout) -> dict[str, Any]:
        impl = "transformer_engine" if self.sizes.te else "local"
        errors = self._errors(
            self._outcome(layout, f"{_M}dtype=bfloat16", f"{_M}transformer_impl={impl}")
        )
        known, factor, batch = self.yardstick, layout.factor, self.batch
        assert batch is not None
        advantage = float(batch.advantages.values.abs().mean())
        bounds = {
            "log_prob_mean": factor * known["log_prob_mean"],
            "loss": factor * known["log_prob_mean"] * advantage,
            "grad_norm_relative": factor * max(known["grad_norm_relative"], _LEAST_NORM_ERROR),
        }
        if self.bounded_max:
            bounds["log_prob_max"] = factor * known["log_prob_max"]
        broken = [name for name, bound in bounds.items() if not errors[name] <= bound]
        return {"errors": errors, "bounds": bounds, "broken": ", ".join(broken) or "none"}
