"""Runs the real command line in a home of the test's own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

CORTEX = [sys.executable, "-m", "cortex.cli.main"]


def environ(home: Path, **changes: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("CORTEX_")}
    return {**kept, "CORTEX_HOME": str(home), **changes}


def cortex(
    home: Path, *arguments: str | Path, cwd: Path | None = None, stdin: str = "", **changes: str
) -> subprocess.CompletedProcess[str]:
    """Run one command to its end."""
    return subprocess.run(
        [*CORTEX, *map(str, arguments)],
        env=environ(home, **changes),
        cwd=cwd,
        input=stdin,
        capture_output=True,
        text=True,
        timeout=180,
    )


def interrupted(process: subprocess.Popen[bytes]) -> tuple[bytes, bytes]:
    """Interrupt until the process ends: Python misses a signal between its last check and the system call."""
    for _ in range(5):
        process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            return process.communicate(timeout=10)
    raise AssertionError("five interrupts did not end it")
