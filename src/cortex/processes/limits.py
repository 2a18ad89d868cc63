"""Processors and memory that this process may use: those of the machine, or of its container; cgroups(7).

The tightest limit of the control group and of the groups around it applies. Version 2 has `cpu.max` and `memory.max`,
version 1 `cpu.cfs_quota_us` and `memory.limit_in_bytes`.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

_GROUPS = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")
_PROCESSORS = Path("/sys/devices/system/cpu")


class NoProcessorsError(Exception):
    """Processes cannot have processors of their own."""


def usable_processors(groups: Path = _GROUPS, membership: Path = _MEMBERSHIP) -> float:
    """Return the number of processors: those of the affinity mask, or the quota of CPU time if it is smaller."""
    processors = float(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    for folder in _folders("cpu", groups, membership):
        with contextlib.suppress(OSError, ValueError, ZeroDivisionError):
            processors = min(processors, _quota(folder))
    return processors


def usable_memory_bytes(total_bytes: int, groups: Path = _GROUPS, membership: Path = _MEMBERSHIP) -> int:
    """Return the memory: `total_bytes`, that of the machine, or the limit if it is smaller."""
    for folder in _folders("memory", groups, membership):
        for name in ("memory.max", "memory.limit_in_bytes"):
            with contextlib.suppress(OSError, ValueError):  # "max" is no number
                total_bytes = min(total_bytes, int((folder / name).read_text()))
    return total_bytes


def thread_share(processes: int) -> int:
    """Return the number of threads for the computations of each of `processes` processes, at least 1."""
    return max(1, int(usable_processors()) // max(processes, 1))


def processors_of(
    index: int, processes: int, topology: Path = _PROCESSORS, groups: Path = _GROUPS, membership: Path = _MEMBERSHIP
) -> set[int]:
    """Return the processors of process `index`: as many for each process, and none for two of them.

    Processors that share a core or a socket stay together. What is left over remains for other processes.
    Raises: NoProcessorsError.
    """
    usable = os.sched_getaffinity(0)
    share = len(usable) // processes
    if not share:
        raise NoProcessorsError(
            f"{processes} processes cannot have processors of their own: {len(usable)} can be used here; lower"
            " processes_per_replica, or remove the key"
        )
    if (quota := usable_processors(groups, membership)) < len(usable):
        raise NoProcessorsError(
            f"a quota limits this container to the CPU time of {quota:g} processors, but not to certain ones; start it"
            " with a set of processors, or remove the key"
        )
    return set(sorted(usable, key=lambda number: _position(topology, number))[index * share : (index + 1) * share])


def _position(topology: Path, number: int) -> tuple[int, int, int]:
    """Return the socket, the core and the number of a processor."""
    folder = topology / f"cpu{number}" / "topology"
    try:
        return int((folder / "physical_package_id").read_text()), int((folder / "core_id").read_text()), number
    except (OSError, ValueError):  # unknown
        return 0, 0, number


def _quota(folder: Path) -> float:
    """Return the CPU time per elapsed time. Raises: OSError, ValueError if there is no limit."""
    if (folder / "cpu.max").exists():
        quota, period = (folder / "cpu.max").read_text().split()
    else:
        quota, period = ((folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
    if int(quota) <= 0:  # -1: no limit
        raise ValueError(quota)
    return int(quota) / int(period)


def _folders(controller: str, groups: Path, membership: Path) -> Iterator[Path]:
    """Yield the folders of this process's group and of all groups around it."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:  # not Linux
        return
    for line in lines:
        number, controllers, group = line.split(":", 2)
        if number != "0" and controller not in controllers.split(","):
            continue
        top = groups if number == "0" else groups / controller
        # In a container, the group may be named as the host sees it, while the folder shows the container's own.
        for folder in {top, *((top / group.lstrip("/")), *(top / group.lstrip("/")).parents)}:
            if folder.is_relative_to(top):
                yield folder
