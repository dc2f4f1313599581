"""Everything a run leaves behind, in one place: console, metrics.jsonl, TensorBoard, dumps."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

from mrl.config import Config, RunPlan, save_resolved
from mrl.tracking.console import ConsoleLog
from mrl.tracking.jsonl import MetricsFile
from mrl.tracking.rollouts import RolloutRow, dump_rollouts
from mrl.tracking.tensorboard import TensorBoard
from mrl.workers.specs import RankInfo


class Recorder:
    """The run folder's writer; only the controller has one."""

    def __init__(self, config: Config, plan: RunPlan, total_steps: int, resume_step: int) -> None:
        """Open the run folder; after resuming, later values of an interrupted run are hidden."""
        self.folder = Path(config.trainer.default_local_dir)
        self.folder.mkdir(parents=True, exist_ok=True)
        save_resolved(config, self.folder / "config.yaml")
        (self.folder / "plan.json").write_text(json.dumps(plan.to_json(), indent=1) + "\n")
        self._metrics = MetricsFile(self.folder / "metrics.jsonl", resume_step)
        self._thread = ThreadPoolExecutor(1, "recorder")
        self._open: list[Future[Any]] = []
        loggers = config.trainer.logger
        self._console = ConsoleLog(total_steps) if "console" in loggers else None
        self._board = None
        if "tensorboard" in loggers:
            self._board = TensorBoard(self.folder / "tensorboard", purge_step=resume_step + 1)

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
        self._metrics.write(step, metrics)
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

    def beside[T](self, work: Callable[..., T], *args: Any) -> Future[T]:
        """Do what is only recorded while the step goes on; the next `step` waits for it."""
        future = self._thread.submit(work, *args)
        self._open.append(future)
        return future

    def samples(self, step: int, rows: Sequence[RolloutRow]) -> None:
        """Show samples as a table in TensorBoard."""
        if self._board is not None and rows:
            cells = [
                (row.prompt.text, row.sample.text, row.prompt.ground_truth, row.score.value)
                for row in rows
            ]
            self._board.table(step, "val/samples", ("input", "output", "truth", "score"), cells)

    def finish(self, title: str) -> None:
        """Close the console's part with a table, when all samples are written."""
        self.settle()
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
            self.settle()

    def settle(self) -> None:
        """Wait until all work beside the step is done; raises what went wrong."""
        futures, self._open = self._open, []
        for future in futures:
            future.result()
