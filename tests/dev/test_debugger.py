"""Debuggers in the terminal of `cortex dev`."""

from __future__ import annotations

import sys
import threading

import pytest

from cortex.dev import debugger


def test_one_debugger_at_a_time_has_the_terminal() -> None:
    token = debugger.TerminalToken.create()
    second_has_it = threading.Event()

    def wait() -> None:
        with token.held():
            second_has_it.set()

    with token.held():
        other = threading.Thread(target=wait)
        other.start()
        assert not second_has_it.wait(0.05)
    other.join()
    assert second_has_it.is_set()
    token.close()


def test_a_missing_debugpy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "debugpy", None)
    assert (debugger.listen(5678) or "").startswith("debugpy is not installed; add debugpy to requirements.txt")
