"""The processes that a process has started, as Linux lists them in `/proc`."""

from __future__ import annotations

import contextlib
from pathlib import Path


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


def stat_fields(pid: int) -> list[str]:
    """Return the fields of `/proc/PID/stat` from the third on: state, parent and so on. Raises: OSError."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
