"""Everything a run leaves behind, in one place: console, metrics.jsonl, TensorBoard, dumps."""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

from mrl.config import Config, RunPlan, save_resolved
from mrl.tracking.console import ConsoleLog
from mrl.tracking.contract import uncontracted
from mrl.tracking.jsonl import MetricsFile
from mrl.tracking.metrics import ScoredBatch, distributions, summarise_batch
from mrl.tracking.rollouts import RolloutRow, dump_rollouts
from mrl.tracking.status import FAILED, FINISHED, RUNNING, STOPPED, Status
from mrl.tracking.tensorboard import TensorBoard
from mrl.tracking.tokens import Decode, TokenColumns, dump_tokens, ends
from mrl.workers.group import WorkerError
from mrl.workers.specs import RankInfo

STRICT = "MRL_STRICT_METRICS"  # set in tests: a metric without an entry in the contract is refused
_SAMPLES_EVERY = 10  # steps between two tables of samples in TensorBoard, which keeps ten of them


class Recorder:
    """The run folder's writer; only the controller has one."""

    def __init__(self, config: Config, plan: RunPlan, total_steps: int, resume_step: int) -> None:
        """Open the run folder; after resuming, later values of an interrupted run are hidden."""
        self.folder = Path(config.trainer.default_local_dir)
        self.folder.mkdir(parents=True, exist_ok=True)
        save_resolved(config, self.folder / "config.yaml")
        (self.folder / "plan.json").write_text(json.dumps(plan.to_json(), indent=1) + "\n")
        self._metrics = MetricsFile(self.folder / "metrics.jsonl", resume_step)
        self._step, self._total_steps, self._end = resume_step, total_steps, ""
        self._thread = ThreadPoolExecutor(1, "recorder")
        self._open: list[Future[Any]] = []
        self._shown: list[Future[object]] = []
        self._has_warned = False
        loggers = config.trainer.logger
        self._console = ConsoleLog(total_steps) if "console" in loggers else None
        self._board = None
        if "tensorboard" in loggers:
            self._board = TensorBoard(self.folder / "tensorboard", purge_step=resume_step + 1)
        self._say(RUNNING)

    def start(self, title: str, ranks: Sequence[RankInfo]) -> None:
        """Open the console's part and say where the ranks run; ranks.json has each of them."""
        rows = [asdict(rank) for rank in ranks]
        (self.folder / "ranks.json").write_text(json.dumps(rows, indent=1) + "\n")
        if self._console is not None:
            places = Counter((rank.host, rank.device_name) for rank in ranks)
            self._console.start(title)
            for (host, device), count in places.items():
                self._console.line(f"{host}: {count} ranks on {device}")

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of one step everywhere, after its samples.

        Raises what went wrong with those.
        """
        self.settle()
        if STRICT in os.environ and (names := uncontracted(metrics)):
            raise ValueError(f"no entry in mrl/tracking/catalogue.py has the metrics {names}")
        self._metrics.write(step, metrics)
        self._step = step
        if self._board is not None:
            self._board.scalars(step, metrics)
        if self._console is not None:
            self._console.step(step, metrics)

    def show(self, step: int, metrics: Mapping[str, float]) -> None:
        """Print metrics that are not part of the training record."""
        if self._console is not None:
            self._console.step(step, metrics)

    def rollouts(self, kind: str, step: int, rows: Sequence[RolloutRow]) -> None:
        """Write the samples of a step below `<kind>/`, while the step goes on."""
        self.beside(dump_rollouts, self.folder / kind, step, rows)
        if kind == "rollouts" and step % _SAMPLES_EVERY == 1:
            self._show(self._samples, step, "train/samples", [rows[i] for _, i in ends(rows)])

    def describe(
        self, step: int, rows: Sequence[RolloutRow], batch: ScoredBatch, decode: Decode
    ) -> list[Future[dict[str, float]]]:
        """Describe the samples of a step in all ways, while it goes on; gives metrics to come."""
        columns = TokenColumns(batch.rollout_log_probs, batch.old_log_probs, batch.advantages)
        self.tokens(step, rows, columns, decode)
        self.distributions(step, batch)
        return [self.beside(summarise_batch, batch)]

    def distributions(self, step: int, batch: ScoredBatch) -> None:
        """Show how lengths, scores, advantages and log-prob gaps are spread, while it goes on."""
        if self._board is not None:
            self._show(self._board.histograms, step, distributions(batch))

    def tokens(
        self, step: int, rows: Sequence[RolloutRow], columns: TokenColumns, decode: Decode
    ) -> None:
        """Write a few samples of a step below `tokens/`, token by token."""
        self._show(dump_tokens, self.folder / "tokens", step, rows, columns, decode)

    def _show(self, work: Callable[..., object], *args: Any) -> None:
        """Do, while the step goes on, what only helps a reader: a run does not fail with it."""
        self._shown.append(self._thread.submit(work, *args))

    def beside[T](self, work: Callable[..., T], *args: Any) -> Future[T]:
        """Do what is only recorded while the step goes on; the next `step` waits for it."""
        future = self._thread.submit(work, *args)
        self._open.append(future)
        return future

    def samples(self, step: int, rows: Sequence[RolloutRow]) -> None:
        """Show validation samples as a table in TensorBoard."""
        self._samples(step, "val/samples", rows)

    def _samples(self, step: int, name: str, rows: Sequence[RolloutRow]) -> None:
        if self._board is not None and rows:
            cells = [
                (row.prompt.text, row.sample.text, row.prompt.ground_truth, row.score.value)
                for row in rows
            ]
            self._board.table(step, name, ("input", "output", "truth", "score"), cells)

    def finish(self, title: str) -> None:
        """Close the console's part with a table, when all samples are written."""
        self.settle()
        self._end = title
        if self._console is not None:
            self._console.finish(title)

    def __enter__(self) -> Recorder:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._thread.shutdown()  # an ended run keeps the samples that it has
        if self._board is not None:
            self._board.close()
        if error is None:
            late = next(filter(None, (future.exception() for future in self._open)), None)
            if late is not None:
                self._say_failed(late)
            self.settle()  # which raises it
            is_cut_short = bool(self._end) and self._step < self._total_steps
            self._say(STOPPED if is_cut_short else FINISHED, self._end)
        else:
            self._say_failed(error)

    def _say_failed(self, error: BaseException) -> None:
        cause = (
            error.cause if isinstance(error, WorkerError) else f"{type(error).__name__}: {error}"
        )
        with suppress(OSError):  # of a full disk: what goes on its way says more
            self._say(FAILED, cause)

    def _say(self, state: str, why: str = "") -> None:
        Status.of_this_process(state, self._step, self._total_steps, why).write(self.folder)

    def settle(self) -> None:
        """Wait until all work beside the step is done; raises what went wrong."""
        futures, self._open = self._open, []
        for future in futures:
            future.result()
        shown, self._shown = self._shown, []
        for future in shown:
            if (error := future.exception()) is not None and not self._has_warned:
                self._has_warned = True
                print(f"not shown in this run's TensorBoard or report: {error!r}", file=sys.stderr)
