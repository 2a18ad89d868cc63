"""The queues of AsyncAPIs: takes workloads, gives them to workers, tells what became of them.

What is in a queue is decided in `queueing.py`; here is who waits for what.
"""

from __future__ import annotations

import asyncio
import secrets
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from sqlalchemy import Connection

from cortex.jobs import async_queue as queueing
from cortex.jobs.async_queue import Standing
from cortex.jobs.exchange import Leased
from cortex.jobs.spec import Report
from cortex.jobs.workload import Workload, WorkloadView
from cortex.jobs.writer import Writer

#: How long a workload that is over can be looked at.
KEPT_S = 7 * 24 * 3600.0
#: Workloads that are stored in one operation at most.
_GROUP = 256
#: A worker is given at most this part of what is open, and never more than so many: nobody else gets them meanwhile.
_SHARE, _MAX_LEASED = 16, 32
#: A caller that waits looks so often even if nobody tells it to.
_LOOK_S = 1.0
#: A larger body is written as a line in a thread.
_LARGE_BYTES = 1024 * 1024

_T = TypeVar("_T")


@dataclass(frozen=True)
class _Arriving:
    """A workload that is to be stored, and who waits for that."""

    name: uuid.UUID
    line: bytes
    stored: asyncio.Future[None]


class Workloads:
    """All queues. All methods belong to one event loop; `on_added(job_id, count)` is told of new workloads."""

    def __init__(self, writer: Writer, reader: Writer, sweep: Callable[[], None], clock: Callable[[], float]) -> None:
        self.on_added: Callable[[str, int], None] = lambda job_id, count: None
        self._writer = writer
        self._reader = reader
        self._sweep = sweep
        self._clock = clock
        self._opening = asyncio.Lock()
        self._by_api: dict[str, Standing] = {}
        self._by_job: dict[str, Standing] = {}
        self._open: dict[int, int] = {}  #: workloads that are not over, by queue; the writer's thread keeps it
        self._arriving: dict[str, list[_Arriving]] = {}
        self._storing: dict[str, asyncio.Task[None]] = {}
        self._waiting: dict[int, set[asyncio.Future[None]]] = {}

    async def startup(self) -> None:
        """Find the queues that are there."""
        for standing in await self._writer.run(queueing.read_standing):
            self._know(standing)
            await self._writer.run(partial(self._count, standing.number))

    @property
    def apis(self) -> Sequence[str]:
        """Return the names of the APIs that have a queue."""
        return tuple(self._by_api)

    def has(self, job_id: str) -> bool:
        """Tell whether a job is a queue."""
        return job_id in self._by_job

    def count(self, api: str) -> int | None:
        """Count the workloads of an API that are not over; None if it has no queue."""
        standing = self._by_api.get(api)
        return None if standing is None else self._open.get(standing.number, 0)

    async def counts(self) -> dict[str, int]:
        """Count the workloads that are not over, by API."""
        return {api: self._open.get(standing.number, 0) for api, standing in self._by_api.items()}

    async def open(self, api: str) -> Standing:
        """Return the queue of an API; the first call makes it."""
        async with self._opening:
            if api not in self._by_api:
                job_id = secrets.token_hex(8)
                self._know(await self._writer.run(lambda c: queueing.open_standing(c, api, job_id, self._clock())))
            return self._by_api[api]

    async def close(self, api: str) -> None:
        """Delete the queue of an API with all that is in it."""
        standing = self._by_api.pop(api, None)
        if standing is not None:
            del self._by_job[standing.job_id]
            await self._writer.run(lambda connection: queueing.close_standing(connection, standing.number))
            self._sweep()

    # Callers.

    async def add(self, api: str, workload: Workload) -> None:
        """Put a workload into an API's queue; once this returns it is on the disk. Raises: NotFoundError."""
        is_large = len(workload.body) > _LARGE_BYTES
        line = await asyncio.to_thread(workload.to_line) if is_large else workload.to_line()
        standing = await self.open(api)
        stored = asyncio.get_running_loop().create_future()
        self._arriving.setdefault(standing.job_id, []).append(_Arriving(workload.id, line, stored))
        if standing.job_id not in self._storing:
            self._storing[standing.job_id] = asyncio.create_task(self._store(standing), name=f"store for {api}")
        await stored

    async def get(self, api: str, name: uuid.UUID, wait_s: float = 0.0) -> WorkloadView | None:
        """Return a workload, at once or, if it is not over, when it is or `wait_s` have passed; None if unknown."""
        deadline = asyncio.get_running_loop().time() + wait_s
        found = await self._look(api, name)
        while found is not None and not found.status.is_over:
            left = deadline - asyncio.get_running_loop().time()
            if left <= 0:
                break
            found = await self._look_again(api, found, min(left, _LOOK_S))
        return found

    # Workers.

    async def exchange(
        self, job_id: str, worker: str, pid: int, reports: Sequence[Report], max_batches: int, max_bytes: int
    ) -> Leased:
        """Record what a worker did, and lease it more."""
        standing = self._by_job.get(job_id)
        if standing is None:
            return Leased(lost=tuple(report.token for report in reports), is_done=True)
        wanted = min(max_batches, _MAX_LEASED, 1 + self._open.get(standing.number, 0) // _SHARE)

        def work(connection: Connection) -> tuple[Leased, list[int]]:
            done = queueing.exchange(connection, standing, (worker, pid), reports, wanted, max_bytes, self._clock())
            if reports:
                self._count(standing.number, connection)
            return done

        leased, ended = await self._writer.run(work)
        self._tell(ended)
        return leased

    async def settling(self, work: Callable[[Connection], _T]) -> _T:
        """Run an operation that may end leases without a report: some workloads may have died too often."""
        numbers = [standing.number for standing in self._by_api.values()]

        def both(connection: Connection) -> tuple[_T, list[int]]:
            value = work(connection)
            ended = [key for number in numbers for key in queueing.settle(connection, number, self._clock())]
            for number in numbers if ended else ():
                self._count(number, connection)
            return value, ended

        value, ended = await self._writer.run(both)
        self._tell(ended)
        return value

    def remove_ended(self, connection: Connection, size: int) -> bool:
        """Delete workloads that have been over for long enough; a step of the sweeper's."""
        return queueing.remove_ended(self._clock() - KEPT_S, connection, size)

    def _know(self, standing: Standing) -> None:
        self._by_api[standing.api] = self._by_job[standing.job_id] = standing

    def _count(self, number: int, connection: Connection) -> None:
        self._open[number] = queueing.count_open(connection, number)

    async def _store(self, standing: Standing) -> None:
        """Store what arrives, all that came while the last group was being written as the next one."""
        while arriving := self._arriving.pop(standing.job_id, None):
            for start in range(0, len(arriving), _GROUP):
                await self._store_group(standing, arriving[start : start + _GROUP])
        del self._storing[standing.job_id]

    async def _store_group(self, standing: Standing, group: Sequence[_Arriving]) -> None:
        def work(connection: Connection) -> None:
            new = [(one.name, one.line) for one in group]
            queueing.append(connection, standing.number, new, self._clock())
            self._count(standing.number, connection)

        try:
            await self._writer.run(work)
        except Exception as error:  # each of them is told
            for one in group:
                if not one.stored.done():
                    one.stored.set_exception(error)
            return
        for one in group:
            if not one.stored.done():  # the caller may be gone; what it sent stays
                one.stored.set_result(None)
        self.on_added(standing.job_id, len(group))

    async def _look(self, api: str, name: uuid.UUID) -> WorkloadView | None:
        standing = self._by_api.get(api)
        if standing is None:
            return None
        return await self._reader.run(lambda connection: queueing.look(connection, standing.number, name))

    async def _look_again(self, api: str, before: WorkloadView, wait_s: float) -> WorkloadView | None:
        told = asyncio.get_running_loop().create_future()
        waiting = self._waiting.setdefault(before.key, set())
        waiting.add(told)
        try:
            found = await self._look(api, before.id)  # it may have ended before anyone knew that we wait
            if found is None or found.status.is_over:
                return found
            await asyncio.wait((told,), timeout=wait_s)
        finally:
            waiting.discard(told)
            if not waiting:
                self._waiting.pop(before.key, None)
        return await self._look(api, before.id)

    def _tell(self, ended: Iterable[int]) -> None:
        for key in ended:
            for told in self._waiting.pop(key, ()):
                if not told.done():
                    told.set_result(None)
