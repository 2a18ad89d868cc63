"""CPU use of the replicas of each API, measured from the kernel's counters."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

import psutil

from cortex.replica.spec import ReplicaStatus

#: CPU seconds by process. A `psutil.Process` survives reuse of its pid and changes of the clock.
_Times = dict[psutil.Process, float]


class CpuMeter:
    """Measures the cores in use between two calls."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seen: dict[str, tuple[float, _Times]] = {}

    async def cores(self, replicas: Iterable[ReplicaStatus]) -> Mapping[str, float]:
        """Return the cores that the ready replicas of each API used since the last call.

        CPU time spent on startup does not count. The result omits APIs whose replicas are all new since that call.
        """
        return await asyncio.to_thread(self._measure, [status for status in replicas if status.is_ready])

    def _measure(self, replicas: Sequence[ReplicaStatus]) -> dict[str, float]:
        children = children_by_pid() if replicas else {}
        used: dict[str, float] = {}
        seen: dict[str, tuple[float, _Times]] = {}
        for status in replicas:
            now, times = self._clock(), _times(status.supervisor_pid, children)
            seen[status.id] = (now, times)
            if status.id in self._seen:
                since, before = self._seen[status.id]
                seconds = sum(spent - before.get(process, 0.0) for process, spent in times.items())
                used[status.api] = used.get(status.api, 0.0) + seconds / max(now - since, 1e-3)
        self._seen = seen
        return used


def children_by_pid() -> dict[int, list[int]]:
    """Return the children of every process."""
    children: dict[int, list[int]] = {}
    for process in psutil.process_iter(["ppid"]):
        children.setdefault(process.info["ppid"], []).append(process.pid)
    return children


def _times(supervisor: int, children: Mapping[int, Sequence[int]]) -> _Times:
    """Return the CPU seconds of a supervisor and its descendants."""
    times: _Times = {}
    pending = [supervisor]
    while pending:
        pid = pending.pop()
        pending += children.get(pid, ())
        try:
            process = psutil.Process(pid)
            spent = process.cpu_times()
            times[process] = spent.user + spent.system
        except psutil.Error:
            continue  # it ended meanwhile
    return times
