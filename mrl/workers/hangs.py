"""Ranks that hang: how long each has been at its call, what it does there, and which is to blame.

A rank that waits for another in a collective is late too, but only a victim. What its stack says
tells them apart; a rank that cannot even tell its stack is stopped, or holds Python's lock.
"""

from __future__ import annotations

import faulthandler
import math
import re
import signal
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

ANSWER_S = 5.0  # for a late rank to tell its stack
_STDERR = 2  # whatever Python's own name for it is bound to
_INNERMOST = 6  # frames: a rank that waits for its peers has the collective among them
# torch's collectives, Megatron's pipeline messages, our own exchange of weights
_COLLECTIVE = re.compile(r"torch/distributed/|/p2p_communication\.py|resharding/transports\.py")


@dataclass(frozen=True, slots=True)
class Late:
    """A rank that has worked on one call for too long."""

    rank: int
    call: str  # role.method
    seconds: float


@dataclass(frozen=True, slots=True)
class Hang:
    """What is said of ranks that hang."""

    ranks: tuple[int, ...]  # to blame; all that are late where no one stands out
    cause: str  # one line
    evidence: str  # the stacks


class CallClocks:
    """How long each rank has been at the first of the calls that it was given."""

    def __init__(self) -> None:
        self._calls: dict[int, deque[str]] = {}
        self._since: dict[int, float] = {}
        self._lock = threading.Lock()

    def asked(self, ranks: Sequence[int], call: str) -> None:
        """Note a call to ranks; the clock of each starts when those before it are answered."""
        with self._lock:
            now = time.monotonic()
            for rank in ranks:
                calls = self._calls.setdefault(rank, deque())
                if not calls:
                    self._since[rank] = now
                calls.append(call)

    def answered(self, rank: int) -> float:
        """Note the answer to a rank's first call; gives the seconds that it took."""
        with self._lock:
            now = time.monotonic()
            seconds, self._since[rank] = now - self._since[rank], now
            self._calls[rank].popleft()
            return seconds

    def late(self, limit_s: float) -> list[Late]:
        """List the ranks that have been at one call for longer than the limit, ascending."""
        with self._lock:
            now = time.monotonic()
            times = [(r, c[0], now - self._since[r]) for r, c in self._calls.items() if c]
            return sorted((Late(*t) for t in times if t[2] > limit_s), key=lambda late: late.rank)


def explain_hang(
    late: Sequence[Late], stacks: Mapping[int, str], names: Mapping[int, str], limit: str
) -> Hang:
    """Tell which of the late ranks hang, from the stacks of those that answered.

    `names` say which rank, process and host; `limit` which setting they ran over.
    """
    silent = [one for one in late if one.rank not in stacks]
    busy = [one for one in late if one.rank in stacks and not _waits(stacks[one.rank])]
    blamed = silent or busy or list(late)
    what = "it does not answer, so it is stopped or holds Python's lock"
    if not silent:
        what = _place(stacks[blamed[0].rank])
    if not silent and not busy:
        what = f"all wait for each other in a collective, it {what}"
    first = blamed[0]
    others = "" if len(blamed) == 1 else f" (as do ranks {[one.rank for one in blamed[1:]]})"
    cause = (
        f"{names[first.rank]} hangs in {first.call}{others} for {first.seconds:.0f} s, longer than "
        f"{limit}: {what}"
    )
    shown = [one for one in blamed if one.rank in stacks] or [o for o in late if o.rank in stacks]
    evidence = [f"{names[o.rank]} in {o.call}:\n{stacks[o.rank].rstrip()}" for o in shown[:4]]
    return Hang(tuple(one.rank for one in blamed), cause, "\n".join(evidence))


def own_stack() -> str:
    """Write down what the thread that serves calls does; all threads go to the standard error."""
    faulthandler.dump_traceback(_STDERR, all_threads=True)
    frame = sys._current_frames()[threading.main_thread().ident or 0]
    return "".join(traceback.format_stack(frame))


def leave_traces() -> None:
    """Let a crash of this process, or SIGUSR2, write the stacks of all threads to its log.

    The signal is for a rank that holds Python's lock: nothing written in Python would run.
    """
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR2, all_threads=True, chain=False)


def patience(limit_s: float) -> float:
    """Give the seconds between two looks at the clocks."""
    return 1.0 if math.isinf(limit_s) else min(1.0, limit_s / 4)


def _waits(stack: str) -> bool:
    frames = [line for line in stack.splitlines() if line.lstrip().startswith("File ")]
    return any(_COLLECTIVE.search(line) for line in frames[-_INNERMOST:])


def _place(stack: str) -> str:
    """Give the innermost frame in a line."""
    frames = [line.strip() for line in stack.splitlines() if line.strip()]
    start = max(i for i, line in enumerate(frames) if line.startswith("File "))
    return "is at " + " ".join(frames[start:])[:200]
