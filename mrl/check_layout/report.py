"""What a check found."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from mrl.check_layout.compare import Comparison
from mrl.check_layout.round import Round


@dataclass(frozen=True, slots=True)
class LayoutResult:
    """What became of one layout: compared, or not possible, or failed on its ranks."""

    name: str
    ranks: int
    dtype: str
    round: Round | None
    comparison: Comparison | None  # None: the reference, or a layout that gave no numbers
    rule: str  # how it was judged
    problem: str  # why there are no numbers, else ""
    possible: bool
    seconds: float

    @property
    def failed(self) -> bool:
        """Say whether the layout is wrong, rather than right or not possible."""
        if not self.possible:
            return False
        return bool(self.problem) or (self.comparison is not None and not self.comparison.ok)

    def to_json(self) -> dict[str, Any]:
        """Give the result as JSON types; differences are absolute, `relative` is judged."""
        found, compared = self.round, self.comparison
        return {
            "layout": self.name,
            "ranks": self.ranks,
            "dtype": self.dtype,
            "seconds": self.seconds,
            "possible": self.possible,
            "failed": self.failed,
            "problem": self.problem,
            "rule": self.rule,
            "actor": [dict(metrics) for metrics in found.actor] if found else [],
            "critic": [dict(metrics) for metrics in found.critic] if found else [],
            "differences": [
                {**asdict(difference), "bound": _finite(difference.bound), "ok": difference.ok}
                for difference in (compared.differences if compared else ())
            ],
        }


@dataclass(frozen=True, slots=True)
class CheckReport:
    """A reference, and the layouts that were compared with it."""

    model_path: str
    rows: int
    tokens: int
    response_tokens: int
    reference: LayoutResult
    layouts: tuple[LayoutResult, ...]

    @property
    def ok(self) -> bool:
        """Say whether no layout failed."""
        return not any(layout.failed for layout in self.layouts)

    def to_json(self) -> dict[str, Any]:
        """Give the report as JSON types."""
        return {
            "model": self.model_path,
            "rows": self.rows,
            "tokens": self.tokens,
            "response_tokens": self.response_tokens,
            "reference": self.reference.to_json(),
            "layouts": [layout.to_json() for layout in self.layouts],
            "ok": self.ok,
        }


def _finite(value: float) -> float | None:
    return value if value != float("inf") else None
