"""A job worker's client of the operator: acquire, renew and report leases over HTTP on the operator's unix socket.

    join ──> job ──> exchange: reports ──>, <── lease ──> … ──> done
                     renew: all leases held, three times per lease duration

A thread makes the requests while the main thread runs user code. If the operator is down, the worker continues with its
leases and reports once the operator is back.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable
from http.client import HTTPException

from cortex.errors import WorkerMessageError
from cortex.jobs.http import wire
from cortex.jobs.spec import Assignment, ExchangeReply, RenewalReply, StopSignal
from cortex.processes.backoff import Backoff
from cortex.processes.http import UnixHttpConnection
from cortex.worker.jobs.client_states import ClientEvent, ClientState, state_after
from cortex.worker.jobs.shared_state import SharedJobState
from cortex.worker.jobs.unacknowledged_reports import ActiveLease, BatchOutcome, ReportQueue
from cortex.worker.monitoring.request_log import write_log
from cortex.worker.spec import ReplicaSpec

MAX_BATCHES = 512
_LEASE_WORK_S = 0.25
#: Maximum growth from one lease to the next, because the first batches may not be representative.
_GROWTH = 16
_WEIGHT = 0.5
#: The main thread waits while more than this has not been acknowledged.
MAX_WAITING_BYTES = 16 * 1024 * 1024
_LEASE_BYTES = 1024 * 1024
#: Maximum duration of a long poll, and of any other request.
_WAIT_S = 20.0
_ANSWER_S = 10.0
#: Minimum interval between requests that return nothing.
_PAUSE_S = 0.2
_BACKOFF = Backoff(0.02, 1.0)
_RENEWALS_PER_LEASE = 3
#: How long an ending process tries to send its last report.
_LAST_REPORT_S = 1.0
_UNKNOWN = (401, 403, 404)
#: An idle connection is replaced after this time, before the operator closes it.
_KEEP_S = 2.0
_CONNECT_S = 2.0
#: Statuses for which a retry is pointless.
_FINAL = (400, 401, 403, 404, 409, 413)


class NoResponseError(Exception):
    """No response. `may_have_arrived`: the operator may have processed the request nevertheless."""

    def __init__(self, reason: object, may_have_arrived: bool) -> None:
        super().__init__(str(reason))
        self.may_have_arrived = may_have_arrived


class RequestRejectedError(Exception):
    """The operator rejected the request, and a retry is pointless."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"{status}: {text}")
        self.status = status


class LeaseClient:
    """Exchanges leases and reports of one job with the operator, on a thread beside the main thread.

    `stop` may be called from any thread, the other public methods from the main thread.
    """

    def __init__(
        self, spec: ReplicaSpec, shared_state: SharedJobState, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.has_been_dismissed = False  #: by the operator: no replacement process is needed
        self._connection = OperatorConnection(spec)
        self._shared_state = shared_state
        self._clock = clock
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._run, name="cortex-jobs", daemon=True)
        self._changed = threading.Condition()
        self._state = ClientState.JOINING
        self._job: Assignment | None = None
        self._failures = 0  #: requests in a row that failed
        self._lease_sizer = LeaseSizer()
        self._queue: deque[ActiveLease] = deque()
        self._held: dict[str, ActiveLease] = {}
        self._may_request_at = 0.0
        self._renew_at = 0.0
        self._reports = ReportQueue()
        self._must_renew = False  # a lease may have been granted in a lost response; a renewal lists all leases held

    # The main thread's side.

    def start(self) -> None:
        """Start the thread, which requests a job."""
        self._thread.start()

    @property
    def is_ending(self) -> bool:
        """Return whether the current batch is the last one."""
        return self._state in (ClientState.ENDING, ClientState.FINISHED)

    def wait_for_job(self) -> Assignment | None:
        """Wait for the job; return None if this process has to end."""
        with self._changed:
            while self._state is ClientState.JOINING:
                self._changed.wait()
            return None if self.is_ending else self._job

    def open(self) -> None:
        """Allow leases, after the user's object has been constructed."""
        self._handle(ClientEvent.CONSTRUCTED)

    def next_lease(self) -> ActiveLease | None:
        """Wait for a lease; return None once the job has no more work."""
        with self._changed:
            self._handle(ClientEvent.LEASE_DONE)
            while not self.is_ending:
                if self._queue:
                    work = self._queue.popleft()
                    is_quick = self._lease_sizer.is_quick(len(work.lease.batches))
                    # The thread is not woken: it requests the next lease with the reports of this one.
                    event = ClientEvent.QUICK_LEASE if is_quick else ClientEvent.SLOW_LEASE
                    self._state = state_after(self._state, event)
                    return work
                if self._state is ClientState.JOB_OVER:
                    break
                self._changed.wait()
            return None

    def done(self, done: BatchOutcome) -> None:
        """Add the outcome of a batch; wait while too much has not been acknowledged."""
        if not self._reports.put(done):
            return
        with self._changed:
            if self._reports.note(done, self._clock()):
                self._changed.notify_all()
            while self._reports.waiting_bytes > MAX_WAITING_BYTES and not self.is_ending:
                self._changed.wait()

    def work_done(self, batches: int, seconds: float) -> None:
        """Record how long the main thread took for a lease."""
        with self._changed:
            self._lease_sizer.record(batches, seconds)

    def stop(self) -> None:
        """Make `wait_for_job` and `next_lease` return None, so that the process ends after the current batch."""
        self._handle(ClientEvent.STOPPED)
        self._connection.interrupt()

    def finish(self) -> None:
        """Send the remaining reports, within about a second."""
        self.stop()
        self._handle(ClientEvent.FINISHED)
        self._thread.join(2 * _LAST_REPORT_S)

    # Both threads.

    def _handle(self, event: ClientEvent) -> None:
        with self._changed:
            self._state = state_after(self._state, event)
            self._changed.notify_all()

    # The thread.

    def _run(self) -> None:
        try:
            self._join()
            while (step := self._next_step()) is not None:
                step()
            # Batches that cannot be reported now run again on another worker.
            give_up_at = self._clock() + _LAST_REPORT_S
            while not self._reports.is_empty and self._clock() < give_up_at:
                self._exchange()
            self._connection.close()
        except RequestRejectedError as error:
            self.has_been_dismissed = error.status in _UNKNOWN
            if error.status not in (*_UNKNOWN, 409):
                self._die(f"the operator rejected a request of this worker: {error}")
            self.stop()
        except BaseException:  # the edge of the thread: without it the process would idle for ever
            self._die(traceback.format_exc())

    def _die(self, text: str) -> None:
        write_log(f"{text}\n")
        os._exit(1)

    def _join(self) -> None:
        while not self.is_ending:
            asked_at = self._clock()
            try:
                answer = wire.parse_joined(
                    self._connection.post("join", wire.write(wire.JoinRequest(self._pid)), *_timeout(_WAIT_S))
                )
            except (NoResponseError, WorkerMessageError):
                self._back_off()
                continue
            self._failures = 0
            if isinstance(answer, StopSignal):
                self._dismiss()
            elif answer is None:
                self._pause(asked_at + _PAUSE_S - self._clock())
            else:
                with self._changed:
                    self._shared_state.enter_job(answer.job_id, answer.lease_s)
                    self._job = answer
                    self._handle(ClientEvent.ASSIGNED)
                return

    def _next_step(self) -> Callable[[], None] | None:
        """Wait until a request is due; return the method that sends it, None once the main thread has finished."""
        with self._changed:
            while self._state is not ClientState.FINISHED:
                now = self._clock()
                if self._must_renew or (self._held and now >= self._renew_at):
                    return self._renew
                if self._reports.unanswered:
                    return self._exchange
                due_at = self._reports.due_at
                is_idle = self._state is ClientState.IDLE
                if self._wants_lease(now) or (due_at is not None and (is_idle or now >= due_at)):
                    return self._exchange
                times = [self._renew_at] if self._held else []
                times += [] if due_at is None else [due_at]
                times += [self._may_request_at] if self._may_request_at > now else []
                self._changed.wait(max(min(times) - now, 0.0) if times else None)
            return None

    def _wants_lease(self, now: float) -> bool:
        is_due = self._state is ClientState.IDLE and now >= self._may_request_at
        return not self._queue and (is_due or self._state is ClientState.FETCHING_AHEAD)

    def _exchange(self) -> None:
        """Send reports, and request a lease if one is wanted."""
        assert self._job is not None
        now = self._clock()
        with self._changed:
            wants = not self._reports.unanswered and self._wants_lease(now)
            outgoing = self._reports.collect()
            # No long poll while more reports wait than one body holds.
            wait_s = _WAIT_S if wants and self._state is ClientState.IDLE and self._reports.due_at is None else 0.0
            batches = self._lease_sizer.batches if wants else 0
        reports = tuple(item.report() for item in outgoing)
        asked = wire.ExchangeRequest(self._pid, self._job.job_id, reports, batches, _LEASE_BYTES, wait_s)
        try:
            answer = wire.parse_exchanged(
                self._connection.post("exchange", wire.write_exchange(asked), *_timeout(wait_s))
            )
        except (NoResponseError, WorkerMessageError) as error:
            may_have_arrived = not isinstance(error, NoResponseError) or error.may_have_arrived
            with self._changed:
                self._reports.failed(outgoing, may_have_arrived)
                self._must_renew = self._must_renew or (wants and may_have_arrived)
            self._back_off()
            return
        self._failures = 0
        with self._changed:
            self._reports.answered(outgoing)
            kept = set()
            for item in outgoing:
                if item.is_final:
                    self._held.pop(item.work.lease.token, None)
                elif item.may_have_arrived:  # "lost" may mean that the first attempt arrived: the next report will show
                    kept.add(item.work.lease.token)
            self._drop_lost(token for token in answer.lost if token not in kept)
            # Requests with reports return at once; an empty response to a long poll delays the next one.
            self._accept(answer, 0.0 if outgoing else wait_s, now)
            self._changed.notify_all()
        if answer.stop:
            self._dismiss()

    def _drop_lost(self, tokens: Iterable[str]) -> None:
        for token in tokens:
            if work := self._held.pop(token, None):
                work.is_lost = True
        self._shared_state.set_tokens(self._held)

    def _accept(self, answer: ExchangeReply, waited_s: float, asked_at: float) -> None:
        now = self._clock()
        if answer.lease is not None and answer.lease.batches:
            assert self._job is not None
            work = ActiveLease(answer.lease)
            if not self._held:
                self._renew_at = now + self._job.lease_s / _RENEWALS_PER_LEASE
                self._shared_state.set_renewed(time.monotonic_ns())
            self._held[work.lease.token] = work
            self._shared_state.set_tokens(self._held)
            self._queue.append(work)
        else:
            self._handle(ClientEvent.NOTHING_LEASED)
            self._may_request_at = asked_at + _PAUSE_S if waited_s else 0.0
        if answer.is_done:
            self._handle(ClientEvent.JOB_OVER)

    def _renew(self) -> None:
        assert self._job is not None
        with self._changed:
            tokens = tuple(self._held)
        try:
            body = wire.write(wire.RenewalRequest(self._pid, tokens, all=True))
            answer = wire.parse(RenewalReply, self._connection.post("renew", body, _ANSWER_S))
        except (NoResponseError, WorkerMessageError):
            self._renew_at = self._clock() + _BACKOFF.max_s
            self._back_off()
            return
        self._must_renew = False
        self._failures = 0
        self._renew_at = self._clock() + self._job.lease_s / _RENEWALS_PER_LEASE
        self._shared_state.set_renewed(time.monotonic_ns())
        with self._changed:
            self._drop_lost(answer.lost)
        if answer.stop:
            self._dismiss()

    def _dismiss(self) -> None:
        self.has_been_dismissed = True
        self.stop()

    def _back_off(self) -> None:
        self._failures += 1
        self._pause(_BACKOFF.delay_s(self._failures))

    def _pause(self, seconds: float) -> None:
        """Wait; only the end of the process interrupts it."""
        until = self._clock() + seconds
        with self._changed:
            while (left := until - self._clock()) > 0 and not self.is_ending:
                self._changed.wait(left)


def _timeout(wait_s: float) -> tuple[float, bool]:
    """Return the timeout of a request, and whether `stop` may interrupt it."""
    return wait_s + _ANSWER_S, wait_s > 0


class OperatorConnection:
    """HTTP over the operator's unix socket, one request at a time; any other thread may `interrupt`."""

    def __init__(self, spec: ReplicaSpec) -> None:
        self._path = spec.jobs_socket or ""
        self._prefix = f"/worker/{spec.id}/"
        self._headers = {"authorization": f"Bearer {spec.jobs_token}", "content-type": "application/json"}
        self._http: UnixHttpConnection | None = None
        self._used_at = 0.0
        self._lock = threading.Lock()
        self._is_interrupted = False
        self._waiting: UnixHttpConnection | None = None

    def post(self, name: str, body: bytes, timeout_s: float, may_interrupt: bool = False) -> bytes:
        """Send a request and return the response body. Raises: NoResponseError, RequestRejectedError."""
        connection = self._open(timeout_s)
        with self._lock:
            if may_interrupt and self._is_interrupted:
                raise NoResponseError("interrupted", may_have_arrived=False)
            self._waiting = connection if may_interrupt else None
        try:
            connection.request("POST", self._prefix + name, body, self._headers)
            response = connection.getresponse()
            answer = response.read()
        except (OSError, HTTPException) as error:
            self.close()
            raise NoResponseError(error, may_have_arrived=True) from error
        finally:
            with self._lock:
                self._waiting = None
        self._used_at = time.monotonic()
        if response.status in _FINAL:
            raise RequestRejectedError(response.status, answer[:1000].decode(errors="replace"))
        if response.status != 200:
            raise NoResponseError(f"the operator answered {response.status}", may_have_arrived=True)
        return answer

    def interrupt(self) -> None:
        """Abort the current interruptible request, and all later ones."""
        with self._lock:
            self._is_interrupted = True
            if self._waiting is not None:
                with contextlib.suppress(OSError, AttributeError):  # it may have ended just now
                    self._waiting.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection; the next request opens a new one."""
        if self._http is not None:
            self._http.close()
            self._http = None

    def _open(self, timeout_s: float) -> UnixHttpConnection:
        if self._http is not None:
            has_hung_up = self._http.sock is None
            if has_hung_up or time.monotonic() - self._used_at > _KEEP_S:
                self.close()
        if self._http is None:
            connection = UnixHttpConnection(self._path, _CONNECT_S)
            try:
                connection.connect()
            except OSError as error:
                connection.close()
                raise NoResponseError(error, may_have_arrived=False) from error
            self._http = connection
        self._http.sock.settimeout(timeout_s)
        return self._http


class LeaseSizer:
    """Measures the speed of a job on this worker."""

    def __init__(self) -> None:
        self._batch_s: float | None = None
        self._last = 1

    def record(self, batches: int, seconds: float) -> None:
        """Record how long a number of batches took."""
        if batches:
            newest = seconds / batches
            self._batch_s = newest if self._batch_s is None else self._batch_s + _WEIGHT * (newest - self._batch_s)
            self._last = batches

    @property
    def batches(self) -> int:
        """Return the size of the next lease."""
        if self._batch_s is None:
            return 1
        wanted = _LEASE_WORK_S / max(self._batch_s, 1e-9)
        return int(max(1, min(wanted, MAX_BATCHES, self._last * _GROWTH)))

    def is_quick(self, batches: int) -> bool:
        """Return whether this many batches end soon, so that the next lease is fetched meanwhile.

        An early lease of slow batches would withhold them from idle workers.
        """
        return self._batch_s is not None and self._batch_s * batches <= 2 * _LEASE_WORK_S
