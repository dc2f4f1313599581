"""The plan as a person reads it."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from mrl.config.plan import RolePlan, RunPlan
from mrl.config.schema import Config

_LEFT_OUT = ", less the actor's first mini-batch, whose log-probs come with its update"


def print_plan(plan: RunPlan, config: Config, console: Console | None = None) -> None:
    """Print the resolved numbers, a row for each enabled role, and the warnings."""
    console = console or Console()
    console.print(_run_table(plan, config))
    console.print(_role_table(plan))
    for warning in plan.warnings:
        console.print(Text.assemble(("warning ", "bold yellow"), warning))


def _run_table(plan: RunPlan, config: Config) -> Table:
    data, n, trainer = config.data, config.rollout.n, config.trainer
    table = Table(title="a step", title_justify="left", box=box.SIMPLE, show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(justify="right")
    table.add_column(style="dim")
    for row in (
        ("model", config.model.path, f"{config.algorithm.adv_estimator}, {config.rollout.name}"),
        *_adapter(config),
        (
            "ranks",
            f"{plan.world_size:,}",
            f"nnodes {trainer.nnodes} x n_gpus_per_node {trainer.n_gpus_per_node}",
        ),
        *_placement(plan),
        ("prompts", f"{plan.prompts:,}", "data.train_batch_size"),
        ("samples", f"{plan.samples:,}", f"prompts x rollout.n {n}"),
        (
            "tokens per step",
            f"{plan.tokens_per_step:,}",
            f"at most: samples x ({data.max_prompt_length} + {data.max_response_length})",
        ),
        ("replicas", f"{plan.replicas:,}", f"of the engine, rollout TP {plan.rollout_tp}"),
        ("prompts per replica", _counts(plan.prompts_per_replica), ""),
        ("sequences per replica", _counts(plan.sequences_per_replica), ""),
        ("longest sequence", f"{plan.max_model_len:,}", "tokens the engine holds"),
    ):
        table.add_row(*(Text(cell) for cell in row))
    return table


def _adapter(config: Config) -> list[tuple[str, str, str]]:
    lora = config.model.lora
    if lora.rank == 0:
        return []
    way = "merged into the engine's weights" if lora.merge else "sent to the engine beside the base"
    return [("adapter", f"rank {lora.rank}", f"trained alone, {way}")]


def _placement(plan: RunPlan) -> list[tuple[str, str, str]]:
    world, trainer, rollout = plan.world_size, plan.trainer_world, plan.rollout_world
    if trainer == rollout == world:
        return []
    return [
        ("trainer ranks", f"0-{trainer - 1}", "actor, critic, reference"),
        ("engine ranks", f"{world - rollout}-{world - 1}", "placement.mode disaggregated"),
    ]


def _role_table(plan: RunPlan) -> Table:
    table = Table(title="roles", title_justify="left", box=box.SIMPLE)
    table.add_column("role", style="bold", no_wrap=True)
    table.add_column("layout", overflow="fold")
    for name in (
        "dp",
        "samples\nper rank",
        "micro-batches\nof samples",
        "log-prob passes\nof samples",
        "optimizer\nsteps",
    ):
        table.add_column(name, justify="right", no_wrap=True)
    for name, role in plan.roles.items():
        if role.enabled:
            table.add_row(name, *_role_cells(role, trained=name != "ref"))
    table.caption = (
        "samples per rank: of an optimizer step (ref: of the rollout). "
        "log-prob passes: over the whole rollout (critic: value passes)"
        + _LEFT_OUT * plan.first_log_probs_from_update
        + ". dynamic: by token budget"
    )
    table.caption_justify = "left"
    return table


def _role_cells(role: RolePlan, trained: bool) -> list[str]:
    return [
        _layout(role),
        f"{role.dp:,}",
        f"{role.samples_per_rank:,}",
        _cut(role.micro_batches, role.micro_batch_size, role.max_token_len) if trained else "-",
        _cut(role.logprob_passes, role.log_prob_micro_batch_size, role.log_prob_max_token_len),
        f"{role.optimizer_steps:,}" if trained else "-",
    ]


def _layout(role: RolePlan) -> str:
    layout = role.layout
    sizes = (("TP", layout.tp), ("PP", layout.pp), ("VPP", layout.vpp), ("CP", layout.cp))
    words = [f"{name}{size}" for name, size in sizes if size is not None and size > 1]
    if layout.ep > 1:
        words += [f"EP{layout.ep}", f"ETP{layout.etp}"]
    return " ".join(words) or "whole"


def _cut(count: int | None, samples: int | None, tokens: int | None) -> str:
    """Write how a rank's samples are cut: `15 of 8`, or by a token budget."""
    if count is None:
        return f"dynamic, {tokens:,} tok"
    return f"{count:,} of {samples:,}"


def _counts(counts: Sequence[int]) -> str:
    """Write equal neighbours once: `22, 21 x2`."""
    words = []
    for value in dict.fromkeys(counts):
        times = counts.count(value)
        words.append(f"{value:,}" + (f" x{times}" if times > 1 else ""))
    return ", ".join(words)
