"""The cause of a process's death, derived from its wait status, and the delay before the next start."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from cortex.lifecycle import DeathCause
from cortex.processes.backoff import Backoff
from cortex.worker.spec import STOPPED_IN_CALL, Death

_FAULTS = {signal.SIGSEGV, signal.SIGBUS}
_FAILED_START = Backoff(1.0, 60.0)
_QUICK_DEATH = Backoff(0.1, 5.0)
#: Quick deaths in a row that are followed by an immediate start.
_FREE_QUICK_DEATHS = 2


def name_death(wait_status: int, kernel_oom_kills: int, killed_for: Death | None = None) -> Death:
    """Return the cause of a death.

    `wait_status` is the result of `os.waitpid`, `kernel_oom_kills` the number of processes that the kernel killed for
    memory while this one ran, `killed_for` the supervisor's reason if the supervisor killed it.
    """
    now = time.time()
    if killed_for is not None:
        return killed_for
    if os.WIFEXITED(wait_status):
        return Death(DeathCause.EXITED, f"exited with code {os.WEXITSTATUS(wait_status)}", now)
    number = os.WTERMSIG(wait_status)
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = f"signal {number}"
    if number in _FAULTS:
        return Death(DeathCause.SEGMENTATION_FAULT, f"segmentation fault ({name})", now)
    if number == signal.SIGKILL:
        if kernel_oom_kills:
            return Death(DeathCause.OUT_OF_MEMORY, "out of memory (killed by the kernel)", now)
        return Death(DeathCause.KILLED, "killed (SIGKILL)", now)
    return Death(DeathCause.SIGNALLED, f"ended by a signal ({name})", now)


def timed_out(timeout_s: float) -> Death:
    """Return the death of a process whose call exceeded its time-out."""
    return Death(DeathCause.TIMED_OUT, f"timed out after {timeout_s:g} s", time.time())


def stopped() -> Death:
    """Return the death of a process whose calls took longer than the time that they had when it was stopped."""
    return Death(DeathCause.KILLED, STOPPED_IN_CALL, time.time())


def client_disconnected() -> Death:
    """Return the death of a process whose call continued although its client had disconnected."""
    message = "killed: its call continued after the client disconnected (networking.on_disconnect: kill)"
    return Death(DeathCause.CLIENT_DISCONNECTED, message, time.time())


def over_memory_limit(used_bytes: int, limit_bytes: int) -> Death:
    """Return the death of a process that exceeded `compute.mem_limit`."""
    mebibyte = 1024 * 1024
    message = f"out of memory (used {used_bytes // mebibyte} MiB, mem_limit is {limit_bytes // mebibyte} MiB)"
    return Death(DeathCause.OUT_OF_MEMORY, message, time.time())


def count_kernel_oom_kills() -> int:
    """Return the number of processes that the kernel has killed for memory since boot; 0 if it does not report it."""
    try:
        for line in Path("/proc/vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    except (OSError, ValueError):
        pass  # not Linux, or not readable
    return 0


def resident_bytes(pid: int) -> int:
    """Return the resident memory of a process; 0 if it has ended."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def restart_delay_s(failed_starts: int, quick_deaths: int) -> float:
    """Return the delay before the next start.

    Failed starts in a row are delayed by 1, 2, 4 … 60 s. Deaths within a second of readiness are delayed by
    0.1, 0.2 … 5 s from the third in a row on. After any other death the next start is immediate.
    """
    if failed_starts:
        return _FAILED_START.delay_s(failed_starts)
    if quick_deaths > _FREE_QUICK_DEATHS:
        return _QUICK_DEATH.delay_s(quick_deaths - _FREE_QUICK_DEATHS)
    return 0.0
