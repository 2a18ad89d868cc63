from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from cortex.cli.commands.installation.upgrade import check, raise_at_signals
from cortex.errors import CortexError
from cortex.home import Home
from cortex.installation import Installation


@pytest.mark.parametrize("source", ["import no_such_module", "1 / 0", "class"])
def test_a_version_whose_modules_cannot_be_imported_cannot_take_over(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "main.py").write_text(source)
    monkeypatch.delitem(sys.modules, "cortex.operator.main", raising=False)
    monkeypatch.setattr("cortex.operator.__path__", [str(tmp_path)])
    with pytest.raises(CortexError, match=r"^version .* can't take over: \w+Error: "):
        check(Home(tmp_path), Installation())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_interrupts_the_hand_over_once(number: signal.Signals) -> None:
    undone = False
    before = signal.signal(number, signal.SIG_DFL)  # `nohup pytest` ignores SIGHUP
    try:
        with pytest.raises(SystemExit) as raised, raise_at_signals():
            try:
                signal.raise_signal(number)
            finally:
                signal.raise_signal(signal.SIGTERM)  # another one does not interrupt the start of the old operator
                undone = True
        assert raised.value.code == 128 + number and undone
        assert signal.getsignal(number) is signal.SIG_DFL
    finally:
        signal.signal(number, before)


def test_a_hangup_that_is_ignored_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with raise_at_signals():
            os.kill(os.getpid(), signal.SIGHUP)
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
