"""Signals are remembered and handlers come back; a deadline passes."""

from __future__ import annotations

import os
import signal
import time

from megatron.train.signals import Deadline, SignalCatcher


def test_a_signal_is_remembered() -> None:
    before = signal.getsignal(signal.SIGUSR2)
    with SignalCatcher(signal.SIGUSR2) as catcher:
        assert not catcher.received
        os.kill(os.getpid(), signal.SIGUSR2)
        time.sleep(0.01)
        assert catcher.received
    assert signal.getsignal(signal.SIGUSR2) == before


def test_no_signal_changes_nothing() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with SignalCatcher(None) as catcher:
        assert signal.getsignal(signal.SIGTERM) == before
    assert not catcher.received


def test_deadline() -> None:
    assert not Deadline(None).passed
    assert not Deadline(1.0).passed
    assert Deadline(0.0).passed
