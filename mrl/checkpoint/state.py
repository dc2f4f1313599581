"""What the trainer itself must remember between runs; weights are the workers' files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from mrl.checkpoint.atomic import write_atomically

STATE_FILE = "trainer_state.json"
_RESULT = "val-core/"


@dataclass(frozen=True, slots=True)
class TrainerState:
    """The trainer's state after `global_step` steps; seeds follow from `seed` and the step."""

    global_step: int
    policy_version: int
    seed: int
    stream: Mapping[str, Any]  # where the data stream stands; JSON values
    kl_coef: float  # of the KL controller in the reward
    best_metric: float | None = None  # highest validation result so far
    best_step: int | None = None
    best_name: str | None = None  # trainer.best_metric as it was then

    def with_validation(self, metric: float | None, name: str | None = None) -> TrainerState:
        """Remember a validation result of this step, if there is one, if it is the best so far.

        Results of another `name` do not compare.
        """
        if metric is None:
            return self
        compares = self.best_metric is not None and self.best_name == name
        if compares and self.best_metric is not None and metric <= self.best_metric:
            return self
        return replace(self, best_metric=metric, best_step=self.global_step, best_name=name)

    def save(self, folder: Path) -> None:
        """Write into a checkpoint folder.

        Raises:
            ValueError: a value is not plain JSON.
        """
        try:
            text = json.dumps(asdict(self), indent=1, allow_nan=False)
        except TypeError as error:
            raise ValueError(f"trainer state is not plain JSON: {error}") from error
        write_atomically(folder / STATE_FILE, text + "\n")

    @staticmethod
    def load(folder: Path) -> TrainerState:
        """Read from a checkpoint folder.

        Raises:
            FileNotFoundError: there is no state file.
            ValueError: it lacks a field or has one too many.
        """
        path = folder / STATE_FILE
        held = json.loads(path.read_text(encoding="utf-8"))
        names = {field.name for field in fields(TrainerState)}
        if set(held) != names:
            raise ValueError(
                f"{path}: missing fields {sorted(names - set(held))}, "
                f"unknown fields {sorted(set(held) - names)}"
            )
        return TrainerState(**held)


def best_value(metrics: Mapping[str, float], name: str | None) -> float | None:
    """Give the validation result that says which step is best: the one named, or the first.

    None where no sample was scored: a count of those is no result.

    Raises ValueError listing the metrics where there is none of that name.
    """
    if name is None:
        return next((value for key, value in metrics.items() if key.startswith(_RESULT)), None)
    if name not in metrics:
        raise ValueError(f"trainer.best_metric is {name!r}, validation gives {', '.join(metrics)}")
    return metrics[name]


def is_due(step: int, freq: int, last_step: int) -> bool:
    """Tell whether something done every `freq` steps, and after the last one, is due at `step`.

    Below 1, `freq` means only after the last step.
    """
    return step == last_step or (freq >= 1 and step % freq == 0)
