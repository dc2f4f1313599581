"""What a run's metrics are: for every name in metrics.jsonl its unit, reduction and source.

The entries are in `mrl.tracking.catalogue`; `python -m mrl.tracking.contract` writes
docs/METRICS.md from them. Nothing here imports torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

# What a placeholder in a name stands for.
PLACEHOLDERS: dict[str, str] = {
    "<role>": "actor|critic",
    "<phase>": "gen|reward|old_log_prob|ref|values|adv|update_critic|update_actor|reshard|testing"
    "|save_checkpoint|profile",
    "<ranked phase>": "gen|old_log_prob|ref|values|update_critic|update_actor",
    "<per-token phase>": "gen|ref|values|adv|update_critic|update_actor",
    "<stat>": "mean|max|min",
    "<extreme>": "mean|max",
    "<rule>": "(?:token|seq_sum|seq_mean|seq_max)_k[123]",  # as rollout_rs spells them
    "<data source>": ".+",
    "<name>": ".+",  # a number that the reward function returns beside the score
    "<n>": "[0-9]+",
    "<acc or reward>": "acc|reward",
}
_PLACEHOLDER = re.compile(r"<[^<>]+>")


@dataclass(frozen=True)
class Metric:
    """One metric, or several whose names follow a pattern."""

    name: str  # with placeholders
    unit: str
    reduction: str  # how the numbers of tokens, samples, micro-batches and ranks become one
    what: str
    when: str = ""  # on what condition; "": in every step of training with rewards

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        """Match the names that are meant."""
        parts = re.split(f"({_PLACEHOLDER.pattern})", self.name)
        return re.compile(
            "".join(
                f"(?:{PLACEHOLDERS[part]})" if part in PLACEHOLDERS else re.escape(part)
                for part in parts
            )
        )


@dataclass(frozen=True)
class Section:
    """Metrics that belong together, made in one place."""

    title: str
    source: str  # the module that makes them
    metrics: tuple[Metric, ...]
    note: str = ""


def catalogue() -> tuple[Section, ...]:
    """Give all sections, in the order of the page."""
    from mrl.tracking.catalogue import SECTIONS  # which imports what is above

    return SECTIONS


def all_metrics() -> Iterator[Metric]:
    """Iterate over all entries."""
    return (metric for section in catalogue() for metric in section.metrics)


@cache
def metric_of(name: str) -> Metric | None:
    """Find the entry of a name as it stands in metrics.jsonl; None: there is none."""
    return next((metric for metric in all_metrics() if metric.pattern.fullmatch(name)), None)


def uncontracted(names: Iterable[str]) -> list[str]:
    """List the names that have no entry."""
    return [name for name in names if metric_of(name) is None]


_HEAD = """# Metrics

Every number of `metrics.jsonl` (one row a step; TensorBoard shows the same), by verl's names where
verl has it. `python -m mrl.tracking.contract` writes this page from the table that the tests hold
every run to.

*Reduction* says how one number comes of many. **tokens**: a mean in which every trained token
counts alike, over all micro-batches and ranks of an optimizer step. **samples**: every scored
response counts alike. *all*: untrained or unscored ones too. **sum**: of parts that carry the
step's denominator, so that it is the loss of the whole batch however it was cut; or a count.
**same**: all ranks hold the number. **controller**: its own clock. Where a step takes several
optimizer steps, means, sums and *same* are averaged over those, each counting alike, and a max
stays a max. A mean over nothing is left out, never 0; a value that is not finite is `null`, and
`non_finite` lists its name.

*When* is empty for what every step of training with rewards has. `mrl sft` has `sft/*`, and the
timings and rates of what it does.
"""


def render() -> str:
    """Write the page."""
    lines = [_HEAD]
    for section in catalogue():
        lines += [f"## {section.title}", "", f"Made in `{section.source}`. {section.note}".rstrip()]
        lines += ["", "| metric | unit | reduction | what | when |", "|---|---|---|---|---|"]
        lines += [
            f"| `{m.name}` | {m.unit} | {m.reduction} | {m.what} | {m.when} |".replace("  |", " |")
            for m in section.metrics
        ]
        lines.append("")
    named = ", ".join(
        f"`{name}` one of {', '.join(values.split('|'))}"
        for name, values in PLACEHOLDERS.items()
        if re.fullmatch(r"[\w|]+", values)
    )
    lines += [f"In names: {named}.", ""]
    return "\n".join(lines)


def main(root: Path = Path()) -> None:
    """Write docs/METRICS.md below the root of the checkout."""
    (root / "docs" / "METRICS.md").write_text(render(), encoding="utf-8")


if __name__ == "__main__":
    main()
