"""Messages between the controller and a rank, and the rank's serving loop.

Messages are plain pickles: torch's own pickler would pass tensors by shared memory, which ends at
the host's edge.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import queue
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Client, Connection
from typing import Any

AUTHKEY_BYTES = 32


@dataclass(frozen=True, slots=True)
class Hello:
    """A rank reports for duty."""

    rank: int
    host: str
    pid: int


@dataclass(frozen=True, slots=True)
class Call:
    """One method call; its arguments follow in a frame of their own, pickled once for all ranks."""

    number: int
    role: str
    method: str


@dataclass(frozen=True, slots=True)
class Reply:
    """The answer to a call: a value, or the traceback of its failure."""

    number: int
    value: Any
    failure: str | None


@dataclass(frozen=True, slots=True)
class Goodbye:
    """The controller has no more calls."""


def pack(message: Any) -> bytes:
    """Pickle a message for `send_bytes`."""
    return pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)


def send(connection: Connection, message: Any) -> None:
    """Send one message."""
    connection.send_bytes(pack(message))


def receive(connection: Connection) -> Any:
    """Receive one message; raises EOFError or OSError when the other side is gone."""
    return pickle.loads(connection.recv_bytes())


def connect(address: tuple[str, int], authkey: bytes, rank: int) -> Connection:
    """Report a rank to the controller."""
    connection = Client(address, authkey=authkey)
    connection_socket = socket.socket(fileno=os.dup(connection.fileno()))
    connection_socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection_socket.close()
    send(connection, Hello(rank, socket.gethostname(), os.getpid()))
    return connection


def serve(connection: Connection, call: Callable[[str, str, tuple[Any, ...]], Any]) -> None:
    """Answer calls in order until the controller says goodbye.

    A failed call is reported with its traceback and then the rank waits to be ended: its peers
    may hang in a collective, and the first cause must reach the controller before their echoes.
    """
    inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def read() -> None:
        # A thread of its own: the controller must never block on a rank that is busy.
        try:
            while True:
                message = receive(connection)
                if isinstance(message, Goodbye):
                    inbox.put((message, ()))
                    return
                inbox.put((message, receive(connection)))
        except (EOFError, OSError):
            # Without a controller there is nothing to finish: end at once, even in a collective.
            os._exit(1)

    threading.Thread(target=read, daemon=True).start()
    while True:
        message, args = inbox.get()
        if isinstance(message, Goodbye):
            return
        try:
            value = call(message.role, message.method, args)
        except BaseException:
            # Process edge: whatever it was, the controller is told which rank and call it hit.
            traceback.print_exc()
            sys.stderr.flush()
            send(connection, Reply(message.number, None, traceback.format_exc()))
            threading.Event().wait()
        send(connection, Reply(message.number, value, None))


def die_with_parent() -> None:
    """Ask Linux to kill this process when its parent ends in any way."""
    parent = os.getppid()
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(1)
