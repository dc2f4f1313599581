"""Ports that nobody takes between their choice and their use.

`python -m mrl.launching.ports` prints a free port of this host and keeps it until its standard
input ends; `python -m mrl.launching.ports --require MASTER_PORT` fails, with the owner, when the
port that this variable names is taken.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
import sys
from collections.abc import Iterator

_RANGE = range(1024, 65536)


@contextlib.contextmanager
def held_port() -> Iterator[int]:
    """Hold a free port of this host inside the block.

    It is bound with SO_REUSEADDR and does not listen: Linux gives it to nobody who asks for any
    port, and lets a server that sets SO_REUSEADDR (torch's store, Ray's GCS) listen on it by name.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("", 0))
        yield holder.getsockname()[1]


def require_free(port: int, variable: str) -> None:
    """Raise ValueError, naming variable and owner, when a server listens on this host's port."""
    if port not in _RANGE:
        raise ValueError(f"{variable}={port}: expected {_RANGE.start} to {_RANGE.stop - 1}")
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            server.bind(("", port))
            server.listen(1)
        except OSError:
            raise ValueError(
                f"{variable}={port} is taken on {socket.gethostname()} by {_owner(port)}: "
                f"set {variable} to another port, on all nodes"
            ) from None


def _owner(port: int) -> str:
    import psutil

    for connection in psutil.net_connections("tcp"):
        if connection.laddr and connection.laddr.port == port and connection.pid is not None:
            with contextlib.suppress(psutil.Error):
                return f"{psutil.Process(connection.pid).name()} (pid {connection.pid})"
    return "another user's process"


def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--require", metavar="VARIABLE")
    variable = parser.parse_args().require
    if variable is not None:
        try:
            require_free(int(os.environ[variable]), variable)
        except ValueError as error:
            sys.exit(str(error))
        return
    with held_port() as port:
        print(port, flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    _main()
