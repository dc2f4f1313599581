from __future__ import annotations

import threading
from multiprocessing import Pipe

import numpy as np
import pytest

from mrl.workers.wire import receive, send


def test_large_arrays_arrive_whole_and_may_be_written() -> None:
    here, there = Pipe()
    message = (1, np.arange(10), np.arange(1_000_000), "text", np.arange(300_000, dtype=np.int8))
    writer = threading.Thread(target=send, args=(there, message))
    writer.start()
    found = receive(here)
    writer.join()
    assert (found[0], found[3]) == (1, "text")
    for index in (1, 2, 4):
        assert found[index].dtype == message[index].dtype  # type: ignore[attr-defined]
        np.testing.assert_array_equal(found[index], message[index])
        found[index][0] = 9


def test_an_end_within_an_array_is_an_end() -> None:
    here, there = Pipe()

    def leave() -> None:
        import os

        from mrl.workers.wire import pack

        packed = pack(np.arange(1_000_000))
        there.send_bytes(b"\0\0\0\1" + packed.arrays[0].nbytes.to_bytes(8, "big") + packed.pickled)
        os.write(there.fileno(), packed.arrays[0][:1000])
        there.close()

    writer = threading.Thread(target=leave)
    writer.start()
    with pytest.raises((EOFError, OSError)):
        receive(here)
    writer.join()
