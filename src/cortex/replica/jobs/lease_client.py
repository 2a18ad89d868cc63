"""The link of a worker to the operator: a thread that fetches leases, reports and renews while the main thread works.

An operator that is away stops nobody: what is leased is worked through, and reported once it is back.
"""

from __future__ import annotations

import os
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from cortex.jobs.http import wire
from cortex.jobs.spec import Assignment, ExchangeReply, StopSignal
from cortex.replica.jobs.lease_sizer import Pace
from cortex.replica.jobs.operator_client import AwayError, OperatorLine, RefusedError
from cortex.replica.jobs.shared_state import JobCells
from cortex.replica.jobs.unacknowledged_reports import Done, Outbox, Outgoing, Work
from cortex.replica.request_log import write_log
from cortex.replica.spec import ReplicaSpec

#: While more than this is not reported, the main thread waits.
MAX_WAITING_BYTES = 16 * 1024 * 1024
_LEASE_BYTES = 1024 * 1024
#: How long the operator may keep a request that has nothing to say yet, and any other.
_WAIT_S = 20.0
_ANSWER_S = 10.0
#: What is answered with nothing is not asked again sooner.
_PAUSE_S = 0.2
_FIRST_BACK_OFF_S, _MAX_BACK_OFF_S = 0.02, 1.0
_RENEWALS_PER_LEASE = 3
#: How long a process that ends tries to report.
_LAST_REPORT_S = 1.0
_UNKNOWN = (401, 403, 404)


@dataclass(frozen=True)
class Hook:
    """`on_job_complete` is to be called."""

    token: str


class JobLink:
    """Between the main thread, which runs the user's code, and the operator.

    `stop` may be called from any thread, everything else that is public from the main one.
    """

    def __init__(self, spec: ReplicaSpec, cells: JobCells, clock: Callable[[], float] = time.monotonic) -> None:
        self.has_been_dismissed = False  #: by the operator: no other process is wanted here
        self._line = OperatorLine(spec)
        self._cells = cells
        self._clock = clock
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._run, name="cortex-jobs", daemon=True)
        self._turn = threading.Condition()
        self._is_ending = False
        self._main_is_done = False
        self._is_idle = False  #: the main thread waits for something to do
        self._job: Assignment | None = None
        self._is_given = True  #: the main thread has taken the job
        self._back_off_s = _FIRST_BACK_OFF_S
        self._enter_job()

    def _enter_job(self) -> None:
        self._is_open = False  # the user's object is there
        self._is_over = False
        self._pace = Pace()
        self._queue: deque[Work] = deque()
        self._held: dict[str, Work | Hook] = {}
        self._current: Work | None = None
        self._asked_in_vain = False
        self._may_ask_at = 0.0
        self._renew_at = 0.0
        self._hook: Hook | None = None
        self._hook_done: wire.HookReport | None = None
        self._outbox = Outbox()
        self._must_renew = False  # a lease may have been given that never arrived: what is held says which

    # The main thread's side.

    def start(self) -> None:
        """Begin to ask for a job."""
        self._thread.start()

    @property
    def is_ending(self) -> bool:
        """Tell whether the batch inside is the last one."""
        return self._is_ending

    def next_job(self) -> Assignment | None:
        """Wait for a job; None once this process is to end."""
        with self._turn:
            self._is_idle = True
            self._turn.notify_all()
            while self._is_given and not self._is_ending:
                self._turn.wait()
            self._is_idle = False
            self._is_given = True
            return None if self._is_ending else self._job

    def open(self) -> None:
        """Say that the user's object is there: batches may come."""
        with self._turn:
            self._is_open = True
            self._is_idle = True
            self._turn.notify_all()

    def next_task(self) -> Work | Hook | None:
        """Wait for something to do; None once there is nothing more in this job."""
        with self._turn:
            self._is_idle = True
            self._turn.notify_all()
            while not self._is_ending:
                if self._queue:
                    self._current = self._queue.popleft()
                    self._is_idle = self._asked_in_vain = False
                    return self._current
                if self._hook is not None and self._hook_done is None:
                    self._is_idle = False
                    return self._hook
                if self._is_over:
                    break
                self._turn.wait()
            return None

    def done(self, done: Done) -> None:
        """Take what became of a batch; waits while very much has not been reported."""
        if not self._outbox.put(done):
            return
        with self._turn:
            if self._outbox.note(done, self._clock()):
                self._turn.notify_all()
            while self._outbox.waiting_bytes > MAX_WAITING_BYTES and not self._is_ending:
                self._turn.wait()

    def work_done(self, batches: int, seconds: float) -> None:
        """Learn how long the main thread was busy with a lease."""
        with self._turn:
            self._pace.record(batches, seconds)

    def hook_done(self, hook: Hook, error: str | None, traceback: str) -> None:
        """Take what became of `on_job_complete`."""
        assert self._job is not None
        with self._turn:
            self._hook_done = wire.HookReport(self._pid, self._job.job_id, hook.token, error, traceback)
            self._turn.notify_all()

    def stop(self) -> None:
        """Have `next_…` return None and the process end after the batch inside."""
        with self._turn:
            self._is_ending = True
            self._turn.notify_all()
        self._line.interrupt()

    def finish(self) -> None:
        """Report what is left, within a second if that is possible."""
        self.stop()
        with self._turn:
            self._main_is_done = True
            self._turn.notify_all()
        self._thread.join(2 * _LAST_REPORT_S)

    # The thread.

    def _run(self) -> None:
        try:
            while not self._is_ending:
                self._join()
                self._work()
            self._wind_up()
        except RefusedError as error:
            self.has_been_dismissed = error.status in _UNKNOWN
            if error.status not in (*_UNKNOWN, 409):
                self._die(f"the operator does not take what this worker says: {error}")
            self.stop()
        except BaseException:  # the edge of the thread: without it the process would do nothing for ever
            self._die(traceback.format_exc())

    def _die(self, text: str) -> None:
        write_log(f"{text}\n")
        os._exit(1)

    def _join(self) -> None:
        while not self._is_ending:
            asked_at = self._clock()
            try:
                answer = wire.parse_joined(self._line.post("join", wire.write_join(self._pid), *_patience(_WAIT_S)))
            except (AwayError, wire.WorkerMessageError):
                self._back_off()
                continue
            self._back_off_s = _FIRST_BACK_OFF_S
            if isinstance(answer, StopSignal):
                self._dismiss()
            elif answer is None:
                self._pause(asked_at + _PAUSE_S - self._clock())
            else:
                with self._turn:
                    self._enter_job()
                    self._cells.enter_job(answer.job_id, answer.lease_s)
                    self._job, self._is_given = answer, False
                    self._turn.notify_all()
                return

    def _work(self) -> None:
        """Serve the main thread until the job is over for this worker, or the process ends."""
        while (step := self._next_step()) is not None:
            step()

    def _next_step(self) -> Callable[[], None] | None:
        """Wait until there is something to say; None if that will never be."""
        with self._turn:
            while not self._main_is_done:
                now = self._clock()
                if self._must_renew or (self._held and now >= self._renew_at):
                    return self._renew
                if self._outbox.unanswered:
                    return self._exchange
                if self._hook_done is not None:
                    return self._tell_hook
                due_at = self._outbox.due_at
                if self._wants_lease(now) or (due_at is not None and (self._is_idle or now >= due_at)):
                    return self._exchange
                is_finished = self._is_idle and not self._queue and self._outbox.is_empty
                if is_finished and (self._is_ending or self._is_over) and self._is_given:
                    return None
                times = [self._renew_at] if self._held else []
                times += [] if due_at is None else [due_at]
                times += [self._may_ask_at] if self._may_ask_at > now else []
                self._turn.wait(max(min(times) - now, 0.0) if times else None)
            return None

    def _wants_lease(self, now: float) -> bool:
        if not self._is_open or self._is_over or self._is_ending or self._queue or self._hook is not None:
            return False
        if self._is_idle:
            return now >= self._may_ask_at
        current = self._current
        return not self._asked_in_vain and current is not None and self._pace.is_quick(len(current.lease.batches))

    def _exchange(self) -> None:
        """Report what is done; ask for more where that is wanted."""
        assert self._job is not None
        now = self._clock()
        with self._turn:
            wants = not self._outbox.unanswered and self._wants_lease(now)
            outgoing = self._outbox.collect()
            # Nobody waits for more while there is more to report than one body holds.
            wait_s = _WAIT_S if wants and self._is_idle and self._outbox.due_at is None else 0.0
            batches = self._pace.batches if wants else 0
        reports = tuple(item.report() for item in outgoing)
        asked = wire.ExchangeRequest(self._pid, self._job.job_id, reports, batches, _LEASE_BYTES, wait_s)
        try:
            answer = wire.parse_exchanged(self._line.post("exchange", wire.write_exchange(asked), *_patience(wait_s)))
        except (AwayError, wire.WorkerMessageError) as error:
            may_have_arrived = not isinstance(error, AwayError) or error.may_have_arrived
            with self._turn:
                self._outbox.failed(outgoing, may_have_arrived)
                self._must_renew = self._must_renew or (wants and may_have_arrived)
            self._back_off()
            return
        self._back_off_s = _FIRST_BACK_OFF_S
        with self._turn:
            self._outbox.answered(outgoing)
            self._settle(outgoing, answer)
            # An answer to reports is not waited for; a request without any that comes back empty early is odd.
            self._take(answer, 0.0 if outgoing else wait_s, now)
            self._turn.notify_all()
        if answer.stop:
            self._dismiss()

    def _settle(self, outgoing: list[Outgoing], answer: ExchangeReply) -> None:
        """Let go of the leases that are reported to their end, or lost."""
        kept = set()
        for item in outgoing:
            if item.is_whole:
                self._held.pop(item.work.lease.token, None)
            elif item.may_have_arrived:
                kept.add(item.work.lease.token)  # "lost" may mean that it was taken before: the next report will show
        self._lose(token for token in answer.lost if token not in kept)

    def _lose(self, tokens: Iterable[str]) -> None:
        for token in tokens:
            work = self._held.pop(token, None)
            if isinstance(work, Work):
                work.is_lost = True
        self._cells.hold(self._held)

    def _take(self, answer: ExchangeReply, waited_s: float, asked_at: float) -> None:
        now = self._clock()
        if answer.lease is not None and answer.lease.batches:
            self._hold(answer.lease.token, work := Work(answer.lease), now)
            self._queue.append(work)
        else:
            self._asked_in_vain = True
            self._may_ask_at = asked_at + _PAUSE_S if waited_s else 0.0
        if answer.hook is not None:
            self._hook = Hook(answer.hook)
            self._hold(answer.hook, self._hook, now)
        self._is_over = self._is_over or (answer.is_done and answer.hook is None)

    def _hold(self, token: str, what: Work | Hook, now: float) -> None:
        assert self._job is not None
        if not self._held:
            self._renew_at = now + self._job.lease_s / _RENEWALS_PER_LEASE
            self._cells.tend(time.monotonic_ns())
        self._held[token] = what
        self._cells.hold(self._held)

    def _renew(self) -> None:
        assert self._job is not None
        with self._turn:
            tokens = tuple(self._held)
        try:
            body = wire.write_renew(wire.RenewalRequest(self._pid, tokens, is_all=True))
            answer = wire.parse_renewed(self._line.post("renew", body, _ANSWER_S))
        except (AwayError, wire.WorkerMessageError):
            self._renew_at = self._clock() + _MAX_BACK_OFF_S
            self._back_off()
            return
        self._must_renew = False
        self._back_off_s = _FIRST_BACK_OFF_S
        self._renew_at = self._clock() + self._job.lease_s / _RENEWALS_PER_LEASE
        self._cells.tend(time.monotonic_ns())
        with self._turn:
            self._lose(answer.lost)
        if answer.stop:
            self._dismiss()

    def _tell_hook(self) -> None:
        assert self._hook_done is not None
        try:
            self._line.post("hook", wire.write_hook(self._hook_done), _ANSWER_S)
        except AwayError:
            self._back_off()
            return
        except RefusedError as error:
            write_log(f"the end of on_job_complete is not wanted any more: {error}\n")
        with self._turn:
            self._held.pop(self._hook_done.token, None)
            self._cells.hold(self._held)
            self._hook = self._hook_done = None
            self._is_over = True
            self._turn.notify_all()

    def _wind_up(self) -> None:
        """Report what the last batch became; what can't be told now is done again by another worker."""
        with self._turn:
            while not self._main_is_done:
                self._turn.wait()
        give_up_at = self._clock() + _LAST_REPORT_S
        while (self._hook_done or not self._outbox.is_empty) and self._clock() < give_up_at:
            (self._tell_hook if self._hook_done is not None else self._exchange)()
        self._line.close()

    def _dismiss(self) -> None:
        self.has_been_dismissed = True
        self.stop()

    def _back_off(self) -> None:
        self._pause(self._back_off_s)
        self._back_off_s = min(2 * self._back_off_s, _MAX_BACK_OFF_S)

    def _pause(self, seconds: float) -> None:
        """Wait; the main thread may come and go meanwhile, only an end cuts it short."""
        until = self._clock() + seconds
        with self._turn:
            while (left := until - self._clock()) > 0 and not self._is_ending:
                self._turn.wait(left)


def _patience(wait_s: float) -> tuple[float, bool]:
    """Return how long to wait for an answer, and whether that may be interrupted."""
    return wait_s + _ANSWER_S, wait_s > 0
