"""What a trainer is asked to do, the same for all: cut from mrl's own config."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import pyarrow.parquet as pq

from mrl.config import Config

WARMUPS = 1  # steps
_TIMER = "timing_s/"
_SAVE = _TIMER + "save_checkpoint"


@dataclass(frozen=True, slots=True)
class Work:
    """Some steps of GRPO on prompts, model and reward that lie in a folder."""

    config: Config
    overrides: tuple[str, ...]  # that make mrl's recipe this config
    recipe: Path
    steps: int  # WARMUPS of them are left out
    device: str  # cpu | cuda
    devices: int  # that rates are divided by: GPUs, or 1 machine

    @property
    def model(self) -> str:
        """Give the model's folder."""
        return self.config.model.path

    @property
    def reward(self) -> str:
        """Give the file whose `compute_score` scores a response."""
        path = self.config.reward.custom_reward_function.path
        assert path is not None
        return path

    @property
    def updates(self) -> int:
        """Count the optimizer steps of a step."""
        return self.config.data.train_batch_size // self.config.actor.ppo_mini_batch_size

    def rows(self) -> list[dict[str, Any]]:
        """Read prompts as chats, with what the reward asks for."""
        (file,) = self.config.data.train_files
        rows: list[dict[str, Any]] = pq.read_table(file).to_pylist()
        for row in rows:
            if isinstance(row["prompt"], str):
                row["prompt"] = [{"role": "user", "content": row["prompt"]}]
        return rows


@dataclass(frozen=True, slots=True)
class Measured:
    """The steps of a run but the first."""

    step_s: tuple[float, ...]  # by the wall clock
    own_step_s: tuple[float, ...]  # by the trainer's own timers
    tokens: tuple[float, ...]  # of prompts and responses
    phases: tuple[Mapping[str, float], ...] = ()  # seconds by the trainer's own names

    @classmethod
    def of(cls, steps: Sequence[float], own: Sequence[float], tokens: Sequence[float]) -> Measured:
        """Leave out what warms up. Raises ValueError for lists of other lengths."""
        if not len(steps) == len(own) == len(tokens) > WARMUPS:
            raise ValueError(
                f"{len(steps)} steps, {len(own)} of its own timers, {len(tokens)} counts of tokens"
            )
        taken, owned, counted = (
            tuple(map(float, values[WARMUPS:])) for values in (steps, own, tokens)
        )
        return cls(taken, owned, counted)

    @classmethod
    def of_rows(cls, rows: Sequence[Mapping[str, Any]]) -> Measured:
        """Read steps as mrl and verl log them: the last one's checkpoint is no part of it."""
        seconds = [row["timing_s/step"] - row.get(_SAVE, 0.0) for row in rows]
        found = cls.of(seconds, seconds, [row["perf/total_num_tokens"] for row in rows])
        phases = tuple(
            {
                name.removeprefix(_TIMER): float(value)
                for name, value in row.items()
                if name.startswith(_TIMER) and value and name != _SAVE
            }
            for row in rows[WARMUPS:]
        )
        return replace(found, phases=phases)


class Trainer(Protocol):
    """A trainer to compare."""

    def run(self, work: Work, folder: Path) -> Measured:
        """Do the work in processes of its own, below a folder of its own.

        Raises RuntimeError, with the end of its log, when it fails.
        """
        ...


def to_json(runs: Sequence[Measured], devices: int) -> dict[str, Any]:
    """Put the steps of several runs together."""
    pairs = [
        (seconds, own, tokens)
        for run in runs
        for seconds, own, tokens in zip(run.step_s, run.own_step_s, run.tokens, strict=True)
    ]
    phases = [step for run in runs for step in run.phases]
    named = phases[0] if phases else ()
    return {
        "step_s": [seconds for seconds, _, _ in pairs],
        "own_step_s": [own for _, own, _ in pairs],
        "tokens_per_s": [tokens / seconds / devices for seconds, _, tokens in pairs],
        "tokens_a_step": statistics.mean(tokens for _, _, tokens in pairs),
        "median_phase_s": {
            name: statistics.median(step.get(name, 0.0) for step in phases) for name in named
        },
    }


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Read one object a line."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
