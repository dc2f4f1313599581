"""metrics.jsonl: one strict JSON object a step, one row a step, resumes included."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mrl.checkpoint.atomic import write_atomically


class MetricsFile:
    """Appends the metrics of each step to a file that always reads as a single run."""

    def __init__(self, path: Path, resume_step: int) -> None:
        """Open the file after `resume_step` steps (0: a fresh run).

        Rows of later steps, written by a run that went on after the checkpoint that this one
        starts from, move to `<name>.superseded`, as does a last line cut short by a kill.
        """
        self.path = path
        self._last_step = self._rewind(resume_step)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append one row.

        JSON has no NaN or infinity: those become null, and `non_finite` lists their names.

        Raises:
            ValueError: the file has a row for this or a later step.
        """
        if self._last_step is not None and step <= self._last_step:
            raise ValueError(
                f"{self.path} has step {self._last_step} already; step {step} would repeat it"
            )
        row: dict[str, Any] = {"step": step}
        row |= {name: v if math.isfinite(v) else None for name, v in metrics.items()}
        non_finite = sorted(name for name, v in metrics.items() if not math.isfinite(v))
        if non_finite:
            row["non_finite"] = non_finite
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row, allow_nan=False) + "\n")
        self._last_step = step

    def _rewind(self, resume_step: int) -> int | None:
        """Keep rows up to a step and put the others by; give the last step kept."""
        if not self.path.is_file():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            return None
        kept: list[str] = []
        later: list[str] = []
        last: int | None = None
        for line in self.path.read_text(encoding="utf-8").splitlines():
            step = step_of(line)
            fits = step is not None and resume_step > 0 and step <= resume_step
            if fits:
                last = step
            (kept if fits else later).append(line)
        if later:
            with self.path.with_name(self.path.name + ".superseded").open("a") as file:
                file.writelines(line + "\n" for line in later)
            write_atomically(self.path, "".join(line + "\n" for line in kept))
        return last


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Read every complete row of a metrics file."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines if step_of(line) is not None]


def step_of(line: str) -> int | None:
    """Give a row's step; None when the line is not a whole row."""
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row["step"] if isinstance(row, dict) and isinstance(row.get("step"), int) else None
