from __future__ import annotations

import os
import socket
import subprocess
import sys
from contextlib import ExitStack

import pytest
import torch.distributed as dist

from mrl.launching.ports import held_port, require_free


def test_a_held_port_is_given_to_nobody_but_who_asks_for_it_by_name() -> None:
    with held_port() as port, ExitStack() as stack:
        for _ in range(400):
            other = stack.enter_context(socket.socket())
            other.bind(("", 0))
            assert other.getsockname()[1] != port
        store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
        assert store.port == port


def test_many_holders_hold_different_ports() -> None:
    with ExitStack() as stack:
        ports = [stack.enter_context(held_port()) for _ in range(64)]
    assert len(set(ports)) == 64


def test_a_taken_port_is_told_with_its_owner_and_variable() -> None:
    with socket.socket() as server:
        server.bind(("", 0))
        server.listen()
        port = server.getsockname()[1]
        with pytest.raises(ValueError, match=rf"MASTER_PORT={port} is taken.*pid {os.getpid()}"):
            require_free(port, "MASTER_PORT")
    require_free(port, "MASTER_PORT")
    with pytest.raises(ValueError, match="MASTER_PORT=80: expected 1024 to 65535"):
        require_free(80, "MASTER_PORT")


def test_the_command_holds_its_port_until_its_input_ends() -> None:
    command = [sys.executable, "-m", "mrl.launching.ports"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None and holder.stdin is not None
        port = int(holder.stdout.readline())
        with socket.socket() as stranger, pytest.raises(OSError):
            stranger.bind(("", port))
        holder.stdin.close()
        assert holder.wait(10) == 0
