"""A process beside each test run that kills what the run leaves behind, also if the run itself is killed.

All processes of a run inherit a variable with its token. As a program, this waits for the end of the run's first
process, then kills those with the token, their descendants, and HAProxy in a home of one of them: it inherits no
variables.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

VARIABLE = "PYTEST_RUN_TOKEN"


def start_guard() -> None:
    """Start the guard of this run. Processes of pytest-xdist, and runs within a run, belong to the first one."""
    if VARIABLE not in os.environ:
        token = uuid.uuid4().hex
        subprocess.Popen(
            [sys.executable, "-ES", __file__, str(os.getpid()), token],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.environ[VARIABLE] = token


def processes_of(token: str) -> set[int]:
    """Return the processes of the run with this token."""
    parents: dict[int, int] = {}
    folders: dict[int, Path] = {}
    found: set[int] = set()
    homes: set[str] = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or belongs to another user
            name, _, rest = (process / "stat").read_text().rpartition(")")
            status = rest.split()
            environ = os.fsdecode((process / "environ").read_bytes()).split("\0")
            if status[0] == "Z":
                continue
            pid = int(process.name)
            parents[pid] = int(status[1])
            if name.endswith("(haproxy"):
                folders[pid] = (process / "cwd").readlink()
            if f"{VARIABLE}={token}" in environ:
                found.add(pid)
                homes.update(each.partition("=")[2] for each in environ if each.startswith("CORTEX_HOME=/"))
    found |= {pid for pid, folder in folders.items() if any(folder.is_relative_to(home) for home in homes)}
    while children := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= children
    return found


def _main(pid: int, token: str) -> None:
    with contextlib.suppress(ProcessLookupError):
        select.select([os.pidfd_open(pid)], [], [])
    while left := processes_of(token):
        for each in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(each, signal.SIGKILL)
        time.sleep(0.1)


if __name__ == "__main__":
    _main(int(sys.argv[1]), sys.argv[2])
