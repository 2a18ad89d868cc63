"""Dispatcher: assignments, leases and reports of job workers.

The store decides which batches are leased. The dispatcher keeps only what lives as long as the operator: which worker
works for which job, and which workers wait. A worker's request for work is a long poll: it is answered as soon as there
is something to do, or after its timeout.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from cortex.errors import ConflictError, NotFoundError
from cortex.jobs.records import WORKER, put_mark
from cortex.jobs.spec import HOOK_SEQ, Assignment, ExchangeReply, RenewalReply, Report, StopSignal
from cortex.jobs.store import JobStore

#: Characters at the end of a worker's id that distinguish it from the other workers of its job.
_UNIQUE = 32


@dataclass
class _WorkerSession:
    """Assignment and long poll of one worker."""

    assignment: Assignment | None = None
    pid: int | None = None
    is_stopping: bool = False
    is_polling: bool = False  #: for more work
    constructed_for: str = ""  #: the last job whose class its process has constructed
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def is_assigned_to(self, job_id: str) -> bool:
        """Return whether the worker works for a job."""
        return self.assignment is not None and self.assignment.job_id == job_id

    async def wait(self, deadline: float) -> bool:
        """Wait for a change; return False after the deadline."""
        try:
            async with asyncio.timeout(max(deadline - time.monotonic(), 0.0)):
                await self.changed.wait()
        except TimeoutError:
            return False
        self.changed.clear()
        return True


class Dispatcher:
    """Gives job workers their jobs and batches. All calls come from the operator's event loop."""

    def __init__(self, store: JobStore, awake: asyncio.Event, clock: Callable[[], float] = time.time) -> None:
        self.awake = awake  #: requests a pass of the reconciler: set after the last batch of a job was resolved
        self._store = store
        self._clock = clock
        self._sessions: dict[str, _WorkerSession] = {}
        self._has_ended_polls = False

    # Called by the job reconciler.

    def assign(self, worker: str, assignment: Assignment | None) -> None:
        """Assign a worker to a job, or to none."""
        session = self._sessions.setdefault(worker, _WorkerSession())
        session.assignment = assignment
        session.changed.set()

    def stop(self, worker: str) -> None:
        """Stop a worker after its current batch; it gets no other."""
        if session := self._sessions.get(worker):
            session.is_stopping = True
            session.changed.set()

    def forget(self, worker: str) -> None:
        """Remove a worker that has ended."""
        if session := self._sessions.pop(worker, None):
            session.is_stopping = True
            session.changed.set()

    def wake(self, job_id: str | None = None, except_for: str = "") -> None:
        """Make the workers of one job, or of all jobs, query the store again."""
        for name, session in self._sessions.items():
            if name != except_for and (job_id is None or session.is_assigned_to(job_id)):
                session.changed.set()

    def offer(self, job_id: str, count: int) -> None:
        """Wake up to `count` polling workers of a job, one for each new batch."""
        for session in self._sessions.values():
            if count <= 0:
                return
            if session.is_polling and not session.changed.is_set() and session.is_assigned_to(job_id):
                session.changed.set()
                count -= 1

    def end_polls(self) -> None:
        """Answer all requests that wait for work, and later ones at once: the operator is stopping."""
        self._has_ended_polls = True
        self.wake()

    def is_polling(self, worker: str) -> bool:
        """Return whether a worker waits for a batch of its job."""
        session = self._sessions.get(worker)
        return session is not None and session.is_polling

    # Called by workers.

    async def join(self, worker: str, pid: int, wait_s: float) -> Assignment | StopSignal | None:
        """Return the job of a worker's new process, or None if there is none yet: the worker polls again."""
        session = self._require(worker)
        session.pid = pid
        deadline = time.monotonic() + wait_s
        while session.assignment is None and not session.is_stopping:
            if self._has_ended_polls or not await session.wait(deadline):
                return None
        return StopSignal() if session.is_stopping else session.assignment

    async def exchange(
        self,
        worker: str,
        pid: int,
        job_id: str,
        reports: Sequence[Report],
        max_batches: int,
        max_bytes: int,
        wait_s: float,
    ) -> ExchangeReply:
        """Record a worker's reports and lease it more batches. Without reports, wait until there is something to do.

        A worker calls this after it has constructed the user's class for the job.
        """
        session = self._require(worker, pid)
        deadline = time.monotonic() + wait_s
        if session.constructed_for != job_id:
            session.constructed_for = job_id
            await self._store.write(put_mark, job_id, f"{WORKER}{worker[-_UNIQUE:]}", "")
        lost: tuple[str, ...] = ()
        with self._polling(session, job_id, max_batches > 0):
            while True:
                session.changed.clear()  # before the query, so that no change is missed
                may_lease = not session.is_stopping and session.is_assigned_to(job_id)
                wanted = max_batches if may_lease else 0
                leased = await self._store.lease(job_id, worker, pid, reports, wanted, max_bytes)
                lost += leased.lost
                if reports and leased.is_done:
                    self.awake.set()
                if any(report.failures for report in reports):
                    self.wake(job_id, except_for=worker)  # to retry a failed batch
                if not lost and any(report.upto == HOOK_SEQ for report in reports) and session.is_assigned_to(job_id):
                    session.assignment = None  # nothing is left to do in this job
                has_left = not session.is_assigned_to(job_id)
                is_over = has_left or session.is_stopping or self._has_ended_polls or not max_batches
                if leased.lease or lost or reports or is_over:
                    return ExchangeReply(leased.lease, lost, has_left, session.is_stopping)
                wake_at = deadline
                if leased.opens_at is not None:
                    wake_at = min(deadline, time.monotonic() + max(leased.opens_at - self._clock(), 0.0))
                has_changed = await session.wait(wake_at)
                if self._has_ended_polls or (not has_changed and wake_at == deadline):
                    return ExchangeReply()

    async def renew(self, worker: str, pid: int, tokens: Sequence[str], is_all: bool = False) -> RenewalReply:
        """Renew leases. With `is_all`, end all other leases of the process."""
        session = self._require(worker, pid)
        lost = await self._store.renew(worker, pid, tokens, is_all)
        if is_all:  # batches of ended leases are available to other workers
            self.wake(session.assignment.job_id if session.assignment else None)
        return RenewalReply(lost, session.is_stopping)

    @contextmanager
    def _polling(self, session: _WorkerSession, job_id: str, is_polling: bool) -> Iterator[None]:
        """Mark a session as polling. A wake-up that it did not consume is offered to another worker at the end."""
        session.is_polling = is_polling
        try:
            yield
        except BaseException:  # the request was cancelled, perhaps after a wake-up
            session.changed.set()
            raise
        finally:
            session.is_polling = False
            if session.changed.is_set():
                self.offer(job_id, 1)

    def _require(self, worker: str, pid: int | None = None) -> _WorkerSession:
        session = self._sessions.get(worker)
        if session is None:
            raise NotFoundError(f"{worker} is not a worker of this operator")
        if pid is not None and session.pid is None:
            session.pid = pid  # it joined a previous operator
        if pid is not None and session.pid != pid:
            raise ConflictError(f"{worker} has a newer process than {pid}")
        return session
