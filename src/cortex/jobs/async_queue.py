"""Queues of AsyncAPIs: store workloads, lease them to replicas, and return their results to callers that poll.

An AsyncAPI's queue is stored as a job that no list shows and that never ends. Each workload is a batch of one item, so
leases, reports, retries and expiry are those of `batch_queue`. Three things differ from a job that was submitted:

- The job row counts one batch more than there are (`_EXTRA_BATCH`). A job whose last batch is resolved would complete.
- A batch number is half of a key, so a queue starts again at 0 once it has used half of the numbers (`_REUSE_FROM`),
  is empty, and its first numbers are no longer in use.
- When a workload is resolved, the same transaction copies the outcome into its row of `workloads` and deletes its
  batch, result and dead letter. Rows of `workloads` are kept for `KEPT_S`.

An exception raised by the user's code is final: it is reported as a result (`_EXCEPTION_PREFIX`), and only workloads
whose process died are tried again.
"""

from __future__ import annotations

import asyncio
import secrets
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from sqlalchemy import Connection, bindparam, delete, func, insert, select, update

from cortex.errors import IdempotencyError, NotFoundError
from cortex.jobs import batch_queue
from cortex.jobs.records import Presence
from cortex.jobs.spec import KEY_BYTES, MAX_ATTEMPTS, LeaseReply, NewBatch, Report, Workload, WorkloadView
from cortex.jobs.storage_limit import StorageLimit
from cortex.jobs.writer import TransactionThread
from cortex.lifecycle import JobStatus, WorkloadStatus
from cortex.state.tables import (
    KEYS_PER_JOB,
    batches,
    dead_letters,
    first_key,
    insert_rows,
    jobs,
    leases,
    pending,
    results,
    workloads,
)

#: Time for which the outcome of a workload can be fetched.
KEPT_S = 7 * 24 * 3600.0
#: What a workload counts besides its body or result, in bytes: its rows.
ENTRY_BYTES = 1024
#: Maximum number of workloads stored in one transaction.
_GROUP = 256
#: A replica leases at most this fraction of the open workloads, and never more than the maximum: others need some too.
_LEASED_FRACTION, _MAX_LEASED = 16, 32
#: A waiting caller checks its workload at least this often.
_POLL_S = 1.0
#: Latest workloads of a queue that are searched for those of a status, and the bytes that a list has of each value.
_SEARCHED, _VALUE_BEGIN = 10_000, 4_000
#: A larger body is encoded in a thread.
_LARGE_BYTES = 1024 * 1024

_EXTRA_BATCH = 1
_REUSE_FROM = KEYS_PER_JOB // 2
#: No JSON value begins with this.
_EXCEPTION_PREFIX = b"!"

_EXTEND_RANGE = (
    update(pending)
    .where(
        pending.c.number == bindparam("job"),
        pending.c.not_before == 0.0,
        pending.c.last == bindparam("was_last"),
        pending.c.attempts == 0,
        pending.c.is_part.is_(False),
    )
    .values(last=bindparam("new_last"))
)
_RESULTS = select(results.c.key, results.c.value).where(results.c.key.between(bindparam("first"), bindparam("last")))
_DEAD_LETTERS = select(dead_letters.c.key, dead_letters.c.error).where(
    dead_letters.c.key.between(bindparam("first"), bindparam("last"))
)
_SET_OUTCOME = (
    update(workloads)
    .where(workloads.c.key == bindparam("its_key"))
    .values(status=bindparam("its_status"), ended_at=bindparam("now"), value=bindparam("its_value"))
)
_COUNT_OPEN = select(jobs.c.batches - jobs.c.succeeded - jobs.c.failed - _EXTRA_BATCH).where(
    jobs.c.number == bindparam("job")
)
_COUNT_LEASED = select(func.sum(leases.c.last - leases.c.next + 1)).where(leases.c.number == bindparam("job"))
_FIRST_PENDING = select(func.min(pending.c.first)).where(pending.c.number == bindparam("job"))

_T = TypeVar("_T")


@dataclass(frozen=True)
class AsyncQueue:
    """The job that stores an API's queue."""

    api: str
    job_id: str
    number: int


@dataclass(frozen=True)
class QueueState:
    """The open workloads of a queue."""

    waiting: int
    in_progress: int
    oldest_at: float | None  #: when the oldest waiting one was accepted, UNIX seconds; None: none waits


@dataclass(frozen=True)
class _NewWorkload:
    """A workload to be stored, and the future of the caller that waits for it."""

    id: uuid.UUID
    line: bytes
    stored: asyncio.Future[None]
    has_key: bool = False  #: its id follows from an idempotency key


class AsyncQueues:
    """The queues of all AsyncAPIs. All methods belong to one event loop."""

    def __init__(
        self,
        writer: TransactionThread,
        reader: TransactionThread,
        clean_soon: Callable[[], None],
        clock: Callable[[], float],
    ) -> None:
        self._writer = writer
        self._reader = reader
        self._clean_soon = clean_soon
        self._clock = clock
        self._opening = asyncio.Lock()
        self._by_api: dict[str, AsyncQueue] = {}
        self._by_job: dict[str, AsyncQueue] = {}
        self._open: dict[int, int] = {}  #: number of open workloads by queue, as of its last transaction
        self._new: dict[str, list[_NewWorkload]] = {}
        self._storing: dict[str, asyncio.Task[None]] = {}
        self._waiting: dict[int, set[asyncio.Future[None]]] = {}
        self.limit = StorageLimit(self._make_room, clock)

    async def startup(self, on_added: Callable[[str, int], None]) -> None:
        """Load the stored queues. `on_added(job_id, count)` is called when workloads were stored."""
        self._on_added = on_added
        for queue in await self._writer.run(_read_queues):
            self._register(queue)
            self._open[queue.number] = await self._writer.run(partial(_count_open, number=queue.number))

    @property
    def apis(self) -> Sequence[str]:
        """Return the names of the APIs that have a queue."""
        return tuple(self._by_api)

    def has(self, job_id: str) -> bool:
        """Return True if a job is a queue."""
        return job_id in self._by_job

    def count(self, api: str) -> int | None:
        """Count the open workloads of an API; return None if it has no queue."""
        queue = self._by_api.get(api)
        return None if queue is None else self._open.get(queue.number, 0)

    async def counts(self) -> dict[str, int]:
        """Count the open workloads by API."""
        return {api: self._open.get(queue.number, 0) for api, queue in self._by_api.items()}

    async def states(self) -> dict[str, QueueState]:
        """Return the state of every queue by API."""
        numbers = {api: queue.number for api, queue in self._by_api.items()}
        return await self._reader.run(
            lambda connection: {api: _read_state(connection, number) for api, number in numbers.items()}
        )

    async def recent(self, api: str, status: WorkloadStatus | None, limit: int) -> Sequence[WorkloadView]:
        """Return up to `limit` workloads of a status, the latest first, with the begin of each value.

        Only the latest `_SEARCHED` are searched for a status that is over.
        """
        queue = self._by_api.get(api)
        if queue is None:
            return []
        return await self._reader.run(lambda connection: _read_recent(connection, queue.number, status, limit))

    async def open(self, api: str) -> AsyncQueue:
        """Return the queue of an API, which the first call creates."""
        async with self._opening:
            if api not in self._by_api:
                job_id = secrets.token_hex(8)
                self._register(await self._writer.run(lambda c: _create_queue(c, api, job_id, self._clock())))
            return self._by_api[api]

    async def close(self, api: str) -> None:
        """Delete the queue of an API and its workloads."""
        queue = self._by_api.pop(api, None)
        if queue is not None:
            del self._by_job[queue.job_id]
            await self._writer.run(lambda connection: _delete_queue(connection, queue.number))
            self._clean_soon()

    # Callers.

    async def add(self, api: str, workload: Workload, key: str = "") -> uuid.UUID:
        """Append a workload to an API's queue, and return its id; it is on the disk when this returns.

        With an idempotency key, the id follows from it; what is stored already is not stored again.
        Raises: NotFoundError, IdempotencyError.
        """
        queue = await self.open(api)

        def prepare() -> tuple[uuid.UUID, bytes]:
            prepared = workload.with_key(queue.job_id, key) if key else workload
            return prepared.id, prepared.to_line()

        name, line = await asyncio.to_thread(prepare) if len(workload.body) > _LARGE_BYTES else prepare()
        stored = asyncio.get_running_loop().create_future()
        self._new.setdefault(queue.job_id, []).append(_NewWorkload(name, line, stored, bool(key)))
        if queue.job_id not in self._storing:
            self._storing[queue.job_id] = asyncio.create_task(self._store(queue), name=f"store for {api}")
        await stored
        return name

    async def get(self, api: str, name: uuid.UUID, wait_s: float = 0.0) -> WorkloadView | None:
        """Return a workload, or None if it is unknown; wait up to `wait_s` until it is over."""
        deadline = asyncio.get_running_loop().time() + wait_s
        found = await self._find(api, name)
        while found is not None and not found.status.is_over:
            left = deadline - asyncio.get_running_loop().time()
            if left <= 0:
                break
            found = await self._wait_and_find(api, found, min(left, _POLL_S))
        return found

    # Replicas.

    async def exchange(
        self, job_id: str, worker: str, pid: int, reports: Sequence[Report], max_batches: int, max_bytes: int
    ) -> LeaseReply:
        """Record reports and lease more workloads; see `batch_queue.exchange`."""
        queue = self._by_job.get(job_id)
        if queue is None:
            return LeaseReply(lost=tuple(report.token for report in reports), is_done=True)
        wanted = min(max_batches, _MAX_LEASED, 1 + self._open.get(queue.number, 0) // _LEASED_FRACTION)

        def exchange(connection: Connection) -> tuple[LeaseReply, list[int], int | None]:
            now, final = self._clock(), [_with_exceptions_as_results(report) for report in reports]
            leased = batch_queue.exchange(connection, job_id, worker, pid, final, wanted, max_bytes, now)
            ended = _settle(connection, queue.number, now)
            return leased, ended, _count_open(connection, queue.number) if reports else None

        leased, ended, count = await self._writer.run(exchange)
        if count is not None:
            self._open[queue.number] = count
        self._wake(ended)
        return leased

    async def run_and_settle(self, work: Callable[[Connection], _T]) -> _T:
        """Run an operation that may end leases: workloads whose attempts are used up by it fail."""
        numbers = [queue.number for queue in self._by_api.values()]

        def run(connection: Connection) -> tuple[_T, list[int], dict[int, int]]:
            value = work(connection)
            ended = [key for number in numbers for key in _settle(connection, number, self._clock())]
            return value, ended, {number: _count_open(connection, number) for number in numbers if ended}

        value, ended, counts = await self._writer.run(run)
        self._open |= counts
        self._wake(ended)
        return value

    def remove_ended(self, connection: Connection, size: int) -> bool:
        """Delete about `size` workloads that ended more than `KEPT_S` ago; return False once there are none."""
        return _remove_ended(connection, self._clock() - KEPT_S, size)

    async def _make_room(self, api: str, max_bytes: int, kept_bytes: int) -> int:
        """Remove the outcomes of the oldest workloads; see `StorageLimit`."""
        queue = self._by_api.get(api)
        if queue is None:
            return 0
        number = queue.number
        size = await self._reader.run(lambda connection: _stored_bytes(connection, number))
        wanted = size if size <= max_bytes else kept_bytes
        while size > wanted:
            freed = await self._writer.run(partial(_remove_oldest_ended, number=number, size_bytes=size - wanted))
            if not freed:
                break
            size -= freed
        return size

    def _register(self, queue: AsyncQueue) -> None:
        self._by_api[queue.api] = self._by_job[queue.job_id] = queue

    async def _store(self, queue: AsyncQueue) -> None:
        """Store new workloads in groups: what arrives while one group is written is the next one."""
        while new := self._new.pop(queue.job_id, None):
            for start in range(0, len(new), _GROUP):
                await self._store_group(queue, new[start : start + _GROUP])
        del self._storing[queue.job_id]

    async def _store_group(self, queue: AsyncQueue, group: Sequence[_NewWorkload]) -> None:
        def append(connection: Connection) -> tuple[int, int, set[uuid.UUID]]:
            new, refused = _without_stored(connection, queue.number, group)
            _append(connection, queue.number, [(one.id, one.line) for one in new], self._clock())
            return _count_open(connection, queue.number), len(new), refused

        try:
            self._open[queue.number], count, refused = await self._writer.run(append)
        except Exception as error:  # raised to every caller of the group
            for one in group:
                if not one.stored.done():
                    one.stored.set_exception(error)
            return
        for one in group:
            if one.stored.done():  # a caller may have disconnected; its workload stays
                continue
            if one.id in refused:
                one.stored.set_exception(IdempotencyError())
            else:
                one.stored.set_result(None)
        if count:
            self._on_added(queue.job_id, count)

    async def _find(self, api: str, name: uuid.UUID) -> WorkloadView | None:
        queue = self._by_api.get(api)
        if queue is None:
            return None
        return await self._reader.run(lambda connection: _read_workload(connection, queue.number, name))

    async def _wait_and_find(self, api: str, before: WorkloadView, wait_s: float) -> WorkloadView | None:
        ended = asyncio.get_running_loop().create_future()
        waiting = self._waiting.setdefault(before.key, set())
        waiting.add(ended)
        try:
            found = await self._find(api, before.id)  # it may have ended before the future was registered
            if found is None or found.status.is_over:
                return found
            await asyncio.wait((ended,), timeout=wait_s)
        finally:
            waiting.discard(ended)
            if not waiting:
                self._waiting.pop(before.key, None)
        return await self._find(api, before.id)

    def _wake(self, ended: Iterable[int]) -> None:
        for key in ended:
            for future in self._waiting.pop(key, ()):
                if not future.done():
                    future.set_result(None)


# Each function below runs inside a transaction of the caller.


def _read_queues(connection: Connection) -> list[AsyncQueue]:
    query = select(jobs.c.api, jobs.c.id, jobs.c.number).where(jobs.c.presence == Presence.ASYNC_QUEUE)
    return [AsyncQueue(row.api, row.id, row.number) for row in connection.execute(query)]


def _create_queue(connection: Connection, api: str, job_id: str, now: float) -> AsyncQueue:
    values = {
        "id": job_id,
        "api": api,
        "presence": Presence.ASYNC_QUEUE,
        "status": JobStatus.PENDING,
        "created_at": now,
        "max_attempts": MAX_ATTEMPTS,
        "isolate_failures": False,
        "batches": _EXTRA_BATCH,
    }
    key = connection.execute(insert(jobs).values(values)).inserted_primary_key
    assert key is not None
    return AsyncQueue(api, job_id, int(key.number))


def _delete_queue(connection: Connection, number: int) -> None:
    """Mark a queue as deleted; `cleanup` removes its rows."""
    connection.execute(delete(leases).where(leases.c.number == number))
    connection.execute(update(jobs).where(jobs.c.number == number).values(presence=Presence.DELETED))


def _count_open(connection: Connection, number: int) -> int:
    return int(connection.execute(_COUNT_OPEN, {"job": number}).scalar() or 0)


def _without_stored(
    connection: Connection, number: int, group: Sequence[_NewWorkload]
) -> tuple[list[_NewWorkload], set[uuid.UUID]]:
    """Return the workloads of a group that are new, and the ids of those whose key was used for another body."""
    new, refused, seen = [], set(), dict[bytes, bytes]()
    of_queue = workloads.c.key.between(first_key(number), first_key(number + 1) - 1)
    for one in group:
        if one.has_key:
            begin = one.id.bytes[:KEY_BYTES]
            if begin not in seen:
                end = 16 - KEY_BYTES
                same_key = workloads.c.id.between(begin + bytes(end), begin + b"\xff" * end)
                stored = connection.execute(select(workloads.c.id).where(same_key, of_queue)).scalar()
                seen[begin] = one.id.bytes if stored is None else bytes(stored)
                if stored is None:
                    new.append(one)
            if seen[begin] != one.id.bytes:
                refused.add(one.id)
        else:
            new.append(one)
    return new, refused


def _append(connection: Connection, number: int, new: Sequence[tuple[uuid.UUID, bytes]], now: float) -> None:
    """Append workloads, given as ids and lines. Raises: NotFoundError if the queue is deleted."""
    if not new:
        return
    this_queue = (jobs.c.number == number, jobs.c.presence == Presence.ASYNC_QUEUE)
    first = connection.execute(select(jobs.c.next_seq).where(*this_queue)).scalar()
    if first is None:
        raise NotFoundError("the API was deleted")
    if first >= _REUSE_FROM and _is_reusable(connection, number):
        first = 0
        connection.execute(update(jobs).where(jobs.c.number == number).values(next_seq=first))
    batch_queue.add_batches(connection, number, [NewBatch(1, line) for _, line in new])
    base = first_key(number) + first
    rows = [{"key": base + index, "id": name.bytes, "created_at": now} for index, (name, _) in enumerate(new)]
    insert_rows(connection, workloads, rows)
    last = first + len(new) - 1
    if not connection.execute(_EXTEND_RANGE, {"job": number, "was_last": first - 1, "new_last": last}).rowcount:
        values = {"number": number, "not_before": 0.0, "first": first, "last": last, "attempts": 0, "is_part": False}
        connection.execute(insert(pending), values)


def _settle(connection: Connection, number: int, now: float) -> list[int]:
    """Copy the outcomes of resolved workloads into their rows and delete everything else; return their keys."""
    all_keys = {"first": first_key(number), "last": first_key(number + 1) - 1}
    ends = [(key, *_outcome(value)) for key, value in connection.execute(_RESULTS, all_keys)]
    ends += [(key, WorkloadStatus.FAILED, _encode(error)) for key, error in connection.execute(_DEAD_LETTERS, all_keys)]
    if not ends:
        return []
    connection.execute(
        _SET_OUTCOME, [{"its_key": key, "its_status": end, "its_value": value, "now": now} for key, end, value in ends]
    )
    keys = [key for key, _, _ in ends]
    for table in (results, dead_letters, batches):
        connection.execute(delete(table).where(table.c.key.in_(keys)))
    return keys


def _read_workload(connection: Connection, number: int, name: uuid.UUID) -> WorkloadView | None:
    base = first_key(number)
    of_queue = workloads.c.key.between(base, first_key(number + 1) - 1)
    row = connection.execute(select(workloads).where(workloads.c.id == name.bytes, of_queue)).first()
    if row is None:
        return None
    if row.status is not None:
        status = WorkloadStatus(row.status)
        return WorkloadView(name, row.key, status, row.created_at, row.ended_at, row.value or b"")
    lease = (leases.c.number == number, leases.c.next <= row.key - base, leases.c.last >= row.key - base)
    is_leased = connection.execute(select(leases.c.id).where(*lease).limit(1)).first() is not None
    return WorkloadView(
        name, row.key, WorkloadStatus.IN_PROGRESS if is_leased else WorkloadStatus.IN_QUEUE, row.created_at
    )


def _read_state(connection: Connection, number: int) -> QueueState:
    in_progress = connection.execute(_COUNT_LEASED, {"job": number}).scalar() or 0
    first = connection.execute(_FIRST_PENDING, {"job": number}).scalar()
    oldest = (
        None if first is None else select(workloads.c.created_at).where(workloads.c.key == first_key(number) + first)
    )
    oldest_at = None if oldest is None else connection.execute(oldest).scalar()
    return QueueState(max(0, _count_open(connection, number) - int(in_progress)), int(in_progress), oldest_at)


def _read_recent(connection: Connection, number: int, status: WorkloadStatus | None, limit: int) -> list[WorkloadView]:
    base = first_key(number)
    rows = connection.execute(select(leases.c.next, leases.c.last).where(leases.c.number == number))
    leased = {base + seq for row in rows for seq in range(row.next, row.last + 1)}
    value = func.substr(workloads.c.value, 1, _VALUE_BEGIN).label("value")
    columns = (workloads.c.key, workloads.c.id, workloads.c.created_at, workloads.c.status, workloads.c.ended_at, value)
    of_queue = workloads.c.key.between(base, first_key(number + 1) - 1)
    query = select(*columns).where(of_queue).order_by(workloads.c.key.desc()).limit(limit)
    if status is WorkloadStatus.IN_PROGRESS:
        query = query.where(workloads.c.key.in_(leased))
    elif status is WorkloadStatus.IN_QUEUE:
        query = query.where(workloads.c.status.is_(None), workloads.c.key.not_in(leased))
    elif status is not None:
        latest = select(workloads.c.key).where(of_queue).order_by(workloads.c.key.desc()).limit(_SEARCHED).subquery()
        oldest = select(func.min(latest.c.key)).scalar_subquery()
        query = query.where(workloads.c.status == status, workloads.c.key >= oldest)
    open_status = {True: WorkloadStatus.IN_PROGRESS, False: WorkloadStatus.IN_QUEUE}
    return [
        WorkloadView(
            uuid.UUID(bytes=row.id),
            row.key,
            WorkloadStatus(row.status) if row.status else open_status[row.key in leased],
            row.created_at,
            row.ended_at,
            row.value or b"",
        )
        for row in connection.execute(query)
    ]


def _remove_ended(connection: Connection, ended_before: float, size: int) -> bool:
    ended = select(workloads.c.key).where(workloads.c.ended_at < ended_before).order_by(workloads.c.ended_at)
    keys: Iterable[int] = connection.execute(ended.limit(min(size, 10_000))).scalars().all()
    if keys:
        connection.execute(delete(workloads).where(workloads.c.key.in_(keys)))
    return bool(keys)


def _stored_bytes(connection: Connection, number: int) -> int:
    """Return the size of a queue's workloads: bodies of the open ones, outcomes of the others, and their rows."""
    first, last = first_key(number), first_key(number + 1) - 1
    bodies = select(func.sum(func.length(batches.c.payload))).where(batches.c.key.between(first, last))
    outcomes = select(func.sum(func.length(workloads.c.value)), func.count()).where(
        workloads.c.key.between(first, last)
    )
    values, count = connection.execute(outcomes).one()
    return int(connection.execute(bodies).scalar() or 0) + int(values or 0) + int(count) * ENTRY_BYTES


def _remove_oldest_ended(connection: Connection, number: int, size_bytes: int) -> int:
    """Delete ended workloads of a queue until they had `size_bytes`, or `_GROUP` of them; return their size."""
    of_queue = workloads.c.key.between(first_key(number), first_key(number + 1) - 1)
    sizes = select(workloads.c.key, func.length(workloads.c.value)).where(of_queue, workloads.c.ended_at.is_not(None))
    freed, keys = 0, []
    for key, size in connection.execute(sizes.order_by(workloads.c.key).limit(_GROUP)):
        if freed >= size_bytes:
            break
        keys.append(key)
        freed += int(size or 0) + ENTRY_BYTES
    connection.execute(delete(workloads).where(workloads.c.key.in_(keys)))
    return freed


def _is_reusable(connection: Connection, number: int) -> bool:
    """Return True if numbers may start at 0 again: no workload is open, and the first numbers have no rows."""
    base = first_key(number)
    kept = select(workloads.c.key).where(workloads.c.key.between(base, base + _REUSE_FROM - 1)).limit(1)
    return not _count_open(connection, number) and connection.execute(kept).first() is None


def _with_exceptions_as_results(report: Report) -> Report:
    raised = tuple((failure.seq, _EXCEPTION_PREFIX + _encode(failure.error)) for failure in report.failures)
    return replace(report, failures=(), results=tuple(sorted((*report.results, *raised))))


def _outcome(value: bytes) -> tuple[WorkloadStatus, bytes]:
    if value.startswith(_EXCEPTION_PREFIX):
        return WorkloadStatus.FAILED, value[len(_EXCEPTION_PREFIX) :]
    return WorkloadStatus.COMPLETED, value


def _encode(error: str) -> bytes:
    return error.encode(errors="replace")
