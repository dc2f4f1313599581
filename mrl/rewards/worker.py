"""The scoring process: `python -m mrl.rewards.worker FD`, at one end of a socket.

It receives the custom function's (path, name) or None and answers None or the reason why it cannot
start. Then for each chunk of (index, ScoreItem) it answers "started" once the functions are
loaded, and (index, value, status, detail, extra) after each item. It ends when the socket closes.
Imports no torch; prints of reward functions go to stderr.
"""

from __future__ import annotations

import math
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any

from mrl.rewards.registry import ComputeScore, ScoreItem, load_custom, resolve

Verdict = tuple[float | None, str, str, dict[str, float]]  # the fields of mrl.types.Score
_ORPHAN_CHECK_S = 1.0
_ALARM_GRACE_S = 5.0


def _number(value: object) -> float | None:
    """Read anything that converts to float, but not text."""
    if value is None or isinstance(value, str | bytes) or not hasattr(value, "__float__"):
        return None
    return float(value)


def verdict(result: object) -> Verdict:
    """Judge what a reward function returned: a finite number, or a dict with one as `score`."""
    extra: dict[str, float] = {}
    score = result
    if isinstance(result, Mapping):
        if "score" not in result:
            return None, "error", f"returned a dict without 'score': has {[*result]}", {}
        score = result["score"]
        others = {str(key): _number(value) for key, value in result.items() if key != "score"}
        extra = {key: value for key, value in others.items() if value is not None}
    value = _number(score)
    if value is None or not math.isfinite(value):
        return None, "error", f"returned {score!r}, expected a finite number", extra
    return value, "ok", "", extra


def score_one(function: ComputeScore, item: ScoreItem) -> Verdict:
    """Score one item; whatever the function raises is its verdict."""
    try:
        return verdict(
            function(
                data_source=item.data_source,
                solution_str=item.solution_str,
                ground_truth=item.ground_truth,
                extra_info=item.extra_info,
            )
        )
    except (Exception, SystemExit) as error:  # foreign code: its faults belong to this sample
        return None, "error", f"{type(error).__name__}: {error}", {}


def _resolve_all(
    items: list[tuple[int, ScoreItem]], custom: ComputeScore | None
) -> dict[str, ComputeScore | Verdict]:
    """Load the function of each data source before any item's time runs."""
    found: dict[str, ComputeScore | Verdict] = {}
    for source in {item.data_source for _, item in items}:
        try:
            found[source] = resolve(source, custom)
        except (ValueError, ImportError) as error:
            found[source] = (None, "error", str(error), {})
    return found


def _end_with_parent() -> None:
    """Kill the own process group when the parent is gone, even amid a long score."""
    parent = os.getppid()
    while os.getppid() == parent:
        time.sleep(_ORPHAN_CHECK_S)
    os.killpg(0, signal.SIGKILL)


def serve(connection: Connection, timeout_s: float, custom: ComputeScore | None) -> None:
    """Score chunks until the socket closes."""
    while True:
        try:
            chunk: list[tuple[int, ScoreItem]] = connection.recv()
        except EOFError:
            return
        functions = _resolve_all(chunk, custom)
        connection.send("started")
        for index, item in chunk:
            # The parent keeps time. The kernel's alarm stands in should the parent be dead and
            # the score hold the interpreter lock, where no thread of ours would run.
            signal.setitimer(signal.ITIMER_REAL, timeout_s + _ALARM_GRACE_S)
            function = functions[item.data_source]
            result = score_one(function, item) if callable(function) else function
            connection.send((index, *result))
        signal.setitimer(signal.ITIMER_REAL, 0)


def main() -> None:
    """Start up, report, serve."""
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # the controller's, sent to a whole Slurm step
    connection = Connection(int(sys.argv[1]))
    os.set_inheritable(connection.fileno(), False)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    timeout_s: float
    source: tuple[str, str] | None
    timeout_s, source = connection.recv()
    custom: Any = None
    try:
        custom = load_custom(*source) if source else None
    except ValueError as error:
        connection.send(str(error))
        return
    connection.send(None)
    serve(connection, timeout_s, custom)


if __name__ == "__main__":
    main()
