"""A worker that serves requests, as its supervisor holds it: connections, deadlines, successor.

The supervisor keeps a duplicate of every connection. When the process dies, the requests that were inside are
answered here with the cause; connections without a request go to the next process unharmed. A standby is a worker
without connections, which loads models beside the one that serves; once it takes over, that one retires: it finishes
its requests and lets go of each connection that has none.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from cortex.lifecycle import ProcessState
from cortex.replica.channel import Channel
from cortex.replica.main import run_worker
from cortex.replica.orphan import Estate
from cortex.replica.shared_state import ConnectionState
from cortex.replica.spec import Death, ProcessStatus, ReplicaSpec
from cortex.supervisor.batch_bisection import Suspects
from cortex.supervisor.connection_table import Holding
from cortex.supervisor.exit_reasons import timed_out
from cortex.supervisor.held_connections import DEADLINE_STATES, Hearing
from cortex.supervisor.listeners import Doors
from cortex.supervisor.process_slot import EXIT_S, Fork, Slot
from cortex.supervisor.worker_output import WorkerOutput

#: A process that is being stopped must be without requests for this long.
IDLE_BEFORE_STOP_S = 0.2

_CALL_STATES = (ConnectionState.RUNNING, ConnectionState.ANSWERING)


class Worker(Slot):
    """A slot whose processes serve; the doors and the connections outlive them."""

    def __init__(
        self,
        spec: ReplicaSpec,
        index: int,
        doors: Doors,
        fork: Fork,
        is_standby: bool = False,
        on_answer: Callable[[int], None] = lambda status: None,
    ) -> None:
        """Make a slot; `on_answer` is told the status of each answer that is not the process's own."""
        super().__init__(spec, index, fork, is_standby)
        self._doors = doors
        # Models of TensorFlow are batched beneath the calls: there each request is a call of its own.
        is_bisected = spec.max_batch_size > 0 and spec.isolates_failures and spec.type == "python"
        self._suspects = Suspects() if is_bisected else None
        self._holding = Holding(on_answer, keeps_requests=is_bisected)
        self._not_handed_over: list[int] = []
        self._shares_loop = False
        self._condemned = False
        self._idle_since: float | None = None
        self._exit_until: float | None = None
        self._hearing = Hearing()
        self._heir: Callable[[], Worker] | None = None
        self._retire_told = False

    def run(self, channel: Channel) -> int:
        """Be the process: called in the fork, returns its exit code."""
        output = WorkerOutput(self._spec.log_path, self.index, self.outputs)
        estate = Estate(output, self._listener)
        models = self.models.start(self.is_standby)
        return run_worker(self._spec, self.index, channel, self._holding.cells, models, estate)

    @property
    def inherited(self) -> tuple[int, ...]:
        """The unix socket it is connected by: what waits there would be lost with the supervisor otherwise."""
        listener = self._listener
        return (listener.fileno(),) if listener is not None else ()

    @property
    def _listener(self) -> socket.socket | None:
        return None if self.is_standby else self._doors.listener(self.index)

    @property
    def busy_connections(self) -> int:
        """Count the connections with a request inside."""
        return sum(state is not ConnectionState.IDLE for _, state in self._holding.states())

    def take_inside(self) -> str:
        """Name the requests that were answered here since the last time."""
        ids, self._holding.failed_requests = self._holding.failed_requests, []
        return f"request {', '.join(ids)}" if ids else ""

    @property
    def status(self) -> ProcessStatus:
        """Return what the engine is told."""
        status = replace(super().status, lent=self._holding.lent)
        address = self._doors.address(self.index)
        return replace(status, socket=address, near=status.socket) if address else status

    @property
    def is_busy(self) -> bool:
        """Tell whether deadlines or limits have to be watched closely."""
        if self.state is not ProcessState.READY or self._spec.mem_limit_bytes or self._not_handed_over:
            return self.pid is not None or self.state is not ProcessState.STARTING
        return self._holding.is_busy

    # Start, messages, connections.

    def _on_start(self) -> None:
        self._condemned = False
        self._hearing = Hearing()
        self._not_handed_over.clear()

    def on_message(self, message: dict[str, Any]) -> None:
        """Take a message of the process. Raises: KeyError, TypeError, ValueError if our code did not write it."""
        kind = message["kind"]
        if kind == "closed":
            self._holding.on_closed(int(message["index"]))
        elif kind == "released":
            self._pass_on(int(message["index"]))
        else:
            super().on_message(message)

    def _on_ready(self, message: dict[str, Any]) -> None:
        self.slots, self._shares_loop = int(message["slots"]), bool(message["shares_loop"])
        super()._on_ready(message)
        if self._suspects is not None and self.channel is not None:
            for groups in self._suspects.told():
                self.channel.send("suspects", groups=groups)
        for index in self._holding.held:
            self._hand_over(index)

    def hold(self, sock: socket.socket) -> None:
        """Take a connection over; the process gets it as soon as it is ready."""
        if self.state is ProcessState.STOPPED:
            sock.close()  # it was let in too late
            return
        index = self._holding.add(sock)
        if index is not None and self.state in (ProcessState.READY, ProcessState.STOPPING):
            self._hand_over(index)

    def _hand_over(self, index: int) -> None:
        held = self._holding.held[index]
        if self.channel is None:
            return
        again = self._holding.cells.state(index) is ConnectionState.AGAIN
        if not self.channel.send("connection", fd=held.sock.fileno(), index=index, again=again):
            self._not_handed_over.append(index)  # the process is busy and does not read: again at the next tick

    def _hand_over_again(self) -> None:
        indexes, self._not_handed_over = self._not_handed_over, []
        for index in indexes:
            if index in self._holding.held:
                self._hand_over(index)

    # A successor.

    def take_over(self, other: Worker, heir: Callable[[], Worker]) -> None:
        """Serve instead of `other`, which finishes what is inside it; `heir` gets the connections that it lets go."""
        self.is_standby = False
        self._restarts, self._death = other._restarts, other._death
        self._suspects = other._suspects
        other._heir = heir
        if other.state is ProcessState.READY:
            other.state = ProcessState.STOPPING
            other._drain_until = time.monotonic() + other._spec.timeout_s
            other._tell_retire()
        else:
            other.kill()
            other.state = ProcessState.STOPPING
            if other.pid is None:
                other._become_stopped()

    def _tell_retire(self) -> None:
        if self._heir is not None and not self._retire_told and self.channel is not None:
            self._retire_told = self.channel.send("retire")

    def _pass_on(self, index: int) -> None:
        sock = self._holding.take(index)
        if sock is None:
            return
        if self._heir is None:
            sock.close()
        else:
            self._heir().hold(sock)

    # Time.

    def tick(self, now: float) -> None:
        """Enforce deadlines and limits, restart what is due, carry on with a stop."""
        self._holding.close_lingering(now)
        super().tick(now)

    def _tend_without_process(self) -> None:
        if self._failed_starts:
            self._holding.answer_waiting(self._failure.message if self._failure else "starting")

    def _tend(self, now: float) -> None:
        self._enforce_deadlines()
        self._hand_over_again()
        self._tell_retire()
        if self._hearing.deaf_for_s(now, self._holding.held, self._holding.cells) > self._spec.timeout_s:
            self.kill(timed_out(self._spec.timeout_s))
        self._holding.mark_slow_clients()

    def _enforce_deadlines(self) -> None:
        now_ns = time.monotonic_ns()
        expired, running = [], False
        for index, state in self._holding.states():
            if state in DEADLINE_STATES and self._holding.cells.deadline_ns(index) < now_ns:
                expired.append((index, state))
            elif state in _CALL_STATES:
                running = True
        for index, _ in expired:
            self._holding.end_late(index, timed_out(self._spec.timeout_s).message)
        if not self._condemned and not any(state in _CALL_STATES for _, state in expired):
            return
        if running and not self._shares_loop and not self._holding.has_late_batch:
            # Calls on other threads may finish first; nothing new goes in until then.
            if not self._condemned and self.channel is not None:
                self.channel.send("condemn")
            self._condemned = True
        else:
            self.kill(timed_out(self._spec.timeout_s))

    # Stop and death.

    def _carry_on_stop(self, now: float) -> None:
        assert self._drain_until is not None
        if self._exit_until is not None:
            if now > self._exit_until:
                self.kill()
            return
        busy = self._holding.is_busy or bool(self._heir and self._holding.held)
        if busy and now < self._drain_until:
            self._idle_since = None
            return
        self._idle_since = self._idle_since or now
        if (busy or now - self._idle_since > IDLE_BEFORE_STOP_S) and self.channel is not None:
            self._exit_until = now + EXIT_S
            self.channel.send("stop")

    def _on_dead(self, death: Death) -> Death:
        has_successor = self.state is not ProcessState.STOPPING
        self._holding.answer_inside(death, self._suspects if has_successor else None)
        return death

    def _is_quick(self, death: Death, now: float) -> bool:
        if self._suspects is not None and self._suspects.has_new:
            self._suspects.has_new = False  # the next process gets other batches
            return False
        return super()._is_quick(death, now)

    def _become_stopped(self) -> None:
        super()._become_stopped()
        self._holding.answer_again()
        if self._heir is not None:
            for index in list(self._holding.held):
                self._pass_on(index)
        self._holding.close_all()
