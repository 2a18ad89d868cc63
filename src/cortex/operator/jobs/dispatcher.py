"""Dispatcher: assignments, leases and reports of job workers, and the right to run `on_job_complete`.

The store decides which batches are leased. The dispatcher keeps only what lives as long as the operator: which worker
works for which job, and which workers wait. A worker's request for work is a long poll: it is answered as soon as there
is something to do, or after its timeout.

`on_job_complete` must run in one process only, no matter which operator is in charge. The right to run it is the last
lease of a job. Its holder and its outcome are stored before anyone is notified, so that the next operator neither gives
the right to a second process nor runs a finished hook again:

    run_hook        acquire                       hook_done
    ---------> open ----> held by (worker, pid) ------------> outcome stored ---> HookOutcome
                 ^                 |
                 |                 | process died, vanished, or sent no heartbeat for LEASE_S
                 +--- run_hook ----+-------------------------------------------> HookLost
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field

import orjson

from cortex.errors import ConflictError, NotFoundError
from cortex.jobs.batch_queue import LEASE_S
from cortex.jobs.lease_expiry import NO_RENEWAL
from cortex.jobs.records import WORKER, put_mark, read_marks
from cortex.jobs.spec import Assignment, ExchangeReply, RenewalReply, Report, StopSignal
from cortex.jobs.store import JobStore

#: Characters at the end of a worker's id that distinguish it from the other workers of its job.
_UNIQUE = 32
_HOLDER = "hook"
_OUTCOME = "hook_outcome"


@dataclass(frozen=True)
class HookOutcome:
    """Result of `on_job_complete`; both fields are empty if it succeeded."""

    error: str = ""
    traceback: str = ""


@dataclass(frozen=True)
class HookLost:
    """The process that ran `on_job_complete` died."""

    cause: str = ""  #: empty if unknown


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
    """Gives job workers their jobs and batches. All calls come from the operator's event loop.

    Calls `on_resolved` after the last open batch of a job was resolved.
    """

    def __init__(
        self, store: JobStore, on_resolved: Callable[[], None], clock: Callable[[], float] = time.time
    ) -> None:
        self._store = store
        self._on_resolved = on_resolved
        self._clock = clock
        self._sessions: dict[str, _WorkerSession] = {}
        self._hooks = CompletionHooks(store)
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

    async def run_hook(self, job_id: str) -> HookOutcome | HookLost:
        """Run `on_job_complete` in one worker of a job, and wait for its end."""
        return await self._hooks.run(job_id, self._may_be_alive, lambda: self.wake(job_id))

    def release_hooks(self, worker: str, pid: int | None, cause: str = "") -> None:
        """Release the hooks of a worker's process that died; `pid` None: of all its processes."""
        self._hooks.release(worker, pid, cause=cause)

    def expire(self) -> None:
        """Release the hooks of processes whose heartbeat is overdue."""
        self._hooks.expire()

    # Called by workers.

    async def join(self, worker: str, pid: int, wait_s: float) -> Assignment | StopSignal | None:
        """Return the job of a worker's new process, or None if there is none yet: the worker polls again."""
        session = self._require(worker)
        session.pid = pid
        self._hooks.release(worker, None, except_pid=pid)
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
                    self._on_resolved()
                if leased.is_done or any(report.failures for report in reports):
                    self.wake(job_id, except_for=worker)  # to retry a failed batch, or because the job is done
                has_left = not session.is_assigned_to(job_id)
                hook = await self._hooks.acquire(job_id, worker, pid) if leased.is_done and not has_left else None
                is_over = has_left or session.is_stopping or self._has_ended_polls or not max_batches
                if leased.lease or lost or reports or hook or is_over:
                    return ExchangeReply(leased.lease, lost, has_left, hook, session.is_stopping)
                wake_at = deadline
                if leased.opens_at is not None:
                    wake_at = min(deadline, time.monotonic() + max(leased.opens_at - self._clock(), 0.0))
                has_changed = await session.wait(wake_at)
                if self._has_ended_polls or (not has_changed and wake_at == deadline):
                    return ExchangeReply()

    async def renew(self, worker: str, pid: int, tokens: Sequence[str], is_all: bool = False) -> RenewalReply:
        """Renew leases. With `is_all`, end all other leases of the process."""
        session = self._require(worker, pid)
        hooks = self._hooks.renew(worker, pid, tokens)
        lost = await self._store.renew(worker, pid, tokens, is_all)
        if is_all:  # batches of ended leases are available to other workers
            self.wake(session.assignment.job_id if session.assignment else None)
        return RenewalReply(tuple(token for token in lost if token not in hooks), session.is_stopping)

    async def hook_done(
        self, worker: str, pid: int, job_id: str, token: str, error: str | None, traceback: str = ""
    ) -> None:
        """Store the outcome of `on_job_complete`. Raises: ConflictError if the worker no longer has the right."""
        session = self._require(worker, pid)
        await self._hooks.done(job_id, worker, pid, token, HookOutcome(error or "", traceback))
        session.assignment = None  # nothing is left to do in this job

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

    def _may_be_alive(self, worker: str, pid: int) -> bool:
        session = self._sessions.get(worker)
        return session is not None and session.pid in (None, pid)

    def _require(self, worker: str, pid: int | None = None) -> _WorkerSession:
        session = self._sessions.get(worker)
        if session is None:
            raise NotFoundError(f"{worker} is not a worker of this operator")
        if pid is not None and session.pid is None:
            session.pid = pid  # it joined a previous operator
            self._hooks.release(worker, None, except_pid=pid)
        if pid is not None and session.pid != pid:
            raise ConflictError(f"{worker} has a newer process than {pid}")
        return session


@dataclass(frozen=True)
class _HookHolder:
    """Process that holds the last lease of a job, and its token."""

    token: str
    worker: str
    pid: int


@dataclass
class _Hook:
    """Last lease of a job, while its outcome is awaited."""

    outcome: asyncio.Future[HookOutcome | HookLost]
    token: str = field(default_factory=lambda: secrets.token_hex(8))
    holder: _HookHolder | None = None
    renewed_at: float = 0.0  #: time of the holder's last heartbeat
    is_open: bool = False  #: the stored holder has been read, so the right may be given


class CompletionHooks:
    """The right to run `on_job_complete`, for each job."""

    def __init__(self, store: JobStore, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._clock = clock
        self._hooks: dict[str, _Hook] = {}

    async def run(
        self, job_id: str, may_be_alive: Callable[[str, int], bool], on_open: Callable[[], None]
    ) -> HookOutcome | HookLost:
        """Wait until a job's `on_job_complete` has ended, or the process that runs it.

        `may_be_alive(worker, pid)` returns whether a stored holder may still run it. `on_open` is called once the right
        is available.
        """
        # Before the query, so that `done` finds it, if a hook that a previous operator started ends meanwhile.
        hook = self._hooks[job_id] = _Hook(asyncio.get_running_loop().create_future())
        try:
            marks = await self._store.read(read_marks, job_id)
            if text := marks.get(_OUTCOME):
                return HookOutcome(**orjson.loads(text))
            if (holder := _holder_of(marks)) and may_be_alive(holder.worker, holder.pid):
                hook.holder, hook.token, hook.renewed_at = holder, holder.token, self._clock()
            hook.is_open = True
            on_open()
            outcome = await hook.outcome
            if isinstance(outcome, HookLost):
                await self._store.write(put_mark, job_id, _HOLDER, "")
            return outcome
        finally:
            self._hooks.pop(job_id, None)

    async def acquire(self, job_id: str, worker: str, pid: int) -> str | None:
        """Return the token of a job's last lease if it is available or already belongs to this process."""
        hook = self._hooks.get(job_id)
        if hook is None or not hook.is_open or hook.outcome.done():
            return None
        holder = _HookHolder(hook.token, worker, pid)
        if hook.holder not in (None, holder):
            return None
        hook.holder, hook.renewed_at = holder, self._clock()
        await self._store.write(put_mark, job_id, _HOLDER, orjson.dumps(asdict(holder)).decode())
        return hook.token

    async def done(self, job_id: str, worker: str, pid: int, token: str, outcome: HookOutcome) -> None:
        """Store the outcome. Raises: ConflictError if this process does not hold the right."""
        if _holder_of(await self._store.read(read_marks, job_id)) != _HookHolder(token, worker, pid):
            raise ConflictError("this worker's right to complete the job was lost")
        await self._store.write(put_mark, job_id, _OUTCOME, orjson.dumps(asdict(outcome)).decode())
        hook = self._hooks.get(job_id)  # None if this operator has just started; `run` finds the stored outcome
        if hook is not None and not hook.outcome.done():
            hook.outcome.set_result(outcome)

    def renew(self, worker: str, pid: int, tokens: Collection[str]) -> set[str]:
        """Record a heartbeat of a process; return the tokens that are last leases which it holds."""
        held = [hook for hook in self._hooks.values() if hook.holder in [_HookHolder(t, worker, pid) for t in tokens]]
        for hook in held:
            hook.renewed_at = self._clock()
        return {hook.token for hook in held}

    def expire(self) -> None:
        """Release hooks whose holder sent no heartbeat for `LEASE_S`, as if the process had died."""
        for hook in self._hooks.values():
            is_overdue = self._clock() - hook.renewed_at > LEASE_S
            if hook.holder is not None and is_overdue and not hook.outcome.done():
                hook.outcome.set_result(HookLost(NO_RENEWAL))

    def release(self, worker: str, pid: int | None, except_pid: int | None = None, cause: str = "") -> None:
        """Release the hooks of a worker's process that died; `pid` None: of all but `except_pid`."""
        for hook in self._hooks.values():
            holder = hook.holder
            if holder is None or holder.worker != worker or holder.pid == except_pid or hook.outcome.done():
                continue
            if pid in (None, holder.pid):
                hook.outcome.set_result(HookLost(cause))


def _holder_of(marks: dict[str, str]) -> _HookHolder | None:
    text = marks.get(_HOLDER)
    return _HookHolder(**orjson.loads(text)) if text else None
