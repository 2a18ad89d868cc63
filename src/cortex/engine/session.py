"""Identifies a process so that a later operator can't mistake another for it, and ends its whole session."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

#: Two readings of one process's creation time differ by clock adjustments only.
_SAME_TIME_S = 1.0


@dataclass(frozen=True)
class Identity:
    """A process, for ever: its id may be reused, its id and creation time together not."""

    pid: int
    created_at: float  #: UNIX time, seconds
    boot_id: str

    @classmethod
    def of(cls, pid: int) -> Identity:
        """Identify a process that runs now. Raises: OSError if it does not."""
        try:
            return cls(pid, psutil.Process(pid).create_time(), _boot_id())
        except psutil.Error as error:
            raise ProcessLookupError(f"process {pid} does not run") from error

    @classmethod
    def read(cls, path: Path) -> Identity | None:
        """Read what `to_json` wrote to a file; None if there is none."""
        try:
            return cls(**json.loads(path.read_text()))
        except (OSError, ValueError, TypeError):
            return None

    def to_json(self) -> str:
        """Return one JSON object."""
        return json.dumps(asdict(self))

    def is_alive(self) -> bool:
        """Tell whether this very process still runs; one that ended and waits to be reaped does not."""
        if self.boot_id != _boot_id():
            return False
        try:
            process = psutil.Process(self.pid)
            is_same = abs(process.create_time() - self.created_at) < _SAME_TIME_S
            return is_same and process.status() != psutil.STATUS_ZOMBIE
        except psutil.Error:
            return False


def kill_session(leader: Identity) -> None:
    """Kill every process of the session that `leader` made, the leader included.

    A session's number is not given out again while a process of it lives. Once all have ended, somebody else's session
    may get it: then its leader is another process than ours.
    """
    if leader.boot_id != _boot_id() or _is_someone_elses(leader):
        return
    for pid in psutil.pids():
        with contextlib.suppress(OSError):
            if os.getsid(pid) == leader.pid and _is_younger(pid, leader):
                os.kill(pid, signal.SIGKILL)


def _is_someone_elses(leader: Identity) -> bool:
    try:
        return abs(psutil.Process(leader.pid).create_time() - leader.created_at) >= _SAME_TIME_S
    except psutil.Error:
        return False  # no leader: what is left of the session is ours


def _is_younger(pid: int, leader: Identity) -> bool:
    try:
        return psutil.Process(pid).create_time() >= leader.created_at - _SAME_TIME_S
    except psutil.Error:
        return False


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
