"""Slurm scripts rendered from a config: `mrl launch slurm`."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mrl.config import Config, ConfigError, load_config
from mrl.launching.sweep import combinations

# sbatch cuts its comment lines at blanks and stops at `#`: what is written there has neither.
_SAFE = re.compile(r"[\w.,:@%/+=\[\]*-]+")
SCRIPTS = {"torchrun": "launch/slurm_torchrun.sbatch", "ray": "launch/slurm_ray.sbatch"}


@dataclass(frozen=True, slots=True)
class SlurmJob:
    """A job to render; what is None is left to the cluster's defaults."""

    config: str
    overrides: tuple[str, ...]
    nodes: int
    gpus_per_node: int
    launcher: str = "torchrun"  # a key of SCRIPTS
    job_name: str | None = None  # None: mrl-<name of the config>
    time: str | None = None
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    options: tuple[str, ...] = ()  # more of sbatch's own, as "--mem=0"
    sweep: tuple[str, ...] = ()  # axes, as key=a|b
    save_before_s: int = 300  # how long before the time limit the run is asked to save


def render(job: SlurmJob) -> str:
    """Write the sbatch file of a job; every value is quoted.

    Raises ValueError for what sbatch could not read, ConfigError for a run that cannot start.
    """
    if job.launcher not in SCRIPTS:
        raise ValueError(f"launcher is {job.launcher!r}, expected {' or '.join(SCRIPTS)}")
    if job.nodes < 1 or job.gpus_per_node < 1:
        raise ValueError(
            f"--nodes {job.nodes} --gpus-per-node {job.gpus_per_node}: expected 1 or more"
        )
    runs = combinations(job.sweep) if job.sweep else [()]
    folders = [_check(job, run).trainer.default_local_dir for run in _named(job, runs)]
    if len(set(folders)) < len(folders):
        raise ValueError(
            f"the runs of the sweep share the folder {folders[0]}: let "
            "trainer.default_local_dir contain ${trainer.experiment_name}"
        )
    words = shlex.join([job.config, *job.overrides])
    told = "# Written by `mrl launch slurm`: submit it with sbatch from the project root."
    lines = ["#!/usr/bin/env bash", told, *_header(job, len(runs)), "set -euo pipefail"]
    lines.append('cd "$SLURM_SUBMIT_DIR"')
    lines.append(f"export NPROC_PER_NODE={job.gpus_per_node}")
    if not job.sweep:
        return "\n".join([*lines, f"source {SCRIPTS[job.launcher]} {words}", ""])
    lines.append("case ${SLURM_ARRAY_TASK_ID:?submit as it is: it is a job array} in")
    lines += [
        f"  {index}) sweep=({shlex.join(run)}) ;;" for index, run in enumerate(_named(job, runs))
    ]
    lines += ["  *) exit 2 ;;", "esac"]
    return "\n".join([*lines, f'source {SCRIPTS[job.launcher]} {words} "${{sweep[@]}}"', ""])


def _named(job: SlurmJob, runs: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Give each run of a sweep a name of its own, so that no two share checkpoints."""
    if not job.sweep:
        return list(runs)
    base = _check(job, ()).trainer.experiment_name
    return [(*run, f"trainer.experiment_name={base}-{i}") for i, run in enumerate(runs)]


def _check(job: SlurmJob, run: Sequence[str]) -> Config:
    """Load the config as the job will."""
    # the scripts put theirs first, so a user's own number wins there and must be the same here
    size = [f"trainer.nnodes={job.nodes}", f"trainer.n_gpus_per_node={job.gpus_per_node}"]
    try:
        config = load_config(job.config, [*size, *job.overrides, *run])
    except ConfigError as error:
        if not run:
            raise
        raise ValueError(f"run {' '.join(run)}: {error}") from error
    got = config.trainer.nnodes, config.trainer.n_gpus_per_node
    if got != (job.nodes, job.gpus_per_node):
        raise ValueError(
            f"trainer.nnodes={got[0]} trainer.n_gpus_per_node={got[1]} among the overrides, "
            f"but --nodes {job.nodes} --gpus-per-node {job.gpus_per_node}: leave the overrides out"
        )
    return config


def _header(job: SlurmJob, runs: int) -> list[str]:
    name = job.job_name or f"mrl-{Path(job.config).stem}"
    options = [
        f"--job-name={name}",
        f"--nodes={job.nodes}",
        "--ntasks-per-node=1",
        f"--gpus-per-node={job.gpus_per_node}",
        "--exclusive",
        f"--output=slurm-{'%A_%a' if job.sweep else '%j'}.log",
        "--open-mode=append",
        f"--signal=B:USR1@{job.save_before_s}",
        "--requeue",
        *(f"--array=0-{runs - 1}" for _ in job.sweep[:1]),
        *(
            f"--{key}={value}"
            for key in ("time", "partition", "account", "qos")
            if (value := getattr(job, key)) is not None
        ),
        *job.options,
    ]
    for option in options:
        if not option.startswith("--") or not _SAFE.fullmatch(option):
            raise ValueError(
                f"{option!r} cannot stand in an #SBATCH line: expected --name=value without "
                "blanks, quotes or #"
            )
    return [f"#SBATCH {option}" for option in options]
