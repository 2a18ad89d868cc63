"""CPU time, memory and GPU use of replicas, read from the kernel and the GPU driver: `/metrics`, autoscaling by CPU."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import psutil

from cortex.engine.devices import NoAnswerError, query_gpus
from cortex.processes.memory import MemoryUse, memory_use
from cortex.worker.spec import ReplicaSpec, ReplicaStatus

_GPU_FIELDS = "uuid,memory.used,utilization.gpu"
#: A driver that hangs must not delay the page for long.
_GPU_TIMEOUT_S = 5.0
_MIB = 1024 * 1024
#: Measurements then take at most a twentieth of a processor, however often they are requested.
_REUSE = 20.0


@dataclass(frozen=True)
class GpuUsage:
    """Use of one GPU, which a replica has for itself."""

    id: str
    memory_bytes: int
    utilization: float  #: part of the driver's last sample period in which a kernel ran, 0 to 1


@dataclass(frozen=True)
class ResourceUsage:
    """Use of a replica: its supervisor and all processes below it."""

    api: str
    cpu_s: float  #: since its start; includes processes that have ended
    memory: MemoryUse  #: the sum over its processes
    gpus: tuple[GpuUsage, ...] = ()


async def resource_usage(
    replicas: Iterable[tuple[ReplicaSpec, ReplicaStatus]], environ: Mapping[str, str]
) -> dict[str, ResourceUsage]:
    """Return the use of each replica of this machine by id. GPUs are queried only if a replica has one."""
    running = list(replicas)
    gpus = await _gpus(environ) if any(spec.gpu_ids for spec, _ in running) else {}
    return await asyncio.to_thread(_measure, running, gpus)


class RecentUsage:
    """The latest measurement of `measure`, taken again when it is older than `_REUSE` times the time that it took.

    The kernel visits all memory of the replicas for one, which takes seconds if they have many gigabytes.
    """

    def __init__(
        self, measure: Callable[[], Awaitable[Mapping[str, ResourceUsage]]], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._measure = measure
        self._clock = clock
        self._latest: Mapping[str, ResourceUsage] = {}
        self._valid_until = -math.inf
        self._lock = asyncio.Lock()

    async def get(self) -> Mapping[str, ResourceUsage]:
        """Return it, by the ids of replicas; callers that come meanwhile wait for the same measurement."""
        async with self._lock:
            began = self._clock()
            if began >= self._valid_until:
                self._latest = await self._measure()
                ended = self._clock()
                self._valid_until = ended + _REUSE * (ended - began)
            return self._latest


def usage_to_json(usage: Mapping[str, ResourceUsage]) -> dict[str, Any]:
    """Return the JSON form; `usage_from_json` is its inverse."""
    return {
        replica: {
            "api": each.api,
            "cpu_s": each.cpu_s,
            "memory_bytes": each.memory.resident_bytes,
            "proportional_bytes": each.memory.proportional_bytes,
            "private_bytes": each.memory.private_bytes,
            "gpus": [asdict(gpu) for gpu in each.gpus],
        }
        for replica, each in usage.items()
    }


def usage_from_json(data: Mapping[str, Any]) -> dict[str, ResourceUsage]:
    """Parse the JSON form. Raises: KeyError, TypeError or ValueError for anything else."""
    return {
        str(replica): ResourceUsage(
            str(each["api"]),
            float(each["cpu_s"]),
            MemoryUse(
                int(each["memory_bytes"]),
                int(each.get("proportional_bytes", 0)),  # agents of older versions send none
                int(each.get("private_bytes", 0)),
            ),
            tuple(GpuUsage(str(g["id"]), int(g["memory_bytes"]), float(g["utilization"])) for g in each["gpus"]),
        )
        for replica, each in data.items()
    }


def _measure(
    replicas: Sequence[tuple[ReplicaSpec, ReplicaStatus]], gpus: Mapping[str, GpuUsage]
) -> dict[str, ResourceUsage]:
    children = children_by_pid() if replicas else {}
    found: dict[str, ResourceUsage] = {}
    for spec, status in replicas:
        cpu_s, memory = 0.0, MemoryUse()
        for process, times in _processes_below(status.supervisor_pid, children):
            cpu_s += times.user + times.system + times.children_user + times.children_system
            memory += memory_use(process.pid)
        if cpu_s or memory.resident_bytes:
            own = tuple(gpus[gpu] for gpu in spec.gpu_ids if gpu in gpus)
            found[spec.id] = ResourceUsage(spec.api, cpu_s, memory, own)
    return found


async def _gpus(environ: Mapping[str, str]) -> dict[str, GpuUsage]:
    """Return the use of the GPUs that the driver reports, by id; empty if it does not answer."""
    try:
        return parse_gpu_usage(await query_gpus(environ, _GPU_FIELDS, _GPU_TIMEOUT_S))
    except NoAnswerError:
        return {}


def parse_gpu_usage(text: str) -> dict[str, GpuUsage]:
    """Parse lines of id, MiB and percent; lines with `[N/A]`, as of a divided GPU, are left out."""
    found: dict[str, GpuUsage] = {}
    for line in text.splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) == 3 and fields[1].isdigit() and fields[2].isdigit():  # noqa: PLR2004
            found[fields[0]] = GpuUsage(fields[0], int(fields[1]) * _MIB, int(fields[2]) / 100)
    return found


# CPU use of APIs, for autoscaling.


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
            below = _processes_below(status.supervisor_pid, children)
            now, times = self._clock(), {process: spent.user + spent.system for process, spent in below}
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


def _processes_below(supervisor: int, children: Mapping[int, Sequence[int]]) -> Iterator[tuple[psutil.Process, Any]]:
    """Yield a supervisor and its descendants, each with its CPU times, but not those that have just ended."""
    pending = [supervisor]
    while pending:
        pid = pending.pop()
        pending += children.get(pid, ())
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            yield process, process.cpu_times()
