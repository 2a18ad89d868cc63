"""Identifies a process so that a later one can't be mistaken for it. Starts with the CLI: imports little.

The kernel's count of ticks from boot to a process's start never changes, and each boot has an id. When a process
began by the clock does change: it is computed from that clock, which may be set while the process runs.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

_PROC = Path("/proc")
_HAS_PROC = (_PROC / "self" / "stat").exists()
#: Two readings of when one process began, by the clock, differ by what that was adjusted meanwhile.
_SAME_TIME_S = 5.0

if not _HAS_PROC:
    import psutil


@dataclass(frozen=True)
class Identity:
    """A process, for ever: its id may be reused, its id and start together not."""

    pid: int
    created_at: float  #: UNIX time, seconds, by the clock as it was when this was made
    boot_id: str = ""  #: "" where it is not known
    start_ticks: int | None = None  #: from boot to its start; None: no /proc, or a file of an old version

    @classmethod
    def of(cls, pid: int) -> Identity:
        """Identify a process that runs now, or waits to be reaped. Raises: ProcessLookupError."""
        return _look(pid)[0]

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Identity:
        """Return whom `as_json` described, or an older version, which wrote no ticks.

        Raises: KeyError, TypeError, ValueError for anything else.
        """
        pid, ticks = int(data["pid"]), data.get("start_ticks")
        created_at = float(data["create_time"] if "create_time" in data else data["created_at"])
        told = cls(pid, created_at, str(data.get("boot_id") or ""), None if ticks is None else int(ticks))
        return told._renewed() if told.start_ticks is None else told

    @classmethod
    def read(cls, path: Path) -> Identity | None:
        """Read what `to_json` wrote to a file; None if there is none."""
        try:
            return cls.from_json(json.loads(path.read_text()))
        except (OSError, ValueError, TypeError, KeyError):
            return None

    def as_json(self) -> dict[str, Any]:
        """Return what JSON can hold."""
        return asdict(self)

    def to_json(self) -> str:
        """Return one JSON object."""
        return json.dumps(self.as_json())

    def is_same(self, other: Identity) -> bool:
        """Tell whether both are one process."""
        if self.pid != other.pid or not self.is_of_boot(other.boot_id):
            return False
        if self.start_ticks is not None and other.start_ticks is not None:
            return self.start_ticks == other.start_ticks
        return abs(self.created_at - other.created_at) < _SAME_TIME_S

    def is_of_boot(self, boot_id: str) -> bool:
        """Tell whether the process may have begun since the machine was booted, which gave it `boot_id`."""
        return self.boot_id == boot_id or not self.boot_id or not boot_id

    def began_before(self, other: Identity) -> bool:
        """Tell whether this one began before the other, of the same boot; where no ticks tell, by more than 5 s."""
        if self.start_ticks is not None and other.start_ticks is not None:
            return self.start_ticks < other.start_ticks
        return self.created_at < other.created_at - _SAME_TIME_S

    def is_alive(self) -> bool:
        """Tell whether this very process still runs; one that ended and waits to be reaped does not."""
        try:
            now, runs = _look(self.pid)
        except ProcessLookupError:
            return False
        return runs and self.is_same(now)

    def _renewed(self) -> Identity:
        """Return what the kernel says of a process that only the clock told, so that it outlives the next setting."""
        try:
            now = Identity.of(self.pid)
        except ProcessLookupError:
            return self
        return now if self.is_same(now) else self


def _look(pid: int) -> tuple[Identity, bool]:
    """Return who a process is and whether it has not ended. Raises: ProcessLookupError."""
    if not _HAS_PROC:
        return _look_without_proc(pid)
    try:
        # The command's name is in brackets and may hold any character; the state follows it.
        fields = (_PROC / str(pid) / "stat").read_bytes().rpartition(b") ")[2].split()
        state, ticks = fields[0], int(fields[19])
        booted_at = int((_PROC / "stat").read_bytes().partition(b"\nbtime ")[2].split(maxsplit=1)[0])
    except (OSError, IndexError, ValueError) as error:
        raise ProcessLookupError(f"process {pid} does not run") from error
    created_at = booted_at + ticks / os.sysconf("SC_CLK_TCK")
    return Identity(pid, created_at, _boot_id(), ticks), state not in (b"Z", b"X")


def _look_without_proc(pid: int) -> tuple[Identity, bool]:
    try:
        process = psutil.Process(pid)
        return Identity(pid, process.create_time()), process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error as error:
        raise ProcessLookupError(f"process {pid} does not run") from error


@cache
def _boot_id() -> str:
    try:
        return (_PROC / "sys" / "kernel" / "random" / "boot_id").read_text().strip()
    except OSError:
        return ""
