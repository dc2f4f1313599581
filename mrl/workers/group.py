"""Roles as the controller sees them: scatter, call, gather.

A pool carries calls to ranks; a group knows which rows a rank needs and which ranks answer. The
trainer never asks what kind of pool it talks to.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from mrl.algorithms.reductions import Max, Metric, merge
from mrl.batching.balance import sequence_costs
from mrl.batching.shares import Share, imbalance, shares
from mrl.resharding.sync import SyncStats
from mrl.types import (
    Batching,
    PolicyBatch,
    Prompt,
    Ragged,
    Sample,
    SamplingParams,
    Sequences,
    ValueBatch,
)
from mrl.workers.busy import RankSeconds, Timed


class Answers(Future[list[Any]]):
    """What some ranks answer to one call, in the order in which they were asked."""

    def __init__(self, ranks: Sequence[int]) -> None:
        super().__init__()
        assert len(set(ranks)) == len(ranks), f"asked twice: {ranks}"
        self.ranks = ranks
        self.seconds: dict[int, float] = {}  # of the ranks' own work, where they tell
        self._values: dict[int, Any] = {}
        self._lock = threading.Lock()  # ranks answer in threads of their own
        if not ranks:
            self.set_result([])

    def awaits(self, rank: int) -> bool:
        """Say whether a rank was asked and has not answered."""
        return rank in self.ranks and rank not in self._values

    def take(self, rank: int, value: Any) -> bool:
        """Note a rank's answer and say whether it was the last."""
        with self._lock:
            if isinstance(value, Timed):
                value, self.seconds[rank] = value
            self._values[rank] = value
            is_last = len(self._values) == len(self.ranks)
        if is_last:
            self.set_result([self._values[rank] for rank in self.ranks])
        return is_last


class RankPool(Protocol):
    """Processes that hold roles; calls to one rank run in the order of submission."""

    world_size: int

    def submit(
        self, ranks: Sequence[int], role: str, method: str, args: tuple[Any, ...]
    ) -> Answers:
        """Ask different ranks to run a role's method; nobody changes `args`."""
        ...

    def wait(self, calls: Sequence[Answers]) -> list[list[Any]]:
        """Give the answers to each call, or raise the first cause as soon as a rank fails."""
        ...

    def close(self) -> None:
        """End the ranks and wait until they are gone."""
        ...


class WorkerError(RuntimeError):
    """A rank failed: its rank, the call and the remote traceback.

    `cause` is one line, `evidence` the traceback or log that belongs above it. A `lasting` one is
    of wrong input, which another try would meet again.
    """

    def __init__(self, cause: str, evidence: str = "", lasting: bool = False) -> None:
        super().__init__(f"{evidence}\n{cause}" if evidence else cause)
        self.cause, self.evidence, self.lasting = cause, evidence, lasting

    def within(self, where: str) -> WorkerError:
        """Say where it happened, in front of the cause."""
        return WorkerError(f"{where}{self.cause}", self.evidence, self.lasting)


def call_all(pool: RankPool, ranks: Sequence[int], role: str, method: str, *args: Any) -> list[Any]:
    """Call a role on its ranks with the same arguments and wait for all."""
    (answers,) = pool.wait([pool.submit(ranks, role, method, args)])
    return answers


@dataclass(frozen=True, slots=True)
class MegatronRanks:
    """Which data-parallel part each rank serves; ranks run tp, cp, dp, pp from fast to slow.

    They are the first ranks of the job.
    """

    tp: int
    cp: int
    dp: int
    pp: int
    interleaved: bool = False  # stages of several chunks: whole rounds of micro-batches

    @property
    def all(self) -> range:
        """List the ranks of the role."""
        return range(self.tp * self.cp * self.dp * self.pp)

    def part_of(self, rank: int) -> int:
        """Give the data-parallel index of a rank."""
        return rank // (self.tp * self.cp) % self.dp

    def part(self, index: int) -> list[int]:
        """List the ranks of a data-parallel part, ascending."""
        width = self.tp * self.cp  # neighbours, on each pipeline stage
        starts = range(index * width, len(self.all), width * self.dp)
        return [rank for start in starts for rank in range(start, start + width)]


class TrainGroup:
    """A Megatron role on all its ranks; rows go out by part and come back in order."""

    def __init__(
        self,
        pool: RankPool,
        role: str,
        ranks: MegatronRanks,
        batching: Batching,
        log_prob_batching: Batching,
        hidden_size: int,
        balanced: bool = True,
        busy: RankSeconds | None = None,
    ) -> None:
        """Speak to the role on `ranks`; `busy` is told how long each works on rows."""
        self.pool, self.role, self.ranks = pool, role, ranks
        self.busy = busy or RankSeconds()
        self.batching, self.log_prob_batching = batching, log_prob_batching
        self.hidden_size, self.balanced = hidden_size, balanced

    def log_probs(self, sequences: Sequences, routing: Ragged | None = None) -> Any:
        """Give log-probs (and for the actor entropies) of the response tokens, rows in order.

        Routers repeat the choices of `routing`; an actor that records its own gives them third.
        """
        return self._columns("log_probs", sequences, *([] if routing is None else [routing]))

    def values(self, sequences: Sequences) -> Ragged:
        """Give values at the response tokens, rows in order."""
        return self._columns("values", sequences)

    def update(
        self, batch: PolicyBatch | ValueBatch, method: str = "update"
    ) -> Mapping[str, Metric]:
        """Take one optimizer step on a mini-batch; its metrics are reduced over the ranks."""
        return self.updates([batch], method)[0]

    def updates(
        self,
        batches: Iterable[PolicyBatch | ValueBatch],
        method: str = "update",
        told: Callable[[tuple[Ragged, ...]], None] = lambda columns: None,
    ) -> list[Mapping[str, Metric]]:
        """Take an optimizer step on each mini-batch, as `update` does.

        The next one is made and sent while the ranks work on the one before. Of a batch without
        old log-probs `told` is given what `log_probs` would have given before its step.
        """
        _dealt_alike.cache_clear()
        found: list[Mapping[str, Metric]] = []
        under_way: list[tuple[list[Answers], list[Share], Max]] = []

        def finish() -> None:
            asked, parts, balance = under_way.pop(0)
            reports = self._answers(asked)
            if isinstance(reports[0], tuple):
                told(_in_order([columns for _, columns in reports], parts))
                reports = [metrics for metrics, _ in reports]
            found.append({**merge(reports), f"perf/imbalance/{self.role}": balance})

        for batch in batches:
            parts = self._split(batch.sequences, self.batching)
            rows = zip(_dealt(batch, parts), parts, strict=True)
            is_fresh = isinstance(batch, PolicyBatch) and batch.old_log_probs is None
            asked = self._send(
                "update_fresh" if is_fresh else method, [(own, part.cuts) for own, part in rows]
            )
            under_way.append((asked, parts, Max(imbalance(self._costs(batch.sequences), parts))))
            if len(under_way) > 1:
                finish()
        while under_way:
            finish()
        return found

    def save(self, folder: Path) -> None:
        """Write weights and optimizer state below `folder`.

        Raises OSError when a rank wrote what this process cannot see.
        """
        self._check_seen(folder, call_all(self.pool, self.ranks.all, self.role, "save", folder))

    def begin_save(self, folder: Path) -> None:
        """Start what `save` does; training may go on meanwhile, but no other save."""
        call_all(self.pool, self.ranks.all, self.role, "begin_save", folder)

    def is_saved(self) -> bool:
        """Say whether all ranks have written what was begun, or one has failed to."""
        return all(call_all(self.pool, self.ranks.all, self.role, "is_saved"))

    def finish_save(self, folder: Path) -> None:
        """Wait for the end of what was begun; raises as `save`."""
        self._check_seen(folder, call_all(self.pool, self.ranks.all, self.role, "finish_save"))

    def _check_seen(self, folder: Path, answers: Sequence[Sequence[str]]) -> None:
        for rank, files in enumerate(answers):
            lost = [file for file in files if not (folder / file).is_file()]
            if lost:
                raise OSError(
                    f"rank {rank} wrote {lost[0]} below {folder}, which is not to be seen here: "
                    "trainer.default_local_dir must lie on a disk that all nodes share"
                )

    def load(self, folder: Path) -> None:
        """Read what `save` wrote."""
        call_all(self.pool, self.ranks.all, self.role, "load", folder)

    def _columns(self, method: str, sequences: Sequences, *columns: Ragged) -> Any:
        parts = self._split(sequences, self.log_prob_batching)
        rows, cuts = _dealt_alike(sequences, tuple(parts)), [part.cuts for part in parts]
        more = [_dealt(column, parts) for column in columns]
        asked = self._send(method, [*zip(rows, cuts, *more, strict=True)])
        return _in_order(self._answers(asked), parts)

    def _costs(self, sequences: Sequences) -> list[float]:
        return sequence_costs(sequences.tokens.lengths, self.hidden_size)

    def _split(self, sequences: Sequences, batching: Batching) -> list[Share]:
        """Share rows over the data-parallel parts and cut them into micro-batches."""
        return _shares(
            tuple(sequences.tokens.lengths.tolist()),
            tuple(self._costs(sequences)),
            batching,
            self.ranks.dp,
            self.ranks.pp if self.ranks.interleaved else 1,
            self.balanced,
        )

    def _send(self, method: str, calls: Sequence[tuple[Any, ...]]) -> list[Answers]:
        """Send each data-parallel part its call."""
        return [
            self.pool.submit(self.ranks.part(part), self.role, method, args)
            for part, args in enumerate(calls)
        ]

    def _answers(self, asked: Sequence[Answers]) -> list[Any]:
        """Wait for what was sent; give one answer a part, in part order."""
        given = self.pool.wait(asked)
        self.busy.add(answers.seconds for answers in asked)
        return [
            next((answer for answer in answers if answer is not None), None) for answers in given
        ]


# Roles of equal layout score the same rows one after the other.
_shares = lru_cache(maxsize=1)(shares)


def _dealt(batch: Any, parts: Sequence[Share]) -> Sequence[Any]:
    """Give each part its rows: brought into the parts' order once, of which each is a view."""
    in_order = batch.select([i for part in parts for i in part.rows])
    return _cut(in_order, [len(part.rows) for part in parts])


def _cut(rows: Any, sizes: Sequence[int]) -> Sequence[Any]:
    """Cut a batch, column by column, into parts of so many rows."""
    match rows:
        case None:
            return [None] * len(sizes)
        case Ragged():
            return rows.contiguous().split(sizes)
        case Tensor():
            return torch.split(rows, list(sizes))
    columns = [_cut(getattr(rows, f.name), sizes) for f in fields(rows)]
    return [type(rows)(*part) for part in zip(*columns, strict=True)]


@lru_cache(maxsize=1)
def _dealt_alike(sequences: Sequences, parts: tuple[Share, ...]) -> Sequence[Sequences]:
    """Deal what several roles score: to those of equal layout it is brought together once."""
    return _dealt(sequences, parts)


def _in_order(answers: Sequence[Any], parts: Sequence[Share]) -> Any:
    """Bring the columns (or tuples of columns) that the parts answered into the rows' order."""
    order = [i for part in parts for i in part.rows]
    if isinstance(answers[0], tuple):
        return tuple(Ragged.in_order(column, order) for column in zip(*answers, strict=True))
    return Ragged.in_order(answers, order)


class RolloutGroup:
    """The engine's replicas, each of `tp` ranks that answer together for their prompts."""

    def __init__(
        self,
        pool: RankPool,
        tp: int,
        spread: Callable[[int, int], Sequence[int]],
        ranks: range | None = None,
        slots: Sequence[int] | None = None,
        busy: RankSeconds | None = None,
    ) -> None:
        """Take the engine's `ranks` (None: all of the job) in the order of their slots.

        Slot i is tensor-parallel rank i % tp of replica i // tp; rank ranks[j] has slot
        `slots[j]` (None: j). `spread(total, parts)` says how many prompts each replica takes.
        """
        self.pool, self.tp, self.spread = pool, tp, spread
        self.ranks = range(pool.world_size) if ranks is None else ranks
        self.slots = tuple(range(len(self.ranks))) if slots is None else tuple(slots)
        self.replicas = len(self.ranks) // tp
        self.busy = busy or RankSeconds()

    def generate(
        self, prompts: Sequence[Prompt], sampling: SamplingParams
    ) -> list[tuple[Sample, ...]]:
        """Draw `sampling.n` responses a prompt; one tuple a prompt, in the prompts' order."""
        counts = self.spread(len(prompts), self.replicas)
        starts = [sum(counts[:i]) for i in range(self.replicas + 1)]
        requests = [
            tuple((p.uid, p.token_ids) for p in prompts[starts[i] : starts[i + 1]])
            for i in range(self.replicas)
        ]
        in_slots = [rank for _, rank in sorted(zip(self.slots, self.ranks, strict=True))]
        asked = [
            self.pool.submit(
                in_slots[i * self.tp :][: self.tp], "rollout", "generate", (own, sampling)
            )
            for i, own in enumerate(requests)
        ]
        given = self.pool.wait(asked)
        self.busy.add(answers.seconds for answers in asked)
        return [group for answers in given for group in answers[0]]

    def sleep(self) -> list[int]:
        """Free the engine's memory, where the device can; gives the bytes in use, 0 on a CPU."""
        return call_all(self.pool, self.ranks, "rollout", "sleep")

    def sync(self, version: int) -> list[SyncStats]:
        """Bring the actor's weights into the engine under a version; gives each rank's traffic."""
        everyone = range(self.pool.world_size)
        return call_all(self.pool, everyone, "sync", "run", version)
