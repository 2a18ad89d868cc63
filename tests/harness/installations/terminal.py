"""Runs the command line on a terminal of the test's own."""

from __future__ import annotations

import os
import pty
import subprocess
from pathlib import Path

from harness.installations.command_line import CORTEX, environ


def on_terminal(home: Path, *words: str, typed: str = "", **changes: str) -> str:
    """Run a command on a terminal on which a user has typed something; return what it showed."""
    control, terminal = pty.openpty()
    process = subprocess.Popen(
        [*CORTEX, *words], env=environ(home, **changes), stdin=terminal, stdout=terminal, stderr=terminal
    )
    os.close(terminal)
    os.write(control, typed.encode())
    shown = b""
    try:
        while chunk := os.read(control, 65536):
            shown += chunk
    except OSError:  # the last writer is gone
        pass
    process.wait(30)
    os.close(control)
    return shown.decode()
