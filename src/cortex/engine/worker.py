"""One worker process of a replica, as its supervisor holds it: fork, connections, deadlines, death, successor.

The supervisor keeps a duplicate of every connection. When the process dies, the requests that were inside are
answered here with the cause; connections without a request go to the next process unharmed. A standby is a worker
without connections, which loads models beside the one that serves; once it takes over, that one retires: it finishes
its requests and lets go of each connection that has none.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import socket
import time
from collections.abc import Callable
from typing import Any

from cortex.engine.deaths import (
    count_kernel_oom_kills,
    name_death,
    over_memory_limit,
    resident_bytes,
    restart_delay_s,
    timed_out,
)
from cortex.engine.held import DEADLINE_STATES, Hearing
from cortex.engine.holding import Holding
from cortex.engine.sockets import accept_one
from cortex.engine.worker_models import WorkerModels
from cortex.lifecycle import DeathCause, ProcessState
from cortex.replica.cells import Cells, ConnectionState
from cortex.replica.channel import Channel
from cortex.replica.spec import Death, Failure, ProcessStatus, ReplicaSpec

#: A process that served for less than this before it died is counted as dying quickly.
QUICK_DEATH_S = 1.0
#: A process that is being stopped must be without requests for this long.
IDLE_BEFORE_STOP_S = 0.2
#: How long the user's exit hooks may take.
EXIT_S = 2.0
#: A process that dies closes its end of the channel a moment before its death is known.
_CHANNEL_LOST_S = 1.0

_CALL_STATES = (ConnectionState.RUNNING, ConnectionState.ANSWERING)

#: Forks; returns (pid, read end of stdout, read end of stderr) in the parent and never in the child.
Fork = Callable[["Worker", Channel], tuple[int, int, int]]


class Worker:
    """The slot of one process; processes come and go in it, the listening socket and the connections stay."""

    def __init__(
        self, spec: ReplicaSpec, index: int, listener: socket.socket | None, fork: Fork, is_standby: bool = False
    ) -> None:
        self.index = index
        self.listener = listener
        self.is_standby = is_standby  #: a death is final
        self.models = WorkerModels()
        self.state = ProcessState.BACKING_OFF
        self.pid: int | None = None
        self.slots = spec.threads
        self.channel: Channel | None = None
        self.outputs: dict[int, str] = {}
        self._spec = spec
        self._fork = fork
        self._holding = Holding()
        self._not_handed_over: list[int] = []
        self._shares_loop = False
        self._condemned = False
        self._killed_for: Death | None = None
        self._death: Death | None = None
        self._failure: Failure | None = None
        self._restarts = 0
        self._failed_starts = 0
        self._quick_deaths = 0
        self._is_forgiven = False  #: the last start failed, but another is about to follow that may not
        self._ready_at = 0.0
        self._start_at = 0.0
        self._oom_kills_before = 0
        self._drain_until: float | None = None
        self._idle_since: float | None = None
        self._exit_until: float | None = None
        self._channel_lost_at: float | None = None
        self._hearing = Hearing()
        self._heir: Callable[[], Worker] | None = None
        self._retire_told = False

    @property
    def cells(self) -> Cells:
        """The memory in which the process writes what its connections are at."""
        return self._holding.cells

    @property
    def busy_connections(self) -> int:
        """Count the connections with a request inside."""
        return sum(state is not ConnectionState.IDLE for _, state in self._holding.states())

    def take_failed_requests(self) -> list[str]:
        """Return the ids of the requests that were answered here since the last time."""
        ids, self._holding.failed_requests = self._holding.failed_requests, []
        return ids

    @property
    def status(self) -> ProcessStatus:
        """Return what the engine is told."""
        return ProcessStatus(
            index=self.index,
            socket=self._spec.sockets[self.index],
            state=ProcessState.STARTING if self._is_starting_again else self.state,
            pid=self.pid,
            restarts=self._restarts,
            failed_starts=self._failed_starts,
            lent=self._holding.lent,
            death=self._death,
            failure=self._failure,
        )

    @property
    def _is_starting_again(self) -> bool:
        return self._is_forgiven and self.state is ProcessState.BACKING_OFF

    @property
    def is_busy(self) -> bool:
        """Tell whether deadlines or limits have to be watched closely."""
        if self.state is not ProcessState.READY or self._spec.mem_limit_bytes or self._not_handed_over:
            return self.pid is not None or self.state is not ProcessState.STARTING
        return self._holding.is_busy

    # Start, messages, connections.

    def start(self) -> None:
        """Fork a process; it takes the waiting connections once it is ready."""
        self._oom_kills_before = count_kernel_oom_kills()
        self._killed_for = None
        self._is_forgiven = False
        self._condemned = False
        self._channel_lost_at = None
        self._hearing = Hearing()
        self._not_handed_over.clear()
        self.models.on_start()
        try:
            self.channel, theirs = Channel.pair()
            try:
                self.pid, stdout, stderr = self._fork(self, theirs)
            finally:
                theirs.close()
        except OSError as error:  # no more processes, descriptors or memory: others may end
            self._start_refused(error)
            return
        self.outputs = {stdout: "o", stderr: "e"}
        self.state = ProcessState.STARTING

    def _start_refused(self, error: OSError) -> None:
        if self.channel is not None:
            self.channel.close()
            self.channel = None
        self._failed_starts += 1
        self._failure = Failure(f"the process could not be started: {error.strerror or error}")
        self._start_at = time.monotonic() + restart_delay_s(self._failed_starts, 0)
        self.state = ProcessState.BACKING_OFF

    def on_message(self, message: dict[str, Any]) -> None:
        """Take a message of the process. Raises: KeyError, TypeError, ValueError if our code did not write it."""
        kind = message["kind"]
        if kind == "ready" and self.state is ProcessState.STARTING:
            self.slots, self._shares_loop = int(message["slots"]), bool(message["shares_loop"])
            self.state = ProcessState.READY
            self.models.loading = None
            self._failed_starts = 0
            self._failure = None
            self._ready_at = time.monotonic()
            for index in self._holding.held:
                self._hand_over(index)
        elif kind == "failed":
            self._failure = Failure(str(message["message"]), str(message["traceback"]))
        elif kind == "closed":
            self._holding.on_closed(int(message["index"]))
        elif kind == "released":
            self._pass_on(int(message["index"]))
        else:
            self.models.on_message(message)

    def on_channel_lost(self) -> None:
        """Learn that the process closed its end: it is dying, or the user's code closed what was not its own."""
        self._channel_lost_at = time.monotonic()

    def accept(self) -> None:
        """Take the connections that wait at the listening socket."""
        while self.listener is not None:
            sock = accept_one(self.listener)
            if sock is None:
                return
            sock.setblocking(False)
            self.hold(sock)

    def hold(self, sock: socket.socket) -> None:
        """Take a connection over; the process gets it as soon as it is ready."""
        index = self._holding.add(sock)
        if index is not None and self.state in (ProcessState.READY, ProcessState.STOPPING):
            self._hand_over(index)

    def _hand_over(self, index: int) -> None:
        fd = self._holding.held[index].sock.fileno()
        if self.channel is not None and not self.channel.send("connection", fd=fd, index=index):
            self._not_handed_over.append(index)  # the process is busy and does not read: again at the next tick

    def _hand_over_again(self) -> None:
        indexes, self._not_handed_over = self._not_handed_over, []
        for index in indexes:
            if index in self._holding.held:
                self._hand_over(index)

    def configure(self, spec: ReplicaSpec) -> None:
        """Take changed limits over, and tell the process."""
        self._spec = spec
        if self.channel is not None:
            self.channel.send("configure", timeout_s=spec.timeout_s, max_body_bytes=spec.max_body_bytes)

    # Waiting and models.

    def wait(self, reason: str | None) -> None:
        """Put the first start off until `start` is called; `reason` is what is wrong, if anything is."""
        self._is_forgiven = False
        self._failure = Failure(reason) if reason else None
        self.state = ProcessState.BACKING_OFF if reason else ProcessState.STARTING
        self._start_at = math.inf

    def forgive_start(self) -> None:
        """Take it that the start which just failed was none: it is repeated at once, with other models."""
        self._failed_starts = max(self._failed_starts - 1, 0)
        self._failure = None
        self._is_forgiven = True

    def take_over(self, other: Worker, heir: Callable[[], Worker]) -> None:
        """Serve instead of `other`, which finishes what is inside it; `heir` gets the connections that it lets go."""
        self.is_standby = False
        self.listener, other.listener = other.listener, None
        self._restarts, self._death = other._restarts, other._death
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
        if self.state is ProcessState.BACKING_OFF:
            if self._failed_starts:
                self._holding.answer_waiting(self._failure.message if self._failure else "starting")
            if now >= self._start_at:
                self.start()
            return
        if self.state in (ProcessState.READY, ProcessState.STOPPING):
            self._enforce_deadlines()
            self._hand_over_again()
            self._tell_retire()
            if self.channel is not None:
                self.models.tell(self.channel)
            if self._hearing.deaf_for_s(now, self._holding.held, self.cells) > self._spec.timeout_s:
                self.kill(timed_out(self._spec.timeout_s))
            self._holding.mark_slow_clients()
        if self._channel_lost_at is not None and now - self._channel_lost_at > _CHANNEL_LOST_S:
            self.kill(Death(DeathCause.KILLED, "killed: it closed the socket to its supervisor", time.time()))
        if self._spec.mem_limit_bytes and self.pid is not None:
            used = resident_bytes(self.pid)
            if used > self._spec.mem_limit_bytes:
                self.kill(over_memory_limit(used, self._spec.mem_limit_bytes))
        if self.state is ProcessState.STOPPING:
            self._carry_on_stop(now)

    def _enforce_deadlines(self) -> None:
        now_ns = time.monotonic_ns()
        expired, running = [], False
        for index, state in self._holding.states():
            if state in DEADLINE_STATES and self.cells.deadline_ns(index) < now_ns:
                expired.append((index, state))
            elif state in _CALL_STATES:
                running = True
        for index, _ in expired:
            self._holding.end(index, 504, timed_out(self._spec.timeout_s).message)
        if not self._condemned and not any(state in _CALL_STATES for _, state in expired):
            return
        if running and not self._shares_loop:
            # Calls on other threads may finish first; nothing new goes in until then.
            if not self._condemned and self.channel is not None:
                self.channel.send("condemn")
            self._condemned = True
        else:
            self.kill(timed_out(self._spec.timeout_s))

    # Stop and death.

    def stop(self, now: float, drain_s: float) -> None:
        """Finish the requests inside, then end; whoever has not ended after `drain_s` is killed."""
        if self.state in (ProcessState.STOPPING, ProcessState.STOPPED):
            return
        if self.state is ProcessState.BACKING_OFF:
            self._become_stopped()
            return
        starting = self.state is ProcessState.STARTING
        self.state = ProcessState.STOPPING
        self._drain_until = now + drain_s
        if starting and self.pid is None:
            self._become_stopped()
        elif starting:
            self.kill()

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

    def kill(self, reason: Death | None = None) -> None:
        """Kill the process and whatever it started; its death is handled when the kernel reports it."""
        if self.pid is None:
            return
        if self._killed_for is None:
            self._killed_for = reason
        for kill in (os.killpg, os.kill):
            with contextlib.suppress(OSError):  # gone already, or not yet the leader of its group
                kill(self.pid, signal.SIGKILL)

    def on_death(self, wait_status: int) -> Death:
        """Answer the requests that were inside, name the death, and plan the next start."""
        assert self.pid is not None
        with contextlib.suppress(OSError):
            os.killpg(self.pid, signal.SIGKILL)  # what the user's code started must not outlive it
        oom_kills = count_kernel_oom_kills() - self._oom_kills_before
        death = name_death(wait_status, oom_kills, self._killed_for)
        self.pid = None
        if self.channel is not None:
            self.channel.close()
            self.channel = None
        self._holding.answer_inside(death)
        if self.state is ProcessState.STOPPING:
            self._become_stopped()
            return death
        now = time.monotonic()
        if self.state is ProcessState.STARTING:
            self._failed_starts += 1
            self._failure = self._failure or Failure(f"the process ended while it started: {death.message}")
            self._death = death if death.cause is not DeathCause.EXITED else self._death
        else:
            self._death = death
            self._restarts += 1
            quick = self._killed_for is None and now - self._ready_at < QUICK_DEATH_S
            self._quick_deaths = self._quick_deaths + 1 if quick else 0
        if self.is_standby:
            self._become_stopped()
            return death
        delay = restart_delay_s(self._failed_starts, self._quick_deaths)
        self._start_at = now + delay
        self.state = ProcessState.BACKING_OFF
        if delay == 0:
            self.start()
        return death

    def _become_stopped(self) -> None:
        self.state = ProcessState.STOPPED
        if self._heir is not None:
            for index in list(self._holding.held):
                self._pass_on(index)
        self._holding.close_all()
