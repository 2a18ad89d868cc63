"""Gives workers their jobs and batches: who works for which job, who waits, who calls `on_job_complete`.

The store decides what is leased; here is only what lives as long as the operator does. A worker that asks while there
is nothing to do is answered when there is, or after a while.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from cortex.errors import ConflictError, NotFoundError
from cortex.jobs.exchange import Exchanged, Renewed, Stop
from cortex.jobs.spec import Assignment, Report
from cortex.jobs.store import JobStore
from cortex.operator.jobs.hooks import HookLost, HookOutcome, Hooks


@dataclass
class _Worker:
    """A worker as it is known here."""

    assignment: Assignment | None = None
    pid: int | None = None
    is_stopping: bool = False
    is_asking: bool = False  #: for more to do
    changed: asyncio.Event = field(default_factory=asyncio.Event)


class Dispatcher:
    """Answers the workers; all calls come from the operator's event loop.

    `on_resolved` is called when a job's last open batch was resolved.
    """

    def __init__(
        self, store: JobStore, on_resolved: Callable[[], None], clock: Callable[[], float] = time.time
    ) -> None:
        self._store = store
        self._on_resolved = on_resolved
        self._clock = clock
        self._workers: dict[str, _Worker] = {}
        self._hooks = Hooks(store)

    # What the supervisor of jobs says.

    def assign(self, worker: str, assignment: Assignment | None) -> None:
        """Give a worker to a job, or to none."""
        entry = self._workers.setdefault(worker, _Worker())
        entry.assignment = assignment
        self._wake(entry)

    def stop(self, worker: str) -> None:
        """Tell a worker to end after the batch inside it; it gets no other."""
        if entry := self._workers.get(worker):
            entry.is_stopping = True
            self._wake(entry)

    def forget(self, worker: str) -> None:
        """Drop a worker that is gone."""
        if entry := self._workers.pop(worker, None):
            entry.is_stopping = True
            self._wake(entry)

    def wake(self, job_id: str | None = None) -> None:
        """Have the workers of a job, or all, ask the store again."""
        for entry in self._workers.values():
            if job_id is None or (entry.assignment and entry.assignment.job_id == job_id):
                self._wake(entry)

    def offer(self, job_id: str, count: int) -> None:
        """Have as many workers of a job as may get something new ask the store, and no others."""
        for entry in self._workers.values():
            if count <= 0:
                return
            if entry.is_asking and not entry.changed.is_set() and self._is_on(entry, job_id):
                self._wake(entry)
                count -= 1

    async def run_hook(self, job_id: str) -> HookOutcome | HookLost:
        """Have one worker of a job call `on_job_complete`, and wait for its end."""
        return await self._hooks.run(job_id, self._may_be_there, lambda: self.wake(job_id))

    def lose(self, worker: str, pid: int | None, cause: str = "") -> None:
        """Learn that a worker's process died; None: every process of it."""
        self._hooks.lose(worker, pid, cause=cause)

    def expire(self) -> None:
        """Take the right to complete a job from processes that were not heard of."""
        self._hooks.expire()

    # What workers ask.

    async def join(self, worker: str, pid: int, wait_s: float) -> Assignment | Stop | None:
        """Return the job of a worker's new process; None: none yet, ask again."""
        entry = self._require(worker)
        entry.pid = pid
        self._hooks.lose(worker, None, except_pid=pid)
        deadline = time.monotonic() + wait_s
        while entry.assignment is None and not entry.is_stopping:
            if not await _wait(entry, deadline):
                return None
        return Stop() if entry.is_stopping else entry.assignment

    async def exchange(
        self,
        worker: str,
        pid: int,
        job_id: str,
        reports: Sequence[Report],
        max_batches: int,
        max_bytes: int,
        wait_s: float,
    ) -> Exchanged:
        """Record what a worker did, and lease it more; without reports, wait until there is something to do."""
        entry = self._require(worker, pid)
        deadline = time.monotonic() + wait_s
        lost: tuple[str, ...] = ()
        with self._asking(entry, job_id, max_batches > 0):
            while True:
                entry.changed.clear()  # before the store is asked: what changes meanwhile is seen
                may_lease = not entry.is_stopping and self._is_on(entry, job_id)
                wanted = max_batches if may_lease else 0
                leased = await self._store.lease(job_id, worker, pid, reports, wanted, max_bytes)
                lost += leased.lost
                if reports and leased.is_done:
                    self._on_resolved()
                if leased.is_done or any(report.failures for report in reports):
                    self._tell_others(job_id, worker)
                has_left = not self._is_on(entry, job_id)
                hook = await self._hooks.take(job_id, worker, pid) if leased.is_done and not has_left else None
                if leased.lease or lost or reports or hook or has_left or entry.is_stopping or not max_batches:
                    return Exchanged(leased.lease, lost, has_left, hook, entry.is_stopping)
                wake_at = deadline
                if leased.opens_at is not None:
                    wake_at = min(deadline, time.monotonic() + max(leased.opens_at - self._clock(), 0.0))
                if not await _wait(entry, wake_at) and wake_at == deadline:
                    return Exchanged()

    async def renew(self, worker: str, pid: int, tokens: Sequence[str], is_all: bool = False) -> Renewed:
        """Keep leases from expiring; `is_all`: the process holds no other."""
        entry = self._require(worker, pid)
        hooks = self._hooks.renew(worker, pid, tokens)
        lost = await self._store.renew(worker, pid, tokens, is_all)
        if is_all:
            self.wake(entry.assignment.job_id if entry.assignment else None)  # what was ended is for others
        return Renewed(tuple(token for token in lost if token not in hooks), entry.is_stopping)

    async def hook_done(
        self, worker: str, pid: int, job_id: str, token: str, error: str | None, traceback: str = ""
    ) -> None:
        """Take the outcome of `on_job_complete`. Raises: ConflictError if it is not this worker's any more."""
        entry = self._require(worker, pid)
        await self._hooks.done(job_id, worker, pid, token, HookOutcome(error or "", traceback))
        entry.assignment = None  # there is nothing more to do in this job

    @contextmanager
    def _asking(self, entry: _Worker, job_id: str, is_asking: bool) -> Iterator[None]:
        """Say that a worker asks for work; what it was woken for and did not take is offered to others at the end."""
        entry.is_asking = is_asking
        try:
            yield
        except BaseException:  # it may have been woken for something, and is gone
            entry.changed.set()
            raise
        finally:
            entry.is_asking = False
            if entry.changed.is_set():
                self.offer(job_id, 1)

    def _tell_others(self, job_id: str, worker: str) -> None:
        """Wake those that wait: a failed batch may be theirs to retry, or the job be done."""
        for name, entry in self._workers.items():
            if name != worker and entry.assignment and entry.assignment.job_id == job_id:
                self._wake(entry)

    def _may_be_there(self, worker: str, pid: int) -> bool:
        entry = self._workers.get(worker)
        return entry is not None and entry.pid in (None, pid)

    def _is_on(self, entry: _Worker, job_id: str) -> bool:
        return entry.assignment is not None and entry.assignment.job_id == job_id

    def _require(self, worker: str, pid: int | None = None) -> _Worker:
        entry = self._workers.get(worker)
        if entry is None:
            raise NotFoundError(f"{worker} is not a worker of this operator")
        if pid is not None and entry.pid is None:
            entry.pid = pid  # it joined an operator before this one
            self._hooks.lose(worker, None, except_pid=pid)
        if pid is not None and entry.pid != pid:
            raise ConflictError(f"{worker} has a newer process than {pid}")
        return entry

    @staticmethod
    def _wake(entry: _Worker) -> None:
        entry.changed.set()


async def _wait(entry: _Worker, deadline: float) -> bool:
    """Wait for a change; False once the deadline has passed."""
    try:
        async with asyncio.timeout(max(deadline - time.monotonic(), 0.0)):
            await entry.changed.wait()
    except TimeoutError:
        return False
    entry.changed.clear()
    return True
