"""The slot of a job worker: deadlines, blame for deaths, and lease renewal on its behalf.

The process leases batches and reports outcomes by itself. Its supervisor renews the leases only while the process
can't: a call may hold the interpreter lock for longer than a lease lasts.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from cortex.jobs.http.wire import RenewalRequest, write
from cortex.jobs.spec import batch_id
from cortex.lifecycle import ProcessState
from cortex.processes.process_tree import stat_fields
from cortex.supervisor.exit_reasons import timed_out
from cortex.supervisor.process_slot import EXIT_S, Fork, ProcessSlot
from cortex.worker.channel import Channel
from cortex.worker.jobs.job_worker import run_job_worker
from cortex.worker.jobs.shared_state import SharedJobState
from cortex.worker.spec import KEPT_DEATHS, Death, ProcessStatus, ReplicaSpec

#: The supervisor renews leases that the worker has not renewed for this share of their duration.
_UNRENEWED_SHARE = 0.5
_RENEWALS_PER_LEASE = 3
#: The supervisor gives up a renewal that the operator has not answered for this long.
_RENEWAL_TIMEOUT_S = 5.0


class JobWorkerSlot(ProcessSlot):
    """A slot whose processes run batches."""

    def __init__(self, spec: ReplicaSpec, index: int, fork: Fork, clock_ns: Callable[[], int] = time.monotonic_ns):
        super().__init__(spec, index, fork)
        self.call_slots = 1
        self._shared_state = SharedJobState()
        self._clock_ns = clock_ns
        self._renewal = _LeaseRenewal(spec)
        self._deaths: deque[Death] = deque(maxlen=KEPT_DEATHS)
        self._interrupted_batch = ""
        self._name = ""  #: name of the running workload, if callers know it
        self._is_stop_sent = False
        self._followed_pid = 0
        self._exit_until: float | None = None

    def run(self, channel: Channel) -> int:
        """Run the process: called in the fork, returns its exit code."""
        return run_job_worker(self._spec, self.index, channel, self._shared_state, self.models.start(self.is_standby))

    @property
    def user_pid(self) -> int | None:
        """The process that runs user code: `pid`, or one that a fork server with this `pid` has forked."""
        return None if self.pid is None else self._shared_state.pid or self.pid

    @property
    def is_busy(self) -> bool:
        """Return whether deadlines or limits need frequent checks."""
        if self.state in (ProcessState.STARTING, ProcessState.READY):
            return bool(self._spec.mem_limit_bytes or self._shared_state.deadline_ns)
        return True

    @property
    def status(self) -> ProcessStatus:
        """The status reported to the engine."""
        return replace(super().status, deaths=tuple(self._deaths))

    def take_interrupted(self) -> str:
        """Return the name of the batch that ran in the process that died, once; empty if none did."""
        job_id, _, seq = self._interrupted_batch.partition(":")
        self._interrupted_batch = ""
        if not job_id:
            return ""
        if self._name:
            return f"workload {self._name}"
        return "on_job_complete" if seq == "hook" else f"batch {batch_id(job_id, int(seq))}"

    # Start and messages.

    def _on_start(self) -> None:
        self._shared_state.clear()
        self._renewal.close()

    def on_message(self, message: dict[str, Any]) -> None:
        """Handle a message of the process. Raises: KeyError, TypeError, ValueError if user code wrote it."""
        self._follow_process()
        kind = message["kind"]
        if kind == "constructing":
            if self.state is ProcessState.READY:
                self.state = ProcessState.STARTING  # again, for another job
        elif kind == "leaving":
            if self.state in (ProcessState.STARTING, ProcessState.READY):
                self.state = ProcessState.STOPPING
                self._drain_until = time.monotonic()
                self._is_stop_sent = True
        else:
            super().on_message(message)

    # Time.

    def tick(self, now: float) -> None:
        """Enforce deadlines and limits, start a process that is due, continue a stop."""
        self._follow_process()
        super().tick(now)

    def _follow_process(self) -> None:
        """Notice that the fork server has forked the process of the next job."""
        if self._shared_state.pid not in (0, self._followed_pid):
            self._followed_pid = self._shared_state.pid
            self._is_stop_sent = False  # the previous process may have received it too late
            self.models.on_start()

    def _tick_process(self, now: float) -> None:
        deadline_ns = self._shared_state.deadline_ns
        if deadline_ns and self._clock_ns() > deadline_ns:
            self.kill(timed_out(self._shared_state.timeout_s))
        # Renew the leases of a process that runs but can't renew them.
        self._renewal.tick(now)
        lease_s = self._shared_state.lease_s
        unrenewed_s = (self._clock_ns() - self._shared_state.renewed_ns) / 1e9
        pid = self.user_pid
        if pid is None or not lease_s or unrenewed_s < lease_s * _UNRENEWED_SHARE:
            return
        tokens = self._shared_state.tokens
        if tokens and self._renewal.is_due(now, lease_s) and _runs(pid):
            self._renewal.begin(now, pid, tokens)

    # Stop and death.

    def _tick_stop(self, now: float) -> None:
        assert self._drain_until is not None
        if not self._is_stop_sent and self.channel is not None:
            self._is_stop_sent = self.channel.send("stop")
        if self._shared_state.running_batch:
            self._exit_until = None
            if now >= self._drain_until:
                self.kill()
            return
        if self._exit_until is None:
            self._exit_until = now + EXIT_S
        elif now > self._exit_until:
            self.kill()

    def _on_dead(self, death: Death) -> Death:
        self._renewal.close()
        self._interrupted_batch, self._name = self._shared_state.running_batch, self._shared_state.name
        return replace(death, inside=self._interrupted_batch, after=self._shared_state.previous_batch)

    def _record_death(self, death: Death) -> None:
        super()._record_death(death)
        self._deaths.append(death)

    def _is_quick(self, death: Death, now: float) -> bool:
        return not death.inside and super()._is_quick(death, now)

    def _become_stopped(self) -> None:
        super()._become_stopped()
        self._renewal.close()


class _LeaseRenewal:
    """Sends renewals to the operator, one at a time and without blocking."""

    def __init__(self, spec: ReplicaSpec) -> None:
        self._path = spec.jobs_socket or ""
        self._head = (
            f"POST /worker/{spec.id}/renew HTTP/1.1\r\nhost: operator\r\nauthorization: Bearer {spec.jobs_token}\r\n"
            "content-type: application/json\r\nconnection: close\r\ncontent-length: "
        ).encode()
        self._sock: socket.socket | None = None
        self._begun_at = float("-inf")

    def is_due(self, now: float, lease_s: float) -> bool:
        """Return whether it is time for the next renewal."""
        return self._sock is None and now - self._begun_at >= lease_s / _RENEWALS_PER_LEASE

    def begin(self, now: float, pid: int, tokens: tuple[str, ...]) -> None:
        """Send a renewal. If the operator is unreachable, the next one is sent when it is due."""
        self._begun_at = now
        body = write(RenewalRequest(pid, tokens))
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.setblocking(False)
            sock.connect(self._path)
            sock.send(b"%b%d\r\n\r\n%b" % (self._head, len(body), body))
        except OSError:
            sock.close()
            return
        self._sock = sock

    def tick(self, now: float) -> None:
        """Close the connection once a response has arrived. Its content does not matter to the supervisor."""
        if self._sock is None:
            return
        with contextlib.suppress(BlockingIOError):
            with contextlib.suppress(ConnectionError):
                self._sock.recv(4096)
            self.close()
            return
        if now - self._begun_at > _RENEWAL_TIMEOUT_S:
            self.close()

    def close(self) -> None:
        """Close the connection."""
        if self._sock is not None:
            self._sock.close()
            self._sock = None


def _runs(pid: int) -> bool:
    """Return whether a process is not stopped by a signal or a debugger; a stopped one must not keep its leases."""
    try:
        return stat_fields(pid)[0] not in "TtZX"
    except (OSError, IndexError):
        return False
