"""Ends the whole session that a process made, and tells what is left of it."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator

import psutil

from cortex.processes.identity import Identity


def kill_session(leader: Identity) -> None:
    """Kill every process of the session that `leader` made, the leader included.

    A session's number is not given out again while a process of it lives. Once all have ended, somebody else's session
    may get it: then its leader is another process than ours.
    """
    if _is_over(leader):
        return
    for pid in _members(leader):
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)


def has_workers(leader: Identity) -> bool:
    """Tell whether workers still run of the session that `leader` made, a supervisor that has ended.

    A worker leads a process group, and what its code starts is in that group, unless it asks for one of its own.
    """
    if _is_over(leader):
        return False
    return any(pid != leader.pid and _leads_group(pid) for pid in _members(leader))


def _members(leader: Identity) -> Iterator[int]:
    for pid in psutil.pids():
        with contextlib.suppress(OSError):
            if os.getsid(pid) == leader.pid and _is_younger(pid, leader):
                yield pid


def _leads_group(pid: int) -> bool:
    try:
        return os.getpgid(pid) == pid and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except (OSError, psutil.Error):
        return False


def _is_over(leader: Identity) -> bool:
    """Tell whether nothing can be left: the machine was booted since, or another process has the number."""
    with contextlib.suppress(ProcessLookupError):
        return not leader.is_same(Identity.of(leader.pid))
    # No leader: what is left of the session is ours.
    return not leader.is_of_boot(Identity.of(os.getpid()).boot_id)


def _is_younger(pid: int, leader: Identity) -> bool:
    try:
        return not Identity.of(pid).began_before(leader)
    except ProcessLookupError:
        return False
