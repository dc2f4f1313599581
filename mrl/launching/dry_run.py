"""What each rank of a run would be: roles, coordinates, device and environment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from mrl.config import Config, ParallelLayout, RunPlan
from mrl.config.roles import ROLES, rollout_ranks, trainer_ranks
from mrl.launching.devices import contradictions, device_of_rank, visible_devices


@dataclass(frozen=True, slots=True)
class Coordinates:
    """Where a rank is in a role's layout, each from 0."""

    tp: int
    cp: int
    dp: int
    pp: int
    ep: int  # 0 without experts


@dataclass(frozen=True, slots=True)
class RankView:
    """One rank, as it would run."""

    rank: int
    node: int
    local_rank: int
    device: str
    roles: Mapping[str, Coordinates]  # of the Megatron roles that it holds
    replica: tuple[int, int] | None  # of the engine: (replica, TP rank); None: no engine here


def coordinates(layout: ParallelLayout, rank: int) -> Coordinates:
    """Place a rank in Megatron-Core's order, TP fastest, then CP, DP, PP.

    Experts have an order of their own inside a stage: expert TP, then EP, then their copies.
    """
    rest, tp = divmod(rank, layout.tp)
    rest, cp = divmod(rest, layout.cp)
    pp, dp = divmod(rest, layout.dp)
    in_stage = rank % (layout.tp * layout.cp * layout.dp)
    return Coordinates(tp, cp, dp, pp, in_stage // layout.etp % layout.ep)


def view_ranks(
    config: Config, plan: RunPlan, device: str, given: Mapping[str, str], installed: int
) -> tuple[RankView, ...]:
    """Say what each rank of a job would run on hosts like this one.

    `given` is the environment, `installed` the number of this host's GPUs.
    """
    seen, size = visible_devices(given, installed), config.trainer.n_gpus_per_node
    trainer, engine = trainer_ranks(config), rollout_ranks(config)

    def view(rank: int) -> RankView:
        node, local = divmod(rank, size)
        roles = {
            name: coordinates(plan.roles[name].layout, rank)
            for name in ROLES
            if plan.roles[name].enabled and rank in trainer
        }
        replica = divmod(rank - engine.start, plan.rollout_tp) if rank in engine else None
        return RankView(rank, node, local, device_of_rank(local, seen, device), roles, replica)

    return tuple(view(rank) for rank in range(plan.world_size))


def print_dry_run(
    config: Config,
    views: tuple[RankView, ...],
    environment: Mapping[str, str],
    given: Mapping[str, str],
    installed: int,
    console: Console | None = None,
) -> int:
    """Print the ranks, their environment and what contradicts it; gives an exit status."""
    console = console or Console()
    table = Table(title="ranks", title_justify="left", box=box.SIMPLE)
    for name in ("rank", "node", "local", "device"):
        table.add_column(name, no_wrap=True)
    table.add_column("roles (tp cp dp pp, ep of experts)", overflow="fold", min_width=20)
    table.add_column("engine", no_wrap=True)
    for view in views:
        table.add_row(
            str(view.rank), str(view.node), str(view.local_rank), Text(view.device),
            _roles(view), _engine(view),
        )  # fmt: skip
    console.print(table)
    variables = Table(title="environment of rank 0", title_justify="left", box=box.SIMPLE)
    variables.add_column("variable", no_wrap=True)
    variables.add_column("value", overflow="fold")
    variables.add_column("from", style="dim")
    for name, value in sorted(environment.items()):
        variables.add_row(name, Text(value), "yours" if given.get(name) == value else "derived")
    console.print(variables)
    console.print(Text(command_line(config), style="bold"))
    problems = _problems(config, views, given, installed)
    for problem in problems:
        console.print(Text.assemble(("error ", "bold red"), problem))
    return 1 if problems else 0


def command_line(config: Config) -> str:
    """Say what starts the job on each node."""
    trainer = config.trainer
    if trainer.launcher == "ray":
        return "one Ray actor a rank, on the cluster at RAY_ADDRESS or on one of this host's own"
    if trainer.nnodes == 1:
        return f"mrl train spawns {trainer.n_gpus_per_node} ranks on this host"
    ranks = trainer.n_gpus_per_node
    return f"launch/torchrun.sh on each of {trainer.nnodes} nodes starts {ranks} ranks there"


def _problems(
    config: Config, views: tuple[RankView, ...], given: Mapping[str, str], installed: int
) -> list[str]:
    if views[0].device == "cpu":
        return []
    trainer = config.trainer
    return contradictions(given, installed, trainer.n_gpus_per_node, trainer.launcher == "ray")


def _roles(view: RankView) -> Text:
    groups: dict[Coordinates, list[str]] = {}
    for name, place in view.roles.items():
        groups.setdefault(place, []).append(name)
    return Text(
        "; ".join(
            f"{', '.join(names)}: tp{c.tp} cp{c.cp} dp{c.dp} pp{c.pp} ep{c.ep}"
            for c, names in groups.items()
        )
        or "-"
    )


def _engine(view: RankView) -> str:
    if view.replica is None:
        return "-"
    return f"replica {view.replica[0]} tp{view.replica[1]}"
