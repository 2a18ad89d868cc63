"""Store of jobs: submission, life and delivery, on top of one writing and one reading thread.

All rows of a job are read and changed by functions that take a connection: `records` (rows of jobs),
`queries` (results, dead letters), `batch_queue` and `lease_expiry` (delivery of batches) and `schedule_state`. Callers
run a single one of them with `JobStore.read` and `JobStore.write`. The methods below are the operations that take more
than one transaction, the clock, or the queues of AsyncAPIs. A change is on the disk once it was awaited.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any, Concatenate, ParamSpec, TypeVar

from sqlalchemy import Connection, Engine

from cortex.errors import InputError, NotFoundError
from cortex.jobs import batch_queue, lease_expiry
from cortex.jobs.async_queue import AsyncQueues
from cortex.jobs.batch_queue import LEASE_S
from cortex.jobs.cleanup import JobCleaner
from cortex.jobs.lease_expiry import WorkerDeath
from cortex.jobs.records import (
    JobInputs,
    Presence,
    active_jobs,
    ids_beyond,
    ids_of_api,
    insert_job,
    mark_deleted,
    open_ledger,
    read_job,
    sizes_from_endpoint,
)
from cortex.jobs.retry_policy import batches_to_retry
from cortex.jobs.spec import (
    FROM_ENDPOINT,
    JobOptions,
    JobOrigin,
    JobRecord,
    LeaseReply,
    NewBatch,
    Report,
    RetryOf,
    job_id_at,
    source_to_json,
)
from cortex.jobs.storage_limit import StorageLimit
from cortex.jobs.writer import TransactionThread
from cortex.lifecycle import JobStatus
from cortex.state.database import reading

P = ParamSpec("P")
T = TypeVar("T")
#: Further changes in the transaction that makes a job visible; they get the job's id.
ExtraWrites = Callable[[Connection, str], None]

#: Batches and bytes that are stored in one transaction, while others wait.
_CHUNK_BATCHES, _CHUNK_BYTES = 1000, 2**20


class JobStore:
    """Jobs and their batches. All methods belong to one event loop; none of them blocks it."""

    def __init__(self, engine: Engine, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._writer = TransactionThread(engine, "jobs-writer")
        self._reader = TransactionThread(reading(engine), "jobs-reader")
        self._cleaner = JobCleaner(self._writer)
        self._cleaning: set[asyncio.Task[None]] = set()
        self.workloads = AsyncQueues(self._writer, self._reader, self._clean_soon, clock)
        #: Of jobs that came through the endpoint of their API.
        self.limit = StorageLimit(self._make_room, clock)
        self._removed: list[str] = []  #: jobs that made room, for `clean`
        self._active: dict[str, JobInputs] = {}  #: inputs of the jobs that are not over; used by the reading thread
        self._last_ns = 0
        self._last_expiry_at = clock()

    async def startup(self, on_workloads_added: Callable[[str, int], None] = lambda job_id, count: None) -> None:
        """Start. Workers that could not reach the operator keep their leases.

        `on_workloads_added(job_id, count)` is called when workloads were stored.
        """
        self._writer.startup()
        self._reader.startup()
        self._last_expiry_at = self._clock()
        await self.write(batch_queue.discard_unpublished)
        await self.workloads.startup(on_workloads_added)
        await self._writer.run(lambda connection: lease_expiry.renew_all(connection, self._clock()))
        self._clean_soon()

    async def shutdown(self) -> None:
        """Finish the operations that were requested, and stop."""
        for task in self._cleaning:
            task.cancel()
        await asyncio.gather(*self._cleaning, return_exceptions=True)
        await self._writer.shutdown()
        await self._reader.shutdown()

    async def read(self, query: Callable[Concatenate[Connection, P], T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Return `query(connection, …)`, run in a transaction that only reads."""
        return await self._reader.run(lambda connection: query(connection, *args, **kwargs))

    async def write(self, change: Callable[Concatenate[Connection, P], T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Return `change(connection, …)` once its transaction is committed."""
        return await self._writer.run(lambda connection: change(connection, *args, **kwargs))

    # Submission.

    async def create(
        self,
        origin: JobOrigin,
        options: JobOptions,
        source: dict[str, Any],
        batches: Iterable[NewBatch] | None,
        extra_writes: ExtraWrites = lambda connection, job_id: None,
    ) -> JobRecord:
        """Store a job and its batches, all or nothing. Without `batches` the job is enqueuing, and they follow.

        `batches` is iterated on another thread. `extra_writes` runs in the transaction that makes the job visible, so
        both or neither take effect.
        Raises: InputError if there are no batches, and the errors of `batches` and `extra_writes`.
        """
        job_id = self._new_id()
        insert = partial(insert_job, job_id=job_id, origin=origin, options=options, source=source)
        if batches is None:

            def publish(connection: Connection) -> None:
                insert(connection, now=self._clock())
                extra_writes(connection, job_id)

            await self._writer.run(publish)
        else:
            chunks = _chunks(iter(batches))
            first = await asyncio.to_thread(next, chunks, None)
            if first is None:
                raise InputError(batch_queue.NO_DATA_FOUND)
            await self._store_with_batches(job_id, insert, first, chunks, extra_writes)
        return await self._require(job_id)

    async def add_batches(self, job_id: str, batches: Sequence[NewBatch]) -> None:
        """Append batches to a job that is enqueuing. Raises: NotFoundError, ConflictError."""

        def add(connection: Connection) -> None:
            ledger = batch_queue.enqueuing_ledger(connection, job_id)
            batch_queue.add_batches(connection, ledger.number, batches)

        await self._writer.run(add)

    async def reset_batches(self, job_id: str) -> None:
        """Remove the batches of a job that is enqueuing. Raises: NotFoundError, ConflictError."""
        while await self.write(batch_queue.remove_last_batches, job_id, _CHUNK_BATCHES):
            pass

    async def finish_enqueuing(self, job_id: str) -> JobRecord:
        """Make a job's batches available to workers. Raises: NotFoundError, ConflictError.

        A job without batches becomes `enqueue_failed`.
        """
        await self._writer.run(lambda connection: batch_queue.finish_enqueuing(connection, job_id, self._clock()))
        return await self._require(job_id)

    async def retry(self, job_id: str, origin: JobOrigin, options: JobOptions, seq: int | None = None) -> JobRecord:
        """Store a new job with the dead letters of a job that is over, or with the call of a task that failed.

        `seq` selects one dead letter. Raises: NotFoundError, ConflictError, InputError.
        """
        old = await self._require(job_id)
        source = source_to_json(RetryOf(job_id, seq)) | {k: v for k, v in old.source.items() if k == FROM_ENDPOINT}
        if (again := batches_to_retry(old, origin, options)) is not None:
            return await self.create(origin, options, source, again)
        new_id = self._new_id()
        number = await self.write(insert_job, new_id, origin, options, source, self._clock(), Presence.STORING)
        try:
            await self._copy_dead_letters(old, number, seq)
            await self._writer.run(
                lambda connection: batch_queue.publish_job(connection, number, new_id, self._clock())
            )
        except BaseException:
            await self._discard(number)
            raise
        return await self._require(new_id)

    # Life of a job.

    async def get(self, job_id: str) -> JobRecord | None:
        """Return one job, or None."""
        return await self.read(read_job, job_id)

    async def active(self) -> Sequence[JobRecord]:
        """Return all jobs that are not over, the oldest first."""
        return await self.read(active_jobs, self._active)

    async def change(self, job_id: str, status: JobStatus, message: str = "", traceback: str = "") -> bool:
        """Change the status of a job; return False if the job is gone or `JOB_TRANSITIONS` does not allow it."""

        def change(connection: Connection) -> bool:
            ledger, now = open_ledger(connection, job_id), self._clock()
            if ledger is None or not ledger.move(status, now, message, traceback):
                return False
            ledger.save(connection, now)
            return True

        return await self._writer.run(change)

    async def delete_job(self, job_id: str) -> list[str]:
        """Delete a job, which disappears at once; return the ids of the deleted jobs."""
        return await self._delete(lambda connection: [job_id])

    async def delete_api(self, api: str) -> list[str]:
        """Delete all jobs of an API; return their ids."""
        return await self._delete(lambda connection: ids_of_api(connection, api))

    async def clean(self, keep: int = 100) -> list[str]:
        """Remove the payloads of jobs that are over, and all but the newest `keep` of these jobs per API.

        Return the ids of the jobs deleted since the last call once all their rows are removed.
        """
        deleted = await self._mark_deleted(lambda connection: ids_beyond(connection, keep))
        deleted, self._removed = deleted + self._removed, []
        await self._cleaner.remove(self.workloads.remove_ended)
        await self._cleaner.clean()
        return deleted

    # Delivery.

    async def lease(
        self, job_id: str, worker: str, pid: int, reports: Sequence[Report], max_batches: int, max_bytes: int
    ) -> LeaseReply:
        """Record reports, then lease up to `max_batches`, in one transaction; see `batch_queue.exchange`."""
        if self.workloads.has(job_id):
            return await self.workloads.exchange(job_id, worker, pid, reports, max_batches, max_bytes)
        return await self._writer.run(
            lambda connection: batch_queue.exchange(
                connection, job_id, worker, pid, reports, max_batches, max_bytes, self._clock()
            )
        )

    async def renew(self, worker: str, pid: int, tokens: Sequence[str], is_all: bool = False) -> tuple[str, ...]:
        """Renew leases; return the lost tokens.

        With `is_all` the process holds no other lease: leases whose reply never reached it end.
        """

        def renew(connection: Connection) -> tuple[str, ...]:
            if is_all:
                lease_expiry.release_others(connection, worker, pid, tokens, self._clock())
            return lease_expiry.renew(connection, worker, pid, tokens, self._clock())

        return await self._writer.run(renew)

    async def release(
        self,
        worker: str,
        pid: int | None,
        cause: str | None = None,
        inside: tuple[str, int] | None = None,
    ) -> int:
        """End the leases of a worker, or of one of its processes; return their number.

        With a `cause` of death, the batch that was running (`inside`: job id, seq) counts a failed attempt. Without
        `inside` this is the first unresolved batch of the oldest lease.
        """
        death = WorkerDeath(cause, *(inside or ())) if cause is not None else None
        return await self.workloads.run_and_settle(
            lambda connection: lease_expiry.release(connection, worker, pid, death, self._clock())
        )

    async def expire(self) -> int:
        """End the leases that were not renewed, and return their number; call this every few seconds.

        If the previous call was long ago (the machine slept, or its clock was set), all leases are renewed instead:
        workers could not reach the operator meanwhile.
        """
        now = self._clock()
        is_late = not 0 <= now - self._last_expiry_at <= LEASE_S / 3
        self._last_expiry_at = now
        if is_late:
            await self.write(lease_expiry.renew_all, now)
            return 0
        return await self.workloads.run_and_settle(lambda connection: lease_expiry.expire(connection, now))

    async def _make_room(self, api: str, max_bytes: int, kept_bytes: int) -> int:
        """Delete the oldest jobs that are over, of those from the endpoint; see `StorageLimit`."""
        stored = await self.read(sizes_from_endpoint, api)
        size = sum(job.size_bytes for job in stored)
        wanted = size if size <= max_bytes else kept_bytes
        ended: list[str] = []
        for job in stored:
            if size > wanted and job.is_over:
                ended.append(job.id)
                size -= job.size_bytes
        if ended:
            self._removed += await self._delete(lambda connection: ended)
        return size

    async def _require(self, job_id: str) -> JobRecord:
        job = await self.get(job_id)
        if job is None:
            raise NotFoundError(f"unable to find BatchAPI job {job_id}")
        return job

    def _new_id(self) -> str:
        self._last_ns = max(self._last_ns + 1, int(self._clock() * 1e9))
        return job_id_at(self._last_ns)

    async def _store_with_batches(
        self,
        job_id: str,
        insert: Callable[..., int],
        first: Sequence[NewBatch],
        chunks: Iterator[Sequence[NewBatch]],
        extra_writes: ExtraWrites,
    ) -> None:
        """Store a job's batches. If they take several transactions, the job is invisible until the last one."""
        following = await asyncio.to_thread(next, chunks, None)

        def publish(connection: Connection, number: int) -> None:
            batch_queue.publish_job(connection, number, job_id, self._clock())
            extra_writes(connection, job_id)

        def begin(connection: Connection) -> int:
            number = insert(connection, now=self._clock(), presence=Presence.STORING)
            batch_queue.add_batches(connection, number, first)
            if following is None:
                publish(connection, number)
            return number

        number = await self._writer.run(begin)
        if following is None:
            return
        try:
            chunk: Sequence[NewBatch] | None = following
            while chunk is not None:
                await self.write(batch_queue.add_batches, number, chunk)
                chunk = await asyncio.to_thread(next, chunks, None)
            await self.write(publish, number)
        except BaseException:
            await self._discard(number)
            raise

    async def _copy_dead_letters(self, old: JobRecord, number: int, seq: int | None) -> None:
        def copy(connection: Connection, after: int, limit: int = _CHUNK_BATCHES // 4) -> int | None:
            if open_ledger(connection, old.id) is None:
                raise NotFoundError(f"job {old.id} was deleted")
            return batch_queue.add_dead_letters(connection, number, old.number, after, limit)

        if seq is not None:
            if await self.write(copy, seq - 1, 1) != seq:
                raise NotFoundError(f"job {old.id} has no dead letter {seq}")
            return
        after: int | None = -1
        while after is not None:
            after = await self.write(copy, after)

    async def _discard(self, number: int) -> None:
        """Delete a job whose submission is not acknowledged."""
        await asyncio.shield(self.write(batch_queue.discard_unpublished, number))
        self._clean_soon()

    async def _delete(self, choose: Callable[[Connection], Sequence[str]]) -> list[str]:
        deleted = await self._mark_deleted(choose)
        if deleted:
            self._clean_soon()
        return deleted

    async def _mark_deleted(self, choose: Callable[[Connection], Sequence[str]]) -> list[str]:
        return await self._writer.run(lambda connection: mark_deleted(connection, choose(connection)))

    def _clean_soon(self) -> None:
        task = asyncio.get_running_loop().create_task(self._cleaner.clean(with_payloads=False))
        self._cleaning.add(task)
        task.add_done_callback(self._cleaning.discard)


def _chunks(batches: Iterator[NewBatch]) -> Iterator[list[NewBatch]]:
    """Yield the batches in lists that may be stored in one transaction each."""
    while chunk := list(islice(batches, 1)):
        size = len(chunk[0].payload)
        for batch in islice(batches, _CHUNK_BATCHES - 1):
            chunk.append(batch)
            size += len(batch.payload)
            if size >= _CHUNK_BYTES:
                break
        yield chunk
