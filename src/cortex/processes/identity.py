"""Process identity that survives reuse of a process id and changes of the clock.

The CLI imports this module at startup, so it imports little.

The kernel's count of ticks from boot to the start of a process never changes, and each boot has an id. The start time
in seconds does change: the kernel computes it from the clock, which may be set while the process runs.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

_PROC = Path("/proc")
_HAS_PROC = (_PROC / "self" / "stat").exists()
#: Tolerance between two readings of one start time: the clock may be adjusted between them.
_SAME_TIME_S = 5.0
_NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE)
#: States in proc_pid_stat(5).
_ENDED, _STOPPED, _RUNNING = ("Z", "X"), "T", "R"

if not _HAS_PROC:
    import psutil


@dataclass(frozen=True)
class Identity:
    """A process: its id may be reused, its id and start together may not."""

    pid: int
    created_at: float  #: UNIX time in seconds, by the clock at the time of reading
    boot_id: str = ""  #: empty if unknown
    start_ticks: int | None = None  #: from boot to its start; None without /proc, or in a file of an old version

    @classmethod
    def of(cls, pid: int) -> Identity:
        """Identify a running process, or one that waits to be reaped. Raises: ProcessLookupError."""
        return _inspect(pid)[0]

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Identity:
        """Parse the result of `as_json`, of this version or of an older one, which wrote no ticks.

        Raises: KeyError, TypeError, ValueError for anything else.
        """
        pid, ticks = int(data["pid"]), data.get("start_ticks")
        created_at = float(data["create_time"] if "create_time" in data else data["created_at"])
        identity = cls(pid, created_at, str(data.get("boot_id") or ""), None if ticks is None else int(ticks))
        return identity._with_ticks() if identity.start_ticks is None else identity

    @classmethod
    def read(cls, path: Path) -> Identity | None:
        """Read a file that holds the result of `to_json`; return None if it is missing or unreadable."""
        try:
            return cls.from_json(json.loads(path.read_text()))
        except (OSError, ValueError, TypeError, KeyError):
            return None

    def as_json(self) -> dict[str, Any]:
        """Return a dictionary of JSON values."""
        return asdict(self)

    def to_json(self) -> str:
        """Return one JSON object."""
        return json.dumps(self.as_json())

    def is_same(self, other: Identity) -> bool:
        """Return whether both are the same process."""
        if self.pid != other.pid or not self.is_of_boot(other.boot_id):
            return False
        if self.start_ticks is not None and other.start_ticks is not None:
            return self.start_ticks == other.start_ticks
        return abs(self.created_at - other.created_at) < _SAME_TIME_S

    def is_of_boot(self, boot_id: str) -> bool:
        """Return whether the process belongs to the boot with `boot_id`, as far as both are known."""
        return self.boot_id == boot_id or not self.boot_id or not boot_id

    def began_before(self, other: Identity) -> bool:
        """Return whether this process started before `other`, of the same boot; without ticks, by more than 5 s."""
        if self.start_ticks is not None and other.start_ticks is not None:
            return self.start_ticks < other.start_ticks
        return self.created_at < other.created_at - _SAME_TIME_S

    def is_alive(self) -> bool:
        """Return whether this very process still runs; one that waits to be reaped does not.

        Without a free file descriptor, any process with this id counts: a gateway or a replica must not be taken for
        dead, and replaced, because the operator has too many connections.
        """
        try:
            current, state = _inspect(self.pid)
        except ProcessLookupError as error:
            return isinstance(error.__cause__, OSError) and error.__cause__.errno in _NO_DESCRIPTOR and self._exists()
        return state not in _ENDED and self.is_same(current)

    def is_stopped(self) -> bool:
        """Return whether this very process is suspended by a signal; stops by a debugger or profiler do not count."""
        try:
            current, state = _inspect(self.pid)
        except ProcessLookupError:
            return False
        return state == _STOPPED and self.is_same(current)

    def _exists(self) -> bool:
        try:
            os.kill(self.pid, 0)
        except PermissionError:
            return True
        except ProcessLookupError:
            return False
        return True

    def _with_ticks(self) -> Identity:
        """Add the ticks to an identity that has only a start time, so that it survives the next change of the clock."""
        try:
            current = Identity.of(self.pid)
        except ProcessLookupError:
            return self
        return current if self.is_same(current) else self


def _inspect(pid: int) -> tuple[Identity, str]:
    """Return the identity of a process and its state. Raises: ProcessLookupError."""
    if not _HAS_PROC:
        return _inspect_without_proc(pid)
    try:
        # The command's name is in parentheses and may contain any character; the state follows it.
        fields = (_PROC / str(pid) / "stat").read_bytes().rpartition(b") ")[2].split()
        state, ticks = fields[0].decode(), int(fields[19])
        booted_at = int((_PROC / "stat").read_bytes().partition(b"\nbtime ")[2].split(maxsplit=1)[0])
    except (OSError, IndexError, ValueError) as error:
        raise ProcessLookupError(f"process {pid} does not run") from error
    created_at = booted_at + ticks / os.sysconf("SC_CLK_TCK")
    return Identity(pid, created_at, _boot_id(), ticks), state


def _inspect_without_proc(pid: int) -> tuple[Identity, str]:
    states = {psutil.STATUS_ZOMBIE: _ENDED[0], psutil.STATUS_STOPPED: _STOPPED}
    try:
        process = psutil.Process(pid)
        return Identity(pid, process.create_time()), states.get(process.status(), _RUNNING)
    except psutil.Error as error:
        raise ProcessLookupError(f"process {pid} does not run") from error


@cache
def _boot_id() -> str:
    try:
        return (_PROC / "sys" / "kernel" / "random" / "boot_id").read_text().strip()
    except OSError:
        return ""
