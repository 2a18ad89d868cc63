"""The one door to the database of jobs: every method is an operation of the writer's thread, or of the reader's.

What a method that changes something has returned is on the disk. Decisions are in the modules below: `records` (rows of
jobs), `enqueuing` (batches on their way in), `queue`, `failing` and `releasing` (delivery), `sweeping` (removal).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any, TypeVar

from sqlalchemy import Connection, Engine

from cortex.errors import InputError, NotFoundError
from cortex.jobs import enqueuing, queue, records
from cortex.jobs import lease_expiry as releasing
from cortex.jobs import queries as looking
from cortex.jobs import schedule_state as ticks
from cortex.jobs.cleanup import Sweeper
from cortex.jobs.exchange import Leased
from cortex.jobs.intake.sources import source_to_json
from cortex.jobs.lease_expiry import Blame
from cortex.jobs.ledger import open_ledger
from cortex.jobs.queue import LEASE_S
from cortex.jobs.records import ApiJobs, Inputs, Presence
from cortex.jobs.resubmission import batches_again
from cortex.jobs.schedule_state import Ticks
from cortex.jobs.spec import DeadLetter, JobOrigin, JobRecord, NewBatch, Options, Report, Result, RetryOf, job_id_at
from cortex.jobs.workloads import Workloads
from cortex.jobs.writer import Writer
from cortex.lifecycle import JobStatus
from cortex.state.database import reading

_T = TypeVar("_T")
#: `list` is a method below.
_Ids = list[str]
#: Something done in the transaction that shows a job, with the job's id.
Also = Callable[[Connection, str], None]

#: Batches and bytes that are stored in one transaction while others wait.
_CHUNK_BATCHES, _CHUNK_BYTES = 1000, 2**20


class JobStore:
    """Jobs and their batches. All methods belong to one event loop; none of them blocks it."""

    def __init__(self, engine: Engine, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._writer = Writer(engine, "jobs-writer")
        self._reader = Writer(reading(engine), "jobs-reader")
        self._sweeper = Sweeper(self._writer)
        self._sweeping: set[asyncio.Task[None]] = set()
        self.workloads = Workloads(self._writer, self._reader, self._sweep_soon, clock)
        self._active: dict[str, Inputs] = {}  #: of the jobs that are not over; the reader's
        self._last_ns = 0
        self._looked_at = clock()

    async def startup(self) -> None:
        """Start; workers that could not reach the operator keep their leases."""
        self._writer.startup()
        self._reader.startup()
        self._looked_at = self._clock()
        await self._writer.run(enqueuing.drop_arriving)
        await self.workloads.startup()
        await self._writer.run(lambda connection: releasing.renew_all(connection, self._clock()))
        self._sweep_soon()

    async def shutdown(self) -> None:
        """Finish what was asked for, and stop."""
        for task in self._sweeping:
            task.cancel()
        await asyncio.gather(*self._sweeping, return_exceptions=True)
        await self._writer.shutdown()
        await self._reader.shutdown()

    # Submission.

    async def create(
        self,
        origin: JobOrigin,
        options: Options,
        source: dict[str, Any],
        batches: Iterable[NewBatch] | None,
        also: Also = lambda connection, job_id: None,
    ) -> JobRecord:
        """Store a job: pending with its batches, all or nothing; or, without, enqueuing, and they follow.

        `batches` is run through on another thread. `also` is done in the transaction that shows the job: both or none.
        Raises: InputError if there are no batches, and what `batches` and `also` raise.
        """
        job_id = self._new_id()
        insert = partial(records.insert_job, job_id=job_id, origin=origin, options=options, source=source)
        if batches is None:

            def show(connection: Connection) -> None:
                insert(connection, now=self._clock())
                also(connection, job_id)

            await self._writer.run(show)
        else:
            chunks = _chunks(iter(batches))
            first = await asyncio.to_thread(next, chunks, None)
            if first is None:
                raise InputError(enqueuing.NOTHING_FOUND)
            await self._arrive(job_id, insert, first, chunks, also)
        return await self._require(job_id)

    async def add_batches(self, job_id: str, batches: Sequence[NewBatch]) -> None:
        """Append batches to a job that is enqueuing. Raises: NotFoundError, ConflictError."""

        def work(connection: Connection) -> None:
            enqueuing.add(connection, enqueuing.enqueuing_ledger(connection, job_id).number, batches)

        await self._writer.run(work)

    async def reset_batches(self, job_id: str) -> None:
        """Drop the batches of a job that is enqueuing. Raises: NotFoundError, ConflictError."""
        while await self._writer.run(lambda connection: enqueuing.remove_last(connection, job_id, _CHUNK_BATCHES)):
            pass

    async def finish_enqueuing(self, job_id: str) -> JobRecord:
        """Open a job's batches to workers; without any it failed. Raises: NotFoundError, ConflictError."""
        await self._writer.run(lambda connection: enqueuing.finish(connection, job_id, self._clock()))
        return await self._require(job_id)

    async def retry(self, job_id: str, origin: JobOrigin, options: Options) -> JobRecord:
        """Store a new job of what one that is over left: its dead letters, or the call of a task that did not succeed.

        Raises: NotFoundError, ConflictError, InputError.
        """
        old, source = await self._require(job_id), source_to_json(RetryOf(job_id))
        if (again := batches_again(old, origin, options)) is not None:
            return await self.create(origin, options, source, again)
        new_id = self._new_id()
        number = await self._writer.run(
            lambda connection: records.insert_job(
                connection, new_id, origin, options, source, self._clock(), Presence.ARRIVING
            )
        )
        try:
            await self._copy_dead_letters(old, number)
            await self._writer.run(lambda connection: enqueuing.arrive(connection, number, new_id, self._clock()))
        except BaseException:
            await self._give_up(number)
            raise
        return await self._require(new_id)

    # A job's life.

    async def change(self, job_id: str, status: JobStatus, message: str = "", traceback: str = "") -> bool:
        """Change the status of a job; False if that is not allowed from where it is, or there is no such job."""

        def work(connection: Connection) -> bool:
            ledger, now = open_ledger(connection, job_id), self._clock()
            if ledger is None or not ledger.move(status, now, message, traceback):
                return False
            ledger.save(connection, now)
            return True

        return await self._writer.run(work)

    async def note(self, job_id: str, message: str) -> None:
        """Say what a pending job waits for."""
        await self._writer.run(lambda connection: records.set_message(connection, job_id, message))

    async def delete_job(self, job_id: str) -> list[str]:
        """Delete a job, at once out of sight; return the ids of the jobs deleted."""
        return await self._delete(lambda connection: [job_id])

    async def delete_api(self, api: str) -> list[str]:
        """Delete all jobs of an API; return their ids."""
        return await self._delete(lambda connection: records.ids_of_api(connection, api))

    async def clean(self, keep: int = 100) -> list[str]:
        """Drop the payloads of jobs that are over, and all but the newest `keep` of these jobs per API.

        Returns the ids of the jobs deleted, once everything is gone.
        """
        deleted = await self._hide(lambda connection: records.ids_beyond(connection, keep))
        await self._sweeper.remove(self.workloads.remove_ended)
        await self._sweeper.sweep()
        return deleted

    # Delivery.

    async def lease(
        self, job_id: str, worker: str, pid: int, reports: Sequence[Report], max_batches: int, max_bytes: int
    ) -> Leased:
        """Record reports, then lease up to `max_batches`, in one transaction; see `queue.exchange`."""
        if self.workloads.has(job_id):
            return await self.workloads.exchange(job_id, worker, pid, reports, max_batches, max_bytes)
        return await self._writer.run(
            lambda connection: queue.exchange(
                connection, job_id, worker, pid, reports, max_batches, max_bytes, self._clock()
            )
        )

    async def renew(self, worker: str, pid: int, tokens: Sequence[str], is_all: bool = False) -> tuple[str, ...]:
        """Keep leases from expiring; return the tokens that are lost.

        With `is_all` the process holds no other lease: those that it was given and that never arrived are ended.
        """

        def work(connection: Connection) -> tuple[str, ...]:
            if is_all:
                releasing.release_others(connection, worker, pid, tokens, self._clock())
            return releasing.renew(connection, worker, pid, tokens, self._clock())

        return await self._writer.run(work)

    async def release(
        self,
        worker: str,
        pid: int | None,
        cause: str | None = None,
        inside: tuple[str, int] | None = None,
    ) -> int:
        """End the leases of a worker, or of one of its processes; return how many there were.

        With a `cause` of death the batch that was `inside` (job, seq) counts a failed attempt; where that is not
        known, the first that is not resolved of the oldest lease.
        """
        blame = Blame(cause, *(inside or ())) if cause is not None else None
        return await self.workloads.settling(
            lambda connection: releasing.release(connection, worker, pid, blame, self._clock())
        )

    async def expire(self) -> int:
        """End the leases that were not renewed; to be called every few seconds. Returns how many there were.

        After a pause of its own (a machine that slept, a clock that was set) it gives all workers the time to renew.
        """
        now = self._clock()
        is_late = not 0 <= now - self._looked_at <= LEASE_S / 3
        self._looked_at = now
        if is_late:
            await self._writer.run(lambda connection: releasing.renew_all(connection, now))
            return 0
        return await self.workloads.settling(lambda connection: releasing.expire(connection, now))

    async def workers_with_leases(self) -> set[tuple[str, int]]:
        """Return each worker that has a lease, with the process that has it."""
        return await self._reader.run(releasing.holders)

    # Looking.

    async def get(self, job_id: str) -> JobRecord | None:
        """Return one job, or None."""
        return await self._reader.run(lambda connection: records.read_job(connection, job_id))

    async def list(self, api: str, limit: int = 10) -> list[JobRecord]:
        """Return the newest jobs of an API, the newest first."""
        return await self._reader.run(lambda connection: records.list_jobs(connection, api, limit))

    async def active(self) -> Sequence[JobRecord]:
        """Return all jobs that are not over, the oldest first."""
        return await self._reader.run(lambda connection: records.active_jobs(connection, self._active))

    async def summaries(self) -> dict[str, ApiJobs]:
        """Return the jobs of each API in short."""
        return await self._reader.run(records.summarize)

    async def counts_by_status(self) -> dict[str, dict[str, int]]:
        """Return how many jobs each API has, by the code of their status."""
        return await self._reader.run(records.count_by_status)

    async def dead_letters(self, job_id: str, after: int = -1, limit: int = 1000) -> Sequence[DeadLetter]:
        """Return dead letters by seq, those behind `after`; fewer than `limit` where they are large."""
        return await self._reader.run(lambda connection: looking.dead_letters_of(connection, job_id, after, limit))

    async def results(self, job_id: str, after: int = -1, limit: int = 1000) -> Sequence[Result]:
        """Return results by seq, those behind `after`; fewer than `limit` where they are large, none at the end."""
        return await self._reader.run(lambda connection: looking.results_of(connection, job_id, after, limit))

    # Schedules.

    async def ticks(self) -> dict[str, Ticks]:
        """Return how far the schedule of each API is."""
        return await self._reader.run(ticks.read_ticks)

    async def change_ticks(self, change: Callable[[Connection], _T]) -> _T:
        """Do one of the changes of `ticks`, and return what it does."""
        return await self._writer.run(change)

    # Small facts.

    async def assign(self, worker: str, job_id: str | None) -> None:
        """Remember for which job a worker works; None: for none."""
        await self._writer.run(lambda connection: records.put_assignment(connection, worker, job_id))

    async def assignments(self) -> dict[str, str]:
        """Return which worker works for which job."""
        return await self._reader.run(records.read_assignments)

    async def set_mark(self, job_id: str, name: str, value: str) -> None:
        """Store a small fact about a job; ignored where the job is gone."""
        await self._writer.run(lambda connection: records.put_mark(connection, job_id, name, value))

    async def marks(self, job_id: str) -> dict[str, str]:
        """Return the small facts about a job."""
        return await self._reader.run(lambda connection: records.read_marks(connection, job_id))

    async def jobs_marked(self, name: str, value: str) -> Sequence[str]:
        """Return the ids of the jobs whose mark `name` has that value."""
        return await self._reader.run(lambda connection: records.ids_marked(connection, name, value))

    async def _require(self, job_id: str) -> JobRecord:
        job = await self.get(job_id)
        if job is None:
            raise NotFoundError(f"unable to find BatchAPI job {job_id}")
        return job

    def _new_id(self) -> str:
        self._last_ns = max(self._last_ns + 1, int(self._clock() * 1e9))
        return job_id_at(self._last_ns)

    async def _arrive(
        self,
        job_id: str,
        insert: Callable[..., int],
        first: Sequence[NewBatch],
        chunks: Iterator[Sequence[NewBatch]],
        also: Also,
    ) -> None:
        """Store a job's batches; where they take several transactions, out of sight until the last."""
        following = await asyncio.to_thread(next, chunks, None)

        def show(connection: Connection, number: int) -> None:
            enqueuing.arrive(connection, number, job_id, self._clock())
            also(connection, job_id)

        def begin(connection: Connection) -> int:
            number = insert(connection, now=self._clock(), presence=Presence.ARRIVING)
            enqueuing.add(connection, number, first)
            if following is None:
                show(connection, number)
            return number

        number = await self._writer.run(begin)
        if following is None:
            return
        try:
            chunk: Sequence[NewBatch] | None = following
            while chunk is not None:
                await self._writer.run(partial(enqueuing.add, number=number, new=chunk))
                chunk = await asyncio.to_thread(next, chunks, None)
            await self._writer.run(partial(show, number=number))
        except BaseException:
            await self._give_up(number)
            raise

    async def _copy_dead_letters(self, old: JobRecord, number: int) -> None:
        after: int | None = -1

        def copy(connection: Connection, after: int) -> int | None:
            if open_ledger(connection, old.id) is None:
                raise NotFoundError(f"job {old.id} was deleted")
            return enqueuing.add_dead_letters(connection, number, old.number, after, _CHUNK_BATCHES // 4)

        while after is not None:
            after = await self._writer.run(partial(copy, after=after))

    async def _give_up(self, number: int) -> None:
        """Drop a job that nobody was told of."""
        await asyncio.shield(self._writer.run(lambda connection: enqueuing.give_up(connection, number)))
        self._sweep_soon()

    async def _hide(self, choose: Callable[[Connection], Sequence[str]]) -> _Ids:
        return await self._writer.run(lambda connection: records.hide(connection, choose(connection)))

    async def _delete(self, choose: Callable[[Connection], Sequence[str]]) -> _Ids:
        deleted = await self._hide(choose)
        if deleted:
            self._sweep_soon()
        return deleted

    def _sweep_soon(self) -> None:
        task = asyncio.get_running_loop().create_task(self._sweeper.sweep(with_payloads=False))
        self._sweeping.add(task)
        task.add_done_callback(self._sweeping.discard)


def _chunks(batches: Iterator[NewBatch]) -> Iterator[list[NewBatch]]:
    """Cut batches into lists of what may be stored in one transaction."""
    while chunk := list(islice(batches, 1)):
        size = len(chunk[0].payload)
        for batch in islice(batches, _CHUNK_BATCHES - 1):
            chunk.append(batch)
            size += len(batch.payload)
            if size >= _CHUNK_BYTES:
                break
        yield chunk
