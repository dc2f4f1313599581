"""Messages between the controller and a rank, and the rank's serving loop.

Messages are plain pickles: torch's own pickler would pass tensors by shared memory, which ends at
the host's edge. Large arrays follow their pickle as they lie in memory, and arrive where they will
lie: neither end copies them.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import queue
import signal
import socket
import struct
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Client, Connection
from typing import Any, NamedTuple

import numpy as np

from mrl.pickling import ByFields
from mrl.workers.hangs import own_stack

AUTHKEY_BYTES = 32
WRONG_INPUT = (ValueError, FileNotFoundError)  # of a user: what another try would meet again
_LONGEST_POLL_S = 1e6  # the system counts milliseconds in 32 bits
_LARGE_BYTES = 1 << 14  # from here on an array travels beside its pickle


@dataclass(frozen=True, slots=True)
class Hello:
    """A rank reports for duty."""

    rank: int
    host: str
    pid: int


@dataclass(frozen=True, slots=True)
class Call(ByFields):
    """One method call."""

    number: int
    role: str
    method: str
    args: tuple[Any, ...]


class Reply(NamedTuple):
    """The answer to a call: a value, or the traceback of its failure.

    It travels as a plain tuple: most hold no value, and to look its type up takes pickle longer
    than all the rest.
    """

    number: int
    value: Any
    failure: str | None
    lasting: bool = False  # the failure is of wrong input: another try would meet it again


@dataclass(frozen=True, slots=True)
class Goodbye:
    """The controller has no more calls."""


@dataclass(frozen=True, slots=True)
class Pulse:
    """The controller lives."""


@dataclass(frozen=True, slots=True)
class AskStack:
    """The controller wants to know what a rank that is late does."""


@dataclass(frozen=True, slots=True)
class Stack:
    """What a rank does: the stack of the thread that serves calls."""

    text: str


@dataclass(frozen=True, slots=True)
class Packed:
    """A pickled message and, beside it, its large arrays: views of the sender's memory."""

    pickled: bytes
    arrays: tuple[memoryview, ...]

    @property
    def num_bytes(self) -> int:
        """Count the bytes of all."""
        return len(self.pickled) + sum(array.nbytes for array in self.arrays)

    def unpack(self) -> Any:
        """Make the message, on the memory of the arrays."""
        return pickle.loads(self.pickled, buffers=self.arrays)


def pack(message: Any) -> Packed:
    """Pickle a message; its arrays must not change until it is sent."""
    arrays: list[memoryview] = []

    def stays_within(buffer: pickle.PickleBuffer) -> bool:
        array = buffer.raw()
        if array.nbytes >= _LARGE_BYTES:
            arrays.append(array)
        return array.nbytes < _LARGE_BYTES

    pickled = pickle.dumps(message, pickle.HIGHEST_PROTOCOL, buffer_callback=stays_within)
    return Packed(pickled, tuple(arrays))


def send(connection: Connection, message: Any) -> None:
    """Send one message."""
    send_packed(connection, pack(message))


def send_packed(connection: Connection, packed: Packed) -> None:
    """Send one message: how large its arrays are, its pickle, then the arrays."""
    sizes = [array.nbytes for array in packed.arrays]
    head = struct.pack(f"!I{len(sizes)}Q", len(sizes), *sizes)
    connection.send_bytes(head + packed.pickled)
    for array in packed.arrays:
        while array:
            array = array[os.write(connection.fileno(), array) :]


def receive(connection: Connection) -> Any:
    """Receive one message; raises EOFError or OSError when the other side is gone."""
    frame = connection.recv_bytes()
    (count,) = struct.unpack_from("!I", frame)
    head = struct.Struct(f"!I{count}Q")
    arrays = tuple(_read(connection, size) for size in head.unpack_from(frame)[1:])
    return Packed(frame[head.size :], arrays).unpack()


def _read(connection: Connection, size: int) -> memoryview:
    array = memoryview(np.empty(size, np.uint8))
    rest = array
    while rest:
        count = os.readv(connection.fileno(), [rest])
        if not count:
            raise EOFError
        rest = rest[count:]
    return array


def connect(address: tuple[str, int], authkey: bytes, rank: int) -> Connection:
    """Report a rank to the controller."""
    connection = Client(address, authkey=authkey)
    connection_socket = socket.socket(fileno=os.dup(connection.fileno()))
    connection_socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection_socket.close()
    send(connection, Hello(rank, socket.gethostname(), os.getpid()))
    return connection


def serve(
    connection: Connection,
    call: Callable[[str, str, tuple[Any, ...]], Any],
    silence_s: float | None = None,
    on_silence: Callable[[], None] = lambda: None,
) -> None:
    """Answer calls in order until the controller says goodbye.

    After `silence_s` without a word of the controller (None: never) the rank calls `on_silence`
    and ends.

    A failed call is reported with its traceback and then the rank waits to be ended: its peers
    may hang in a collective, and the first cause must reach the controller before their echoes.
    """
    inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
    sending = threading.Lock()

    def read() -> None:
        # A thread of its own: the controller must never block on a rank that is busy.
        longest = None if silence_s is None else min(silence_s, _LONGEST_POLL_S)
        try:
            while True:
                if not connection.poll(longest):
                    on_silence()
                    os._exit(1)
                match message := receive(connection):
                    case Goodbye():
                        inbox.put(message)
                        return
                    case AskStack():
                        with sending:
                            send(connection, Stack(own_stack()))
                    case Call():
                        inbox.put(message)
        except (EOFError, OSError):
            # Without a controller there is nothing to finish: end at once, even in a collective.
            os._exit(1)
        except Exception:  # a message that cannot be read: silence would be taken for a hang
            traceback.print_exc()
            os._exit(1)

    threading.Thread(target=read, daemon=True).start()
    while True:
        message = inbox.get()
        if isinstance(message, Goodbye):
            return
        try:
            value = call(message.role, message.method, message.args)
        except BaseException as error:
            # Process edge: whatever it was, the controller is told which rank and call it hit.
            traceback.print_exc()
            sys.stderr.flush()
            lasting = isinstance(error, WRONG_INPUT)
            with sending:
                failed = Reply(message.number, None, traceback.format_exc(), lasting)
                send(connection, tuple(failed))
            threading.Event().wait()
        with sending:
            send(connection, tuple(Reply(message.number, value, None)))


def die_with_parent() -> None:
    """Ask Linux to kill this process when its parent ends in any way."""
    parent = os.getppid()
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(1)
