"""Debuggers in the terminal of `cortex dev`."""

from __future__ import annotations

import io
import pdb
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


def test_a_debugger_prints_nothing_before_it_has_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pdb, "Pdb", pdb.Pdb)  # undone after the test, as is the hook
    monkeypatch.setattr(sys, "breakpointhook", sys.breakpointhook)
    token, output = debugger.TerminalToken.create(), io.StringIO()
    debugger.install(token, lambda is_active: output.write(f"active: {is_active}\n"))
    waiting = pdb.Pdb(stdin=io.StringIO("debug 1 + 1\nc\nc\n"), stdout=output)
    waiting.reset()
    with token.held():
        other = threading.Thread(target=waiting.user_return, args=(sys._getframe(), None))
        other.start()
        other.join(0.05)
        assert not output.getvalue()
    other.join()
    assert output.getvalue().startswith("active: True\n--Return--\n")
    assert output.getvalue().endswith("active: False\n")
    assert output.getvalue().count("active") == 2
    token.close()


def test_a_missing_debugpy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "debugpy", None)
    assert (debugger.listen(5678) or "").startswith("debugpy is not installed; add debugpy to requirements.txt")
