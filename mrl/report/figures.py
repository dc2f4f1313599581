"""Which metrics are drawn together, and the figures of one run or of several."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from markupsafe import Markup

from mrl.report.read import Run
from mrl.report.svg import BARS, DASHES, GREY, HUES, Line, Stack, line_chart, stacked_chart

_MOST_LINES = 8  # of a figure of several runs: beyond, only its first metric that any of them has
_SMALL = 0.005  # of the time: phases below it are drawn as one


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure: its metrics by name, `*` for anything, the most telling first."""

    part: str
    title: str
    note: str
    metrics: tuple[str, ...]
    log: bool = False
    needs: str = ""  # a metric without which the others say nothing
    of_faults: bool = False  # not drawn while all is 0


FIGURES: tuple[Figure, ...] = (
    Figure(
        "learning",
        "Reward",
        "mean over the step's samples",
        ("critic/score/mean", "critic/rewards/mean"),
    ),
    Figure("learning", "Validation", "a curve for each data source", ("val-core/*",)),
    Figure("learning", "Loss", "", ("sft/loss", "actor/pg_loss", "actor/kl_loss")),
    Figure("learning", "Entropy", "nats a token", ("actor/entropy", "actor/entropy_loss")),
    Figure(
        "learning",
        "KL",
        "nats a token: to the policy that sampled, and to the reference",
        ("actor/ppo_kl", "actor/kl_loss", "actor/reward_kl_penalty"),
    ),
    Figure(
        "learning",
        "Response length",
        "tokens",
        ("response_length/mean", "response_length/max", "response_length/min"),
    ),
    Figure(
        "learning",
        "Cut at the limit",
        "share of the responses, and of the prompts",
        ("response_length/clip_ratio", "prompt_length/clip_ratio"),
    ),
    Figure(
        "learning",
        "Clipped",
        "share of tokens whose ratio, or value, was held back",
        ("actor/pg_clipfrac", "actor/pg_clipfrac_lower", "critic/vf_clipfrac"),
    ),
    Figure(
        "learning",
        "Gradient norm",
        "before clipping",
        ("actor/grad_norm", "critic/grad_norm", "sft/grad_norm"),
    ),
    Figure("learning", "Learning rate", "", ("actor/lr", "critic/lr", "sft/lr")),
    Figure(
        "learning",
        "Groups without contrast",
        "share of prompts whose responses all score alike",
        ("group/zero_variance_ratio",),
    ),
    Figure(
        "learning",
        "Unscored",
        "samples a step",
        ("reward/unscored", "reward/timeouts", "reward/errors"),
        of_faults=True,
    ),
    Figure("learning", "Value loss", "critic", ("critic/vf_loss",)),
    Figure(
        "learning",
        "Explained variance",
        "of the returns, by the critic",
        ("critic/vf_explained_var",),
    ),
    Figure(
        "learning",
        "Skipped updates",
        "optimizer steps without a token to train on",
        ("actor/skipped_updates", "critic/skipped_updates"),
        of_faults=True,
    ),
    Figure(
        "learning",
        "Values and returns",
        "means a token",
        ("critic/values/mean", "critic/returns/mean"),
        needs="critic/values/mean",
    ),
    Figure("learning", "Experts", "balance of the routers", ("actor/moe_*",)),
    Figure(
        "mismatch",
        "Probability of a sampled token",
        "trainer against engine, absolute difference",
        ("training/rollout_probs_diff_mean", "training/rollout_probs_diff_max"),
        log=True,
    ),
    Figure(
        "mismatch",
        "Factor between engine and trainer",
        "1: they agree",
        ("rollout_corr/token_mult_prob_error", "rollout_corr/seq_mult_prob_error_max"),
    ),
    Figure(
        "mismatch",
        "KL of engine to trainer",
        "nats a token",
        ("rollout_corr/kl", "rollout_corr/k3_kl"),
    ),
    Figure("speed", "Throughput", "tokens/s a GPU, all GPUs of the job", ("perf/throughput",)),
    Figure("speed", "MFU", "model FLOPs over the peak", ("perf/mfu/*",)),
    Figure("speed", "Memory", "GB of the fullest rank", ("perf/memory*", "perf/max_memory*")),
    Figure("speed", "Host memory", "GB of the fullest host, all processes", ("perf/cpu_memory*",)),
    Figure("speed", "Tokens a step", "prompts and responses", ("perf/total_num_tokens",)),
    Figure("speed", "Imbalance", "busiest rank over the mean, by tokens", ("perf/imbalance/*",)),
    Figure(
        "speed", "Slowest rank", "its own seconds over the ranks' mean", ("perf/rank_spread/*",)
    ),
    Figure("speed", "Padding", "share of what is computed", ("perf/padding/*",)),
    Figure("speed", "Weight update", "seconds on the wire, slowest rank", ("reshard/seconds",)),
)


@dataclass(frozen=True, slots=True)
class Entry:
    """A line of a figure's legend, with numbers of its metric."""

    run: str
    metric: str
    hue: int
    dash: int
    statistics: dict[str, float | None]


@dataclass(frozen=True, slots=True)
class Drawn:
    """A figure as it goes onto the page."""

    figure: Figure
    chart: Markup
    legend: tuple[Entry, ...]


def drawn_figures(runs: Sequence[Run]) -> Iterator[Drawn]:
    """Draw every figure that has a metric: of one run a hue a metric, of several a hue a run."""
    for figure in FIGURES:
        found = [(r, run, name) for r, run in enumerate(runs) for name in _names(run, figure)]
        if not found:
            continue
        metrics = list(dict.fromkeys(name for _, _, name in found))
        if len(runs) > 1 and len(found) > _MOST_LINES and "*" not in figure.metrics[0]:
            metrics = metrics[:1]
        lines, legend = [], []
        for r, run, name in found:
            if name not in metrics:
                continue
            m, series = metrics.index(name), run.series[name]
            hue, dash = (m % HUES, 0) if len(runs) == 1 else (r % HUES, m % DASHES)
            label = name if len(runs) == 1 else f"{run.name}: {name}"
            lines.append(Line(label, series.steps, series.values, hue, dash))
            legend.append(Entry(run.name, name, hue, dash, series.statistics))
        legend.sort(key=lambda entry: metrics.index(entry.metric))
        yield Drawn(figure, line_chart(lines, figure.log), tuple(legend))


def _names(run: Run, figure: Figure) -> list[str]:
    """List the metrics of a run that a figure shows; those that say nothing new are left out."""
    if figure.needs and figure.needs not in run.series:
        return []
    names = [
        n for p in figure.metrics for n in run.series if fnmatchcase(n, p) and run.series[n].known
    ]
    if figure.of_faults and not any(any(run.series[name].known) for name in names):
        return []
    twins = [
        name
        for name, first in _SAME.items()
        if name in names and first in names and run.series[name].values == run.series[first].values
    ]
    twins += [name for name, first in _INSTEAD.items() if first in names]
    return [name for name in dict.fromkeys(names) if name not in twins]


_SAME = {"critic/rewards/mean": "critic/score/mean"}  # equal where nothing shapes rewards
_INSTEAD = {"actor/entropy_loss": "actor/entropy"}  # the same of the updates, where that is missing


@dataclass(frozen=True, slots=True)
class Phase:
    """Seconds of one phase over a run."""

    name: str
    hue: int
    mean: float  # s a step
    share: float  # of the steps' time


@dataclass(frozen=True, slots=True)
class Timeline:
    """Where the time of a run went."""

    run: str
    chart: Markup
    phases: tuple[Phase, ...]
    mean_step: float  # s
    steps_a_bar: float


ORDER = {  # of a step, with the hue of each
    "gen": 0,
    "reward": 6,
    "old_log_prob": 2,
    "ref": 5,
    "values": 4,
    "adv": GREY,
    "update_critic": 3,
    "update_actor": 1,
    "reshard": 8,
    "testing": 7,
    "save_checkpoint": 9,
    "rest": GREY + 1,
}
_PREFIX = "timing_s/"


def timeline(run: Run) -> Timeline | None:
    """Stack the phases of each step; small ones become one layer. None without a timed step."""
    rows = run.training
    if not rows:
        return None
    names = list(dict.fromkeys(n for row in rows for n in row if n.startswith(_PREFIX)))
    names = [n.removeprefix(_PREFIX) for n in names if n != f"{_PREFIX}step"]
    places = list(ORDER)
    names.sort(key=lambda n: places.index(n) if n in ORDER else len(ORDER) - 1.5)
    seconds = {n: [row.get(f"{_PREFIX}{n}") or 0.0 for row in rows] for n in names}
    total = sum(row[f"{_PREFIX}step"] or 0.0 for row in rows) or 1.0
    phases = [
        Phase(
            n,
            ORDER.get(n, GREY),
            sum(seconds[n]) / len(rows),
            sum(seconds[n]) / total,
        )
        for n in names
    ]
    large = [phase for phase in phases if phase.share >= _SMALL]
    stacks = [Stack(phase.name, seconds[phase.name], phase.hue) for phase in large]
    if small := [phase.name for phase in phases if phase not in large]:
        merged = [sum(seconds[n][i] for n in small) for i in range(len(rows))]
        stacks.append(Stack("small phases", merged, GREY))
    chart = stacked_chart([row["step"] for row in rows], stacks)
    width = max(len(rows) / BARS, 1.0)
    return Timeline(run.name, chart, tuple(phases), total / len(rows), width)
