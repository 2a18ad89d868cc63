"""The slot of a request worker: connections, deadlines, and its successor after a reload of models.

The supervisor keeps a duplicate of every connection. When the process dies, the supervisor answers its requests with
the cause; connections without a request go to the next process, and requests that nobody has read to another slot's
process if that has room. A standby is a request worker without connections, which loads models while another one
serves. Once it takes over, the other one retires: it finishes its requests and releases each connection that has none.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from cortex.lifecycle import ProcessState
from cortex.predictor.applications import APPLICATION_TYPES
from cortex.supervisor.connection_table import (
    CALL_STATES,
    DEADLINE_STATES,
    ConnectionTable,
    StallDetector,
)
from cortex.supervisor.exit_reasons import client_disconnected, stopped, timed_out
from cortex.supervisor.listeners import ReplicaListeners
from cortex.supervisor.process_slot import EXIT_S, Fork, ProcessSlot
from cortex.worker.channel import Channel
from cortex.worker.request_worker import run_request_worker
from cortex.worker.shared_state import ConnectionState, SharedConnectionState
from cortex.worker.spec import Death, ProcessStatus, ReplicaSpec

#: A process that is being stopped must be without requests for this long.
IDLE_BEFORE_STOP_S = 0.2


class RequestWorkerSlot(ProcessSlot):
    """A slot whose processes serve requests; its listeners and connections outlive them."""

    exit_s = EXIT_S  #: time for the process to end, after the message `stop`

    def __init__(
        self,
        spec: ReplicaSpec,
        index: int,
        listeners: ReplicaListeners,
        fork: Fork,
        is_standby: bool = False,
        on_end: Callable[[int | None], None] = lambda status: None,
        others: Callable[[int], Iterable[RequestWorkerSlot]] = lambda index: (),
    ) -> None:
        """Create a slot: `on_end` as of `ConnectionTable`; `others` returns the slots of a replica but an index."""
        super().__init__(spec, index, fork, is_standby)
        self._others = others
        self._listeners = listeners
        self._connections = ConnectionTable(
            on_end,
            is_grpc=spec.protobuf_path is not None,
            may_have_openai_errors=spec.type not in APPLICATION_TYPES,
        )
        self._not_handed_over: list[int] = []
        self._shares_loop = False
        self._condemned_for: Death | None = None
        self._has_short_calls = False
        self._idle_since: float | None = None
        self._exit_until: float | None = None
        self._stall_detector = StallDetector()
        self._successor: Callable[[], RequestWorkerSlot] | None = None
        self._is_retire_sent = False

    def run(self, channel: Channel) -> int:
        """Run the process: called in the fork, returns its exit code."""
        models = self.models.start(self.is_standby)
        return run_request_worker(self._spec, self.index, channel, self.shared_state, models)

    @property
    def shared_state(self) -> SharedConnectionState:
        """The memory that the slot shares with its processes."""
        return self._connections.shared_state

    @property
    def busy_connections(self) -> int:
        """The number of connections with a request."""
        return sum(state is not ConnectionState.IDLE for _, state in self._connections.states())

    def take_interrupted(self) -> str:
        """Return the ids of the requests answered by the supervisor since the last call."""
        ids, self._connections.failed_requests = self._connections.failed_requests, []
        return f"request {', '.join(ids)}" if ids else ""

    @property
    def status(self) -> ProcessStatus:
        """The status reported to the engine."""
        status = replace(super().status, lent=self._connections.lent, has_short_calls=self._has_short_calls)
        address = self._listeners.address(self.index)
        return replace(status, socket=address, near=status.socket) if address else status

    @property
    def is_busy(self) -> bool:
        """Return whether deadlines or limits need frequent checks."""
        if self.state is not ProcessState.READY or self._spec.mem_limit_bytes or self._not_handed_over:
            return self.pid is not None or self.state is not ProcessState.STARTING
        return self._connections.is_busy

    # Start, messages, connections.

    def _on_start(self) -> None:
        self._condemned_for = None
        self._stall_detector = StallDetector()
        self._not_handed_over.clear()
        self._connections.shared_state.has_short_calls = self._has_short_calls = False

    def on_message(self, message: dict[str, Any]) -> None:
        """Handle a message of the process. Raises: KeyError, TypeError, ValueError if user code wrote it."""
        kind = message["kind"]
        if kind == "closed":
            self._connections.on_closed(int(message["index"]))
        elif kind == "released":
            self._pass_on(int(message["index"]))
        else:
            super().on_message(message)

    def _on_ready(self, message: dict[str, Any]) -> None:
        self.call_slots, self._shares_loop = int(message["slots"]), bool(message["shares_loop"])
        super()._on_ready(message)
        for index in self._connections.open:
            self._hand_over(index)

    @property
    def has_room(self) -> bool:
        """Return whether the process would run another request at once."""
        is_ready = self.state is ProcessState.READY and self._condemned_for is None
        return is_ready and self.busy_connections < self.call_slots

    def add_connection(self, sock: socket.socket, once: bool = False) -> None:
        """Add a connection; the process receives it as soon as it is ready. With `once`, it closes after a response."""
        if self.state is ProcessState.STOPPED:
            sock.close()  # admitted too late
            return
        index = self._connections.add(sock, once)
        if index is not None and self.state in (ProcessState.READY, ProcessState.STOPPING):
            self._hand_over(index)

    def _hand_over(self, index: int) -> None:
        connection = self._connections.open[index]
        if self.channel is None:
            return
        fd, once = connection.sock.fileno(), connection.once
        if not self.channel.send("connection", fd=fd, index=index, once=once):
            self._not_handed_over.append(index)  # the process is busy and does not read: retry at the next tick

    # Successor.

    def take_over(self, other: RequestWorkerSlot, successor: Callable[[], RequestWorkerSlot]) -> None:
        """Serve instead of `other`, which finishes its requests and passes its connections to `successor`."""
        self.is_standby = False
        self._restarts, self._aborted_starts, self._death = other._restarts, other._aborted_starts, other._death
        other._successor = successor
        if other.state is ProcessState.READY:
            other.state = ProcessState.STOPPING
            other._drain_until = time.monotonic() + other._spec.timeout_s
            other._send_retire()
        else:
            other.kill()
            other.state = ProcessState.STOPPING
            if other.pid is None:
                other._become_stopped()

    def _send_retire(self) -> None:
        if self._successor is not None and not self._is_retire_sent and self.channel is not None:
            self._is_retire_sent = self.channel.send("retire")

    def _pass_on(self, index: int) -> None:
        sock = self._connections.remove(index)
        if sock is None:
            return
        if self._successor is None:
            sock.close()
        else:
            self._successor().add_connection(sock)

    # Time.

    def tick(self, now: float) -> None:
        """Enforce deadlines and limits, start a process that is due, continue a stop."""
        self._connections.close_lingering(now)
        if self.state in (ProcessState.STARTING, ProcessState.BACKING_OFF):
            self._pass_on_unread()
        super().tick(now)

    def _pass_on_unread(self) -> None:
        """Pass requests that wait for a process to others that have room, one to each: this one may take long to start.

        Each connection closes after that, so that the gateway opens another one to this slot.
        """
        others = [slot for slot in self._others(self.index) if slot.has_room]
        for index, other in zip(self._connections.unread() if others else (), others, strict=False):
            if (sock := self._connections.remove(index)) is not None:
                other.add_connection(sock, once=True)

    def _tick_without_process(self) -> None:
        if self._failed_starts:
            reason = self._failure.for_callers(self._spec.api) if self._failure else "starting"
            self._connections.answer_waiting(reason)

    def _tick_process(self, now: float) -> None:
        self._enforce_deadlines(now)
        indexes, self._not_handed_over = self._not_handed_over, []
        for index in indexes:
            if index in self._connections.open:
                self._hand_over(index)
        self._send_retire()
        stalled_s = self._stall_detector.stalled_s(now, self._connections.open, self._connections.shared_state)
        if stalled_s > self._spec.timeout_s:
            self.kill(timed_out(self._spec.timeout_s))
        self._connections.mark_slow_clients()
        has_short_calls = self._connections.shared_state.has_short_calls
        self._has_short_calls = has_short_calls and not self._connections.has_long_call(now)

    def _enforce_deadlines(self, now: float) -> None:
        now_ns = time.monotonic_ns()
        abandoned = self._connections.abandoned(now) if self._spec.on_disconnect == "kill" else set[int]()
        expired, running = [], False
        for index, state in self._connections.states():
            if index in abandoned:
                continue
            if state in DEADLINE_STATES and self._connections.shared_state.deadline_ns(index) < now_ns:
                expired.append((index, state))
            elif state in CALL_STATES:
                running = True
        for index, _ in expired:
            self._connections.end_late(index, timed_out(self._spec.timeout_s).message)
        for index in abandoned:
            self._connections.end_abandoned(index)
        if any(state in CALL_STATES for _, state in expired):
            self._condemn(timed_out(self._spec.timeout_s), running and not self._shares_loop)
        elif abandoned:
            self._condemn(client_disconnected(), running)
        elif self._condemned_for is not None:
            self._condemn(self._condemned_for, running)

    def _condemn(self, reason: Death, waits_for_calls: bool) -> None:
        """Kill the process, after its other calls if they can finish; it accepts nothing new until then."""
        if not waits_for_calls or self._connections.has_late_batch:
            self.kill(self._condemned_for or reason)
            return
        if self._condemned_for is None:
            self._condemned_for = reason
            if self.channel is not None:
                self.channel.send("condemn")

    # Stop and death.

    def _tick_stop(self, now: float) -> None:
        assert self._drain_until is not None
        if self._exit_until is not None:
            if now > self._exit_until:
                self.kill(stopped())
            return
        busy = self._connections.is_busy or bool(self._successor and self._connections.open)
        if busy and now < self._drain_until:
            self._idle_since = None
            return
        self._idle_since = self._idle_since or now
        if (busy or now - self._idle_since > IDLE_BEFORE_STOP_S) and self.channel is not None:
            self._exit_until = now + self.exit_s
            self.channel.send("stop")

    def on_death(self, wait_status: int) -> Death:
        """Determine the cause of a death, handle what was running, and schedule the next start."""
        if self._exit_until is not None and wait_status == 0:  # as it was told: this is why calls are not finished
            self._killed_for = self._killed_for or stopped()
        return super().on_death(wait_status)

    def _on_dead(self, death: Death) -> Death:
        self._connections.answer_after_death(death)
        return death

    def _become_stopped(self) -> None:
        super()._become_stopped()
        if self._successor is not None:
            for index in list(self._connections.open):
                self._pass_on(index)
        self._connections.answer_waiting("the process was stopped")
        self._connections.close_all()
