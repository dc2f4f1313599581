"""What a benchmark declares to have measured: one form for tables and comparisons; no torch.

A record is one JSON file: {name, environment, result}, and `result["figures"]` lists the figures.
A file that was written before they were listed gets them from the rest of its result
(benchmarks/declared.py); measured numbers are never rewritten.

FLOPs are those of the model (mrl/tracking/flops.py): causal attention is counted, the embedding
lookup, padding and recomputation are not.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

Better = Literal["higher", "lower"]
FLOP_CONVENTION = (
    "model FLOPs: causal attention counted; embedding lookup, padding and recomputation not"
)


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured quantity; `value` is the median of its repeats."""

    name: str
    value: float
    unit: str
    better: Better
    min: float
    max: float
    repeats: int
    roofline: float | None = None  # in the same unit: the best that the hardware allows

    @classmethod
    def of(
        cls,
        name: str,
        values: Sequence[float],
        unit: str,
        better: Better,
        roofline: float | None = None,
    ) -> Figure:
        """Sum up repeats."""
        return cls(
            name, statistics.median(values), unit, better, min(values), max(values), len(values),
            roofline,
        )  # fmt: skip

    @classmethod
    def from_json(cls, entry: Mapping[str, Any]) -> Figure:
        """Read what `asdict` gives. Raises ValueError for other keys or another direction."""
        known = {field.name for field in fields(cls)}
        if set(entry) != known:
            raise ValueError(f"figure {entry.get('name')!r} has keys {sorted(entry)}, not {known}")
        if entry["better"] not in ("higher", "lower"):
            raise ValueError(f"figure {entry['name']!r}: better is {entry['better']!r}")
        return cls(**entry)

    @property
    def attained(self) -> float | None:
        """Give the share of what the hardware allows; None where that is not known."""
        if not self.roofline or not self.value:
            return None
        share = self.value / self.roofline
        return share if self.better == "higher" else 1 / share

    def gain(self, older: Figure) -> float:
        """Give how many times better this is than `older`; 1 where both are 0."""
        new, old = (self, older) if self.better == "higher" else (older, self)
        if new.value == old.value:
            return 1.0
        return new.value / old.value if old.value else float("inf")


@dataclass(frozen=True, slots=True)
class Record:
    """A benchmark's JSON file."""

    name: str
    environment: Mapping[str, Any]
    result: Mapping[str, Any]
    figures: tuple[Figure, ...]

    @classmethod
    def parse(cls, text: str, source: str) -> Record:
        """Read a file's text. Raises ValueError, naming the source, for what is not a record."""
        from benchmarks.declared import declare

        try:
            found = json.loads(text)
            name, environment, result = (found[k] for k in ("name", "environment", "result"))
            listed = result.get("figures")
            figures = (
                declare(name, result, environment)
                if listed is None
                else tuple(Figure.from_json(entry) for entry in listed)
            )
        except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{source} is not the JSON of a benchmark: {error!r}") from error
        return cls(name, environment, result, figures)

    @classmethod
    def read(cls, path: Path) -> Record:
        """Read a file. Raises FileNotFoundError or ValueError."""
        return cls.parse(path.read_text(encoding="utf-8"), str(path))

    @property
    def hardware(self) -> str:
        """Say what it was measured on, as clocks and cores of other machines may differ."""
        gpus = [gpu["name"] for gpu in self.environment["gpus"]]
        if gpus:
            return f"{len(gpus)} x {gpus[0]}"
        cpu = self.environment["cpu"]
        return f"{cpu['model']}, {cpu['cores']} cores"


def listed(figures: Sequence[Figure]) -> list[dict[str, Any]]:
    """Give figures as JSON. Raises ValueError where two have one name."""
    names = [figure.name for figure in figures]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"figures of one name: {', '.join(twice)}")
    return [asdict(figure) for figure in figures]
