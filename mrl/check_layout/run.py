"""Run one batch on several layouts, one job after the other."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import gcd, lcm
from pathlib import Path
from typing import Any

import torch

from mrl.check_layout.batch import Targets, make_rows, random_prompts
from mrl.check_layout.compare import Comparison, bounds_of, compare, outputs_alone
from mrl.check_layout.layouts import OWN, NamedLayout, auto_layouts, parse_layout
from mrl.check_layout.report import CheckReport, LayoutResult
from mrl.check_layout.round import CLIP_GRAD, EPS, LR, WEIGHT_DECAY, Round, run_round
from mrl.config import Config, ConfigError, build_plan, check_config, check_trainable
from mrl.config.check_model import ModelShape, read_shape
from mrl.config.roles import trainer_ranks
from mrl.config.schema import OptimConfig, PlacementConfig, RefConfig, ReshardingConfig
from mrl.types import Batching, Sequences
from mrl.workers.group import RankPool, WorkerError
from mrl.workers.job import (
    device_of,
    launcher_environment,
    roles_on,
    run_job,
    training_job_spec,
)
from mrl.workers.specs import JobSpec

REFERENCE = "tp1,dtype=float32"
_YARDSTICK = "tp1,dtype=bfloat16"
_FEWEST_ROWS = 8
_ROWS_A_MICRO_BATCH = 2
_MOST_PROMPT_TOKENS = 32  # of random prompts
_SEED = 7


def check_layouts(
    config: Config,
    names: Sequence[str],
    reference: str = REFERENCE,
    rows: int | None = None,
    ranks: int | None = None,
    prompts: Sequence[Sequence[int]] = (),
    tell: Callable[[LayoutResult], None] = lambda result: None,
) -> CheckReport:
    """Compare layouts of a config's model with a reference layout, on ranks of this host.

    Args:
        config: a checked config; its own layouts go by the name `config`.
        names: layouts, or `auto` alone: those worth a look on `ranks` ranks.
        reference: what the others are compared with.
        rows: of the batch; None: at least 8, and a whole number a data-parallel part.
        ranks: most ranks of an automatic layout; None: those of the config's trainer.
        prompts: token ids of real prompts; none: random ones.
        tell: called with each result as it comes, the reference first.

    Raises:
        ValueError: a layout's name is unknown, or the reference is not possible.
        WorkerError: the reference failed on its ranks.
    """
    if launcher_environment(os.environ):
        raise ValueError(
            "check-layout starts ranks of its own, as many as each layout has: "
            "run it without torchrun or srun"
        )
    shape = read_shape("model.path", config.model.path)
    check = _Check(config, shape, prompts)
    most = ranks or int(min(len(trainer_ranks(config)), check.most))
    automatic = list(names) == ["auto"]
    wanted = auto_layouts(shape, most, check.budget) if automatic else tuple(names)
    layouts = [parse_layout(name) for name in wanted]
    first = parse_layout(reference)
    started = [layout for layout in (first, *layouts) if _world(layout, config) <= check.most]
    batch = check.batch(rows or _count(started, config))
    base = check.run(first, batch)
    tell(base)
    if base.round is None:
        error = WorkerError if base.possible else ValueError
        raise error(
            f"the reference layout {base.name} gave no numbers: {base.problem}\n"
            "Where one rank cannot hold the model, name another reference, as --reference tp2"
        )
    results: list[LayoutResult] = []
    if base.dtype == "float32" and any(check.dtype(layout) != "float32" for layout in layouts):
        measured = check.run(parse_layout(_YARDSTICK), batch, base)
        check.yardstick = measured.comparison
        layouts = [layout for layout in layouts if layout.name != _YARDSTICK]
        tell(measured)
        results.append(measured)
    for layout in layouts:
        result = check.run(layout, batch, base)
        if automatic and not result.possible:
            continue
        tell(result)
        results.append(result)
    return CheckReport(
        config.model.path,
        len(batch),
        int(batch.tokens.lengths.sum()),
        int(batch.response_lengths.sum()),
        base,
        tuple(results),
    )


def _count(layouts: Sequence[NamedLayout], config: Config) -> int:
    """Give rows that every data-parallel part of every layout can share evenly."""
    whole = lcm(*(_parts(layout, config) for layout in layouts))  # 1 of none
    return -(-_FEWEST_ROWS // whole) * whole


def _world(layout: NamedLayout, config: Config) -> int:
    return len(trainer_ranks(config)) if layout.is_own else layout.world_size


def _parts(layout: NamedLayout, config: Config) -> int:
    m = layout.megatron(config.actor.megatron)
    replica = (
        m.tensor_model_parallel_size * m.pipeline_model_parallel_size * m.context_parallel_size
    )
    return max(1, _world(layout, config) // replica)


class _Check:
    """One model, one batch, and the jobs that work on it."""

    def __init__(
        self, config: Config, shape: ModelShape | None, prompts: Sequence[Sequence[int]]
    ) -> None:
        self.config, self.shape, self.prompts = config, shape, prompts
        self.device = device_of(config)
        self.most = _places(config, self.device)
        self.yardstick: Comparison | None = None  # one rank in bfloat16 against the reference
        actor = config.actor
        self.targets = Targets(
            actor.loss_agg_mode, config.critic.loss_agg_mode, has_reference=actor.use_kl_loss
        )
        self.budget = 2 * (config.data.max_prompt_length + config.data.max_response_length)

    def batch(self, rows: int) -> Sequences:
        """Make the rows: real prompts as far as there are any, and drawn responses."""
        data = self.config.data
        seen = sorted({token for prompt in self.prompts for token in prompt})
        vocabulary = range(2, _vocab_size(self.config))
        prompts = list(self.prompts[:rows])
        longest = min(data.max_prompt_length, _MOST_PROMPT_TOKENS)
        prompts += random_prompts(rows - len(prompts), longest, vocabulary, _SEED)
        return make_rows(prompts, data.max_response_length, seen or vocabulary, _SEED)

    def dtype(self, layout: NamedLayout) -> str:
        """Say what a layout computes in."""
        dtype = layout.megatron(self.config.actor.megatron).dtype
        if dtype != "auto":
            return dtype
        return "bfloat16" if self.device == "cuda" else "float32"

    def run(
        self, layout: NamedLayout, batch: Sequences, base: LayoutResult | None = None
    ) -> LayoutResult:
        """Run the batch on a layout and compare it; a layout that is not possible says why."""
        start, world = time.monotonic(), _world(layout, self.config)
        config = self._config(layout, world, len(batch))
        found, problem = None, self._refusal(layout, config, world, len(batch))
        possible = not problem
        if possible:
            try:
                found = self._round(config, batch, base.round if base else None)
            except WorkerError as error:
                problem = str(error)
        dtype, rule, compared = self.dtype(layout), "", None
        if found is not None and base is not None and base.round is not None:
            fp8 = config.actor.megatron.fp8 is not None
            coarsest = "float32" if dtype == base.dtype == "float32" else "bfloat16"
            bounds = bounds_of(coarsest, *self._size, fp8)
            if layout.name == _YARDSTICK:
                bounds = outputs_alone(bounds)
            yardstick = self.yardstick if dtype == "bfloat16" and not fp8 else None
            compared = compare(found, base.round, bounds, yardstick)
            rule = bounds.describe(yardstick is not None)
        return LayoutResult(
            layout.name,
            world,
            dtype,
            found,
            compared,
            rule,
            problem,
            possible,
            time.monotonic() - start,
        )

    @property
    def _size(self) -> tuple[int, bool]:
        shape = self.shape
        return (shape.layers, bool(shape.experts)) if shape is not None else (1, False)

    def _refusal(self, layout: NamedLayout, config: Config, world: int, rows: int) -> str:
        if world > self.most:
            places = "GPUs" if self.device == "cuda" else "processes at most, for its cores"
            return f"it has {world} ranks, and this host {self.most:.0f} {places}"
        violations = check_config(config)
        if violations:
            # what would be legal for the model, not for this layout's few ranks alone
            wide = self._config(layout, lcm(world, 64), lcm(rows, 64))
            better = {violation.key: violation for violation in check_config(wide)}
            violations = tuple(better.get(v.key, v) for v in violations)
        else:
            try:
                check_trainable(config)
            except ConfigError as error:
                violations = error.violations
        return "; ".join(str(violation) for violation in violations)

    def _round(self, config: Config, batch: Sequences, around: Round | None) -> Round:
        plan = build_plan(config)
        spec: JobSpec = replace(training_job_spec(config, plan, total_steps=10), ref=None)
        done: list[Round] = []

        def control(pool: RankPool) -> None:
            roles = roles_on(pool, config, plan, spec)
            done.append(run_round(roles.actor, roles.critic, batch, self.targets, around))

        run_job(config, plan, spec, control)
        return done[0]

    def _config(self, layout: NamedLayout, world: int, rows: int) -> Config:
        """Give the config of one round on a layout: an optimizer step of `rows` samples."""
        base = self.config
        parts = max(1, world * _parts(layout, base) // _world(layout, base))
        cut = _cut(layout, base, rows // parts if rows % parts == 0 else rows)
        actor = replace(
            base.actor,
            **cut,
            ppo_mini_batch_size=rows,
            ppo_epochs=1,
            router_replay=type(base.actor.router_replay)(),
            optim=_optim(base.actor.optim, layout.is_own),
            megatron=layout.megatron(base.actor.megatron),
        )
        own_critic = base.critic.megatron if layout.is_own else None
        critic = replace(
            base.critic,
            ppo_mini_batch_size=None,
            ppo_micro_batch_size_per_gpu=None,
            use_dynamic_bsz=None,
            ppo_max_token_len_per_gpu=None,
            ppo_epochs=None,
            optim=_optim(base.critic.optim, layout.is_own),
            megatron=own_critic and layout.megatron(own_critic),
        )
        rollout = replace(
            base.rollout,
            n=1,
            tensor_model_parallel_size=1,
            enable_expert_parallel=False,
            log_prob_micro_batch_size_per_gpu=None,
            log_prob_use_dynamic_bsz=None,
            log_prob_max_token_len_per_gpu=None,
        )
        has_critic = base.algorithm.adv_estimator == "gae"
        name = layout.name.replace(",", "-").replace("=", "_")
        return replace(
            base,
            data=replace(base.data, train_batch_size=rows),
            actor=actor,
            critic=critic,
            ref=RefConfig(),
            rollout=rollout,
            algorithm=replace(
                base.algorithm,
                use_kl_in_reward=False,
                adv_estimator="gae" if has_critic else "grpo",
            ),
            trainer=replace(
                base.trainer,
                nnodes=1,
                n_gpus_per_node=world,
                critic_warmup=0,
                default_local_dir=str(Path(base.trainer.default_local_dir) / "check-layout" / name),
            ),
            placement=PlacementConfig(),
            resharding=ReshardingConfig(),
        )


def _cut(layout: NamedLayout, base: Config, rows: int) -> dict[str, Any]:
    """Say how a part's rows are cut: as the layout asks, or the config's own, or two at a time."""
    if layout.batching is not None:
        batching = layout.batching
    elif layout.name == OWN and base.actor.use_dynamic_bsz:
        batching = Batching(max_tokens=base.actor.ppo_max_token_len_per_gpu)
    elif layout.name == OWN and base.actor.ppo_micro_batch_size_per_gpu is not None:
        batching = Batching(micro_batch_size=base.actor.ppo_micro_batch_size_per_gpu)
    else:
        batching = Batching(micro_batch_size=_ROWS_A_MICRO_BATCH)
    if batching.micro_batch_size is None:
        return {"use_dynamic_bsz": True, "ppo_max_token_len_per_gpu": batching.max_tokens}
    micro = gcd(batching.micro_batch_size, rows)
    return {"use_dynamic_bsz": False, "ppo_micro_batch_size_per_gpu": micro}


def _optim[O: OptimConfig](own: O, is_own: bool) -> O:
    """Give an optimizer whose steps can be compared; the config's own keeps its state's dtypes."""
    start = own if is_own else type(own)()
    return replace(
        start,
        lr=LR,
        eps=EPS,
        clip_grad=CLIP_GRAD,
        weight_decay=WEIGHT_DECAY,
        lr_warmup_steps=0,
        lr_warmup_steps_ratio=0.0,
        lr_decay_style="constant",
        min_lr=0.0,
    )


def _places(config: Config, device: str) -> float:
    """Count the ranks that can be started: a Ray cluster knows itself what it has."""
    if config.trainer.launcher == "ray":
        return float("inf")
    return torch.cuda.device_count() if device == "cuda" else max(8, os.cpu_count() or 1)


def _vocab_size(config: Config) -> int:
    file = Path(config.model.path) / "config.json"
    return int(json.loads(file.read_text(encoding="utf-8"))["vocab_size"])
