"""Where ranks meet their controller, for those who belong to the job alone."""

from __future__ import annotations

import os
import secrets
import socket

import torch.distributed as dist

from mrl.workers.wire import AUTHKEY_BYTES

LOOPBACK = "127.0.0.1"
KEY_VARIABLE = "MRL_AUTHKEY"


def new_key() -> bytes:
    """Draw the key that a rank and the controller show each other."""
    return secrets.token_bytes(AUTHKEY_BYTES)


def take_key() -> bytes | None:
    """Take the job's key out of the environment, so that nothing started from here has it.

    Raises ValueError where it is no key; does not repeat it.
    """
    given = os.environ.pop(KEY_VARIABLE, "")
    try:
        key = bytes.fromhex(given)
    except ValueError:
        key = b""
    if given and len(key) < AUTHKEY_BYTES:
        raise ValueError(
            f"{KEY_VARIABLE} is no key: expected at least {2 * AUTHKEY_BYTES} hexadecimal digits"
        )
    return key or None


def loopback_store() -> dist.TCPStore:
    """Open a store on a free port of the loopback address; torch's own listens on every address."""
    server = socket.create_server((LOOPBACK, 0))
    port = server.getsockname()[1]
    return dist.TCPStore(
        LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=server.detach()
    )
