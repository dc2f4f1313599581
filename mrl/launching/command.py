"""The arguments of `mrl launch`, `mrl doctor` and `mrl train --dry-run`, and what they run."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

from mrl.config import Config

_LETTERS = ("time", "partition", "account", "qos")


def add_launch(launch: argparse.ArgumentParser) -> None:
    """Declare `mrl launch slurm CONFIG --nodes N ...`."""
    launch.add_argument("system", choices=("slurm",))
    launch.add_argument("config", help="a YAML file")
    launch.add_argument("overrides", nargs="*", metavar="key=value")
    launch.add_argument("--nodes", type=int, metavar="N", help="default: trainer.nnodes")
    launch.add_argument(
        "--gpus-per-node", type=int, metavar="N", help="default: trainer.n_gpus_per_node"
    )
    launch.add_argument("--ray", action="store_true", help="ranks as Ray actors, not by torchrun")
    for name in ("job-name", *_LETTERS):
        launch.add_argument(f"--{name}", metavar="VALUE", help="of sbatch")
    launch.add_argument(
        "--sbatch", action="append", default=[], metavar="--OPTION=VALUE", help="of sbatch, any"
    )
    launch.add_argument(
        "--sweep",
        action="append",
        default=[],
        metavar="key=a|b",
        help="a job array: a run for each value, and for each combination of several",
    )
    launch.add_argument(
        "--save-before",
        type=int,
        default=300,
        metavar="SECONDS",
        help="ask for a checkpoint this long before the time limit (default 300)",
    )
    launch.add_argument("--output", metavar="FILE", help="write it there, not to the terminal")


def launch(arguments: argparse.Namespace) -> None:
    """Render a Slurm script."""
    from mrl.config.explain import load_told
    from mrl.launching.slurm import SlurmJob, render

    sizes = arguments.nodes, arguments.gpus_per_node
    if None in sizes:
        trainer = load_told(arguments.config, arguments.overrides).trainer
        sizes = sizes[0] or trainer.nnodes, sizes[1] or trainer.n_gpus_per_node
    job = SlurmJob(
        config=arguments.config,
        overrides=tuple(arguments.overrides),
        nodes=sizes[0],
        gpus_per_node=sizes[1],
        launcher="ray" if arguments.ray else "torchrun",
        job_name=arguments.job_name,
        time=arguments.time,
        partition=arguments.partition,
        account=arguments.account,
        qos=arguments.qos,
        options=tuple(arguments.sbatch),
        sweep=tuple(arguments.sweep),
        save_before_s=arguments.save_before,
    )
    text = render(job)
    if arguments.output is None:
        print(text, end="")
    else:
        Path(arguments.output).write_text(text)
        print(f"submit it from the project root: sbatch {arguments.output}")


def add_doctor(doctor: argparse.ArgumentParser) -> None:
    """Declare `mrl doctor`."""
    doctor.add_argument("--folder", default="runs", help="where runs are written (default runs)")
    doctor.add_argument("--json", action="store_true", help="print JSON")


def doctor(arguments: argparse.Namespace) -> int:
    """Check this machine; gives 1 when anything failed."""
    from mrl.launching.doctor import run

    def as_json(findings: object) -> None:
        print(json.dumps(findings, indent=1))

    return run(Path(arguments.folder), as_json if arguments.json else None)


def dry_run(config: Config) -> int:
    """Print what each rank would run, on hosts like this one; gives 1 for a contradiction."""
    from mrl.config import build_plan
    from mrl.launching.devices import installed_gpus
    from mrl.launching.dry_run import print_dry_run, view_ranks
    from mrl.workers.job import device_of
    from mrl.workers.spmd import rank_environment

    plan, device, installed = build_plan(config), device_of(config), installed_gpus()
    views = view_ranks(config, plan, device, os.environ, installed)
    environment = rank_environment(
        0,
        0,
        plan.world_size,
        config.trainer.n_gpus_per_node,
        device,
        os.environ,
        config.trainer.full_determinism,
    )
    return print_dry_run(config, views, environment, os.environ, installed)


def require_devices(config: Config) -> None:
    """Raise ValueError when this host's ranks cannot have a GPU each; names the variables."""
    from mrl.launching.devices import contradictions, installed_gpus
    from mrl.workers.job import device_of

    trainer = config.trainer
    if trainer.launcher == "ray" or device_of(config) == "cpu":  # a Ray driver needs no GPU
        return
    found = contradictions(os.environ, installed_gpus(), trainer.n_gpus_per_node, ray=False)
    if found:
        raise ValueError("; ".join(found))
