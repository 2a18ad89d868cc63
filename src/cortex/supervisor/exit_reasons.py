"""Why a process ended, in words: a pure reading of its wait status and of what its supervisor knows."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from cortex.lifecycle import DeathCause
from cortex.replica.spec import Death

_FAULTS = {signal.SIGSEGV, signal.SIGBUS}


def name_death(wait_status: int, kernel_oom_kills: int, killed_for: Death | None = None) -> Death:
    """Name a death.

    `wait_status` is what `os.waitpid` returned, `kernel_oom_kills` how many processes the kernel killed for memory
    while this one ran, `killed_for` the supervisor's own reason where it did the killing.
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
    """Return the death of a process whose call ran past its time-out."""
    return Death(DeathCause.TIMED_OUT, f"timed out after {timeout_s:g} s", time.time())


def over_memory_limit(used_bytes: int, limit_bytes: int) -> Death:
    """Return the death of a process that took more than `compute.mem_limit`."""
    mebibyte = 1024 * 1024
    message = f"out of memory (used {used_bytes // mebibyte} MiB, mem_limit is {limit_bytes // mebibyte} MiB)"
    return Death(DeathCause.OUT_OF_MEMORY, message, time.time())


def count_kernel_oom_kills() -> int:
    """Return how many processes the kernel has killed for memory since boot; 0 where it does not say."""
    try:
        for line in Path("/proc/vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    except (OSError, ValueError):
        pass  # not Linux, or not readable
    return 0


def resident_bytes(pid: int) -> int:
    """Return the resident memory of a process; 0 if it is gone."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def restart_delay_s(failed_starts: int, quick_deaths: int) -> float:
    """Return how long to wait before the next start.

    `failed_starts` in a row that never became ready wait 1, 2, 4 … 60 s; processes that died within a second of being
    ready, `quick_deaths` in a row, wait from the third on 0.1, 0.2 … 5 s. Any other death is followed at once.
    """
    if failed_starts:
        return float(min(60, 2 ** (failed_starts - 1)))
    if quick_deaths > 2:
        return min(5.0, 0.1 * 2.0 ** min(quick_deaths - 3, 10))
    return 0.0
