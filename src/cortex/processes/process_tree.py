"""The processes that a process has started, as Linux lists them in `/proc`."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

#: In the command lines of processes that remove shared memory once those that use it have ended: the resource trackers
#: of `multiprocessing` and joblib, and PyTorch's manager. They end by themselves.
_CLEANERS = (b"resource_tracker import main", b"torch_shm_manager")
#: Time for cleaners to end.
CLEANING_S = 1.0
_CLEANING_CHECK_S = 0.005
#: Members of a group may fork while it is killed.
_MAX_KILLS = 20


def descendants(pid: int) -> list[int]:
    """Return the children of a process, and theirs, including those that have ended and were not reaped."""
    found = children(pid)
    for each in found:
        found += children(each)
    return found


def children(pid: int) -> list[int]:
    """Return the children of a process, including those that have ended and were not reaped."""
    found: list[int] = []
    with contextlib.suppress(OSError, ValueError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            found += map(int, (thread / "children").read_text().split())
    return found


def is_running(pid: int) -> bool:
    """Return whether a process has not ended."""
    try:
        return stat_fields(pid)[0] not in "ZX"
    except (OSError, IndexError):
        return False


def has_memory(pid: int) -> bool:
    """Return whether a process has its memory: an end frees it first, and then closes files and connections."""
    try:
        return not Path(f"/proc/{pid}/statm").read_text().startswith("0 ")
    except OSError:
        return False


def exit_status(pid: int) -> int | None:
    """Return the wait status of a process that is ending or has ended; None once it has been reaped."""
    try:
        return int(stat_fields(pid)[-1])
    except (OSError, IndexError):
        return None


def stat_fields(pid: int) -> list[str]:
    """Return the fields of `/proc/PID/stat` from the third on: state, parent and so on. Raises: OSError."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def is_cleaner(pid: int) -> bool:
    """Return whether a process removes shared memory of others, and ends once they have ended."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
    return any(each in command for each in _CLEANERS)


def kill_group(group: int) -> set[int]:
    """Kill the processes of a group, but for those that remove shared memory: return their ids."""
    with contextlib.suppress(OSError):
        os.kill(group, signal.SIGKILL)  # its leader first, which may be about to start a cleaner
    cleaners = set(filter(is_cleaner, _members(group)))
    if not cleaners:
        with contextlib.suppress(OSError):
            os.killpg(group, signal.SIGKILL)
        return cleaners
    for _ in range(_MAX_KILLS):
        others = [pid for pid in _members(group) if is_running(pid) and not is_cleaner(pid)]
        for pid in others:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        if not others:
            break
    return cleaners


def end_group(group: int) -> None:
    """Kill the processes of a group, and wait up to `CLEANING_S` until its shared memory is removed."""
    cleaners, ends_at = kill_group(group), time.monotonic() + CLEANING_S
    while any(map(is_running, cleaners)) and time.monotonic() < ends_at:
        time.sleep(_CLEANING_CHECK_S)


def _members(group: int) -> list[int]:
    """Return the processes of a group; none without `/proc`."""
    found = []
    names = os.listdir("/proc") if os.path.isdir("/proc") else []  # noqa: PTH112, PTH208 - names only
    for name in filter(str.isdigit, names):
        with contextlib.suppress(OSError):  # it has just ended
            if os.getpgid(int(name)) == group:
                found.append(int(name))
    return found
