"""The scoring process: `python -m mrl.rewards.worker FD`, at one end of a socket.

It receives the custom function's (path, name) or None and the components of the reward, and
answers None or the reason why it cannot start. Then for each chunk of (index, ScoreItem) it
answers "started" once the functions are loaded, and (index, value, status, detail, extra) after
each item. It ends when the socket closes. Imports no torch; prints of reward functions go to
stderr.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection

from mrl.rewards.registry import ComputeScore, ScoreItem, load_custom, resolve, sample_limit_s
from mrl.rewards.verdict import Component, Verdict, score_one, weighted_sum

# A function, why there is none, or the same for each component.
Scorer = ComputeScore | Verdict | Mapping[Component, "ComputeScore | Verdict"]
_ORPHAN_CHECK_S = 1.0
_ALARM_GRACE_S = 5.0


def score_item(scorer: Scorer, item: ScoreItem) -> Verdict:
    """Score one item by its function, by all components, or not at all."""
    if callable(scorer):
        return score_one(scorer, item)
    if isinstance(scorer, tuple):
        return scorer
    verdicts = [score_item(part, item) for part in scorer.values()]
    return weighted_sum([*scorer], verdicts)


def _resolve(source: str, custom: ComputeScore | None) -> ComputeScore | Verdict:
    try:
        return resolve(source, custom)
    except (ValueError, ImportError) as error:
        return None, "error", str(error), {}


@dataclass(frozen=True, slots=True)
class Functions:
    """The functions of a run: the user's, if there is one, and the components of the reward."""

    custom: ComputeScore | None
    components: Sequence[tuple[Component, ComputeScore | None]]  # with the file's function

    def of(self, source: str) -> Scorer:
        """Load what scores a data source, before any item's time runs."""
        if not self.components:
            return _resolve(source, self.custom)
        return {
            component: _resolve(
                component.data_source or source,
                own or (None if component.data_source else self.custom),
            )
            for component, own in self.components
        }


def _end_with_parent() -> None:
    """Kill the own process group when the parent is gone, even amid a long score."""
    parent = os.getppid()
    while os.getppid() == parent:
        time.sleep(_ORPHAN_CHECK_S)
    os.killpg(0, signal.SIGKILL)


def serve(connection: Connection, timeout_s: float, functions: Functions) -> None:
    """Score chunks until the socket closes."""
    sample_limit_s.set(timeout_s)
    while True:
        try:
            chunk: list[tuple[int, ScoreItem]] = connection.recv()
        except EOFError:
            return
        scorers = {source: functions.of(source) for source in {i.data_source for _, i in chunk}}
        connection.send("started")
        for index, item in chunk:
            # The parent keeps time. The kernel's alarm stands in should the parent be dead and
            # the score hold the interpreter lock, where no thread of ours would run.
            signal.setitimer(signal.ITIMER_REAL, timeout_s + _ALARM_GRACE_S)
            connection.send((index, *score_item(scorers[item.data_source], item)))
        signal.setitimer(signal.ITIMER_REAL, 0)


def main() -> None:
    """Start up, report, serve."""
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # the controller's, sent to a whole Slurm step
    connection = Connection(int(sys.argv[1]))
    os.set_inheritable(connection.fileno(), False)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    timeout_s: float
    source: tuple[str, str] | None
    components: Sequence[Component]
    timeout_s, source, components = connection.recv()
    try:
        custom = load_custom(*source) if source else None
        own = [load_custom(*part.custom) if part.custom else None for part in components]
    except ValueError as error:
        connection.send(str(error))
        return
    connection.send(None)
    serve(connection, timeout_s, Functions(custom, list(zip(components, own, strict=True))))


if __name__ == "__main__":
    main()
