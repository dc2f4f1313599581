from __future__ import annotations

import os
import signal
import time

import pytest

from mrl.interrupts import insistent_interrupts, stop_requests


def press_and_wait(seconds: float) -> None:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(seconds)


def test_an_interrupt_that_is_swallowed_comes_again() -> None:
    swallowed = False
    with pytest.raises(KeyboardInterrupt), insistent_interrupts(again_s=0.2):
        try:
            press_and_wait(5)
        except KeyboardInterrupt:
            swallowed = True
        time.sleep(5)
    assert swallowed


def test_closing_is_not_interrupted_again() -> None:
    closed = False
    with pytest.raises(KeyboardInterrupt), insistent_interrupts(again_s=0.1):
        try:
            press_and_wait(5)
        finally:
            time.sleep(0.5)
            closed = True
    assert closed


def test_the_handler_is_put_back() -> None:
    before = signal.getsignal(signal.SIGINT)
    with insistent_interrupts():
        assert signal.getsignal(signal.SIGINT) is not before
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_a_stop_is_asked_for_by_signal(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    monkeypatch.delenv("SLURM_PROCID", raising=False)
    before = signal.getsignal(number)
    with stop_requests() as stop:
        assert not stop.is_set()
        os.kill(os.getpid(), number)
        assert stop.wait(5)
    assert signal.getsignal(number) is before


def test_a_launchers_rank_leaves_sigterm_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run")
    before = signal.getsignal(signal.SIGTERM)
    with stop_requests():
        assert signal.getsignal(signal.SIGTERM) is before
