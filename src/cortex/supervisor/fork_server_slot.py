"""The slots of a replica with `handler.preload`: the fork server, and the workers that it forks.

The fork server (`worker.forks.fork_server`) constructs the class, and is no worker: it has no connections. A worker's
slot requests a fork from it and gets the pid from the process itself, so it does not matter when the fork server dies:

state of the slot       process   what happens
---------------------   -------   ------------------------------------------------------------------------------
waits for the fork      none      it starts if it does not run; its failure to construct is that of the slot
server (STARTING)
forking (STARTING)      none      the request is sent; "forked" has the pid, the end of the channel means that no
                                  process was forked
STARTING, READY, …      yes       as `process_slot`

The fork server is started again only when a slot waits for it: a second copy of the model takes memory.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from typing import Any

from cortex.lifecycle import DeathCause, ProcessState
from cortex.processes.memory import memory_use
from cortex.processes.process_tree import stat_fields
from cortex.supervisor.exit_reasons import resident_bytes, restart_delay_s
from cortex.supervisor.listeners import ReplicaListeners
from cortex.supervisor.process_slot import Fork, ProcessSlot, with_output_pipes
from cortex.supervisor.request_worker_slot import RequestWorkerSlot
from cortex.worker.channel import Channel
from cortex.worker.forks.fork_server import WorkerDescriptors, run_request_fork_server
from cortex.worker.spec import Death, ReplicaSpec, StartFailure

#: A fork server that has not forked by then is stuck, for example in a fork handler of a library.
_FORK_TIMEOUT_S = 30.0
#: How long a slot whose channel was closed waits for the news that the fork server has died.
_LOST_S = 1.0


class ForkServerSlot(ProcessSlot):
    """The slot of the fork server. `workers` is the supervisor's list of slots, by index."""

    def __init__(self, spec: ReplicaSpec, workers: Sequence[ProcessSlot], fork: Fork) -> None:
        super().__init__(spec, len(spec.sockets), fork)
        self._all_workers = workers

    def run(self, channel: Channel) -> int:
        """Run the process: called in the fork, returns its exit code."""
        return run_request_fork_server(self._spec, channel, lambda index: self._workers[index].shared_state)

    @property
    def is_ready(self) -> bool:
        """Return whether it has constructed the class and can fork."""
        return self.state is ProcessState.READY and self._channel_lost_at is None

    @property
    def is_forking(self) -> bool:
        """Return whether a process may exist whose pid is not known yet."""
        return any(worker.is_forking for worker in self._workers)

    @property
    def is_busy(self) -> bool:
        """Return whether deadlines or limits need frequent checks."""
        return self.pid is not None and bool(self._spec.mem_limit_bytes)

    @property
    def memory_bytes(self) -> int:
        """The memory of the process, with its share of what it shares."""
        return _memory_bytes(self.pid, self._spec.mem_limit_bytes)

    def fork_worker(self, slot: ProcessSlot, channel: Channel) -> tuple[None, int, int]:
        """Request a process of `slot`; return the read ends of its stdout and stderr. Raises: OSError."""

        def request(stdout: int, stderr: int) -> None:
            fds = WorkerDescriptors(channel.fileno(), stdout, stderr)
            fields = {"index": slot.index, **asdict(self._spec.limits)}
            if self.channel is None or not self.channel.send("fork", fds=fds, **fields):
                raise OSError("the fork server does not respond")

        return with_output_pipes(request)

    def demand(self) -> None:
        """Start the process at the next tick if it does not run, and unless the last one has just failed."""
        if self.state is ProcessState.BACKING_OFF and self._start_at == math.inf:
            self._start_at = 0.0

    def start(self) -> None:
        """Fork a process, if a slot waits for it."""
        if any(worker.waits for worker in self._workers):
            super().start()
        else:
            self.state = ProcessState.BACKING_OFF
            self._start_at = math.inf

    def configure(self, spec: ReplicaSpec) -> None:
        """Apply changed limits: each request to fork has them."""
        self._spec = spec

    def on_death(self, wait_status: int) -> Death:
        """Determine the cause of a death, and pass a failure to construct on to the slots that wait."""
        is_starting = self.state is ProcessState.STARTING
        death = super().on_death(wait_status)
        if is_starting and self._failure is not None:
            for worker in self._workers:
                worker.on_fork_server_failed(self._failure, death)
        return death

    def on_failed_worker(self) -> None:
        """Construct the class again if no worker serves: what it holds may be the cause."""
        if self.is_ready and not any(worker.state is ProcessState.READY for worker in self._workers):
            self.kill(Death(DeathCause.KILLED, "ended: none of its processes became ready", time.time()))

    @property
    def _workers(self) -> list[PreloadedWorkerSlot]:
        return [worker for worker in self._all_workers if isinstance(worker, PreloadedWorkerSlot)]

    def _tick_stop(self, now: float) -> None:
        self.kill()  # its workers go on


class PreloadedWorkerSlot(RequestWorkerSlot):
    """A slot whose processes the fork server forks."""

    def __init__(
        self,
        spec: ReplicaSpec,
        index: int,
        listeners: ReplicaListeners,
        fork_server: ForkServerSlot,
        on_end: Callable[[int | None], None],
        others: Callable[[int], Iterable[RequestWorkerSlot]],
    ) -> None:
        super().__init__(spec, index, listeners, fork_server.fork_worker, False, on_end, others)
        self.waits = False  #: for the fork server
        self._fork_server = fork_server
        self._copy_pid: int | None = None
        self._requested_at = 0.0
        self._lost_at: float | None = None
        self._is_refused = False  #: the fork server could not fork, and has sent the reason

    @property
    def is_forking(self) -> bool:
        """Return whether a process may exist whose pid is not known yet."""
        return self.channel is not None and self.pid is None

    @property
    def copy_pid(self) -> int | None:
        """The fork server that has created the working copy; None without a process."""
        return self._copy_pid if self.channel is not None else None

    @property
    def memory_bytes(self) -> int:
        """The memory of the process, with its share of what it shares."""
        return _memory_bytes(self.pid, self._spec.mem_limit_bytes)

    def start(self) -> None:
        """Request a process from the fork server, or wait for it."""
        self._lost_at, self._is_refused = None, False
        self.waits = not self._fork_server.is_ready
        if self.waits:
            self.wait(None)
            self._fork_server.demand()
            return
        self._copy_pid = self._fork_server.pid
        self._requested_at = time.monotonic()
        super().start()

    def on_fork_server_failed(self, failure: StartFailure, death: Death) -> None:
        """Fail as the fork server that this slot waits for; the next one is started after its delay."""
        if self.waits and self.state in (ProcessState.STARTING, ProcessState.BACKING_OFF):
            self._failed_starts += 1
            self._aborted_starts += 1
            self._failure = failure
            if death.cause is not DeathCause.EXITED:
                self._record_death(death)
            self.state = ProcessState.BACKING_OFF

    def on_message(self, message: dict[str, Any]) -> None:
        """Handle a message of the process. Raises: KeyError, TypeError, ValueError if user code wrote it."""
        if message["kind"] == "forked":
            pid = int(message["pid"])
            if self.pid is not None or _parent(pid) != os.getpid():
                raise ValueError("not a process of this slot")
            self.pid = pid
            if self.state is ProcessState.STOPPING:
                self.kill()
        else:
            self._is_refused = message["kind"] == "failed" and self.is_forking
            super().on_message(message)

    def on_channel_lost(self) -> None:
        """Handle the end of the channel: the process is dying, or none was forked."""
        if self.pid is not None or self.channel is None:
            super().on_channel_lost()
            return
        self.channel.close()
        self.channel = None
        self._lost_at = time.monotonic()
        if self.state is ProcessState.STOPPING:
            self._become_stopped()

    def stop(self, now: float, drain_s: float) -> None:
        """Drain the process and end it; it is killed if it takes longer than `drain_s`."""
        if self.state is ProcessState.STARTING and self.is_forking:
            self.state = ProcessState.STOPPING  # killed as soon as its pid is known
            self._drain_until = now
            return
        super().stop(now, drain_s)

    def tick(self, now: float) -> None:
        """Enforce deadlines and limits, start a process that is due, continue a stop."""
        if self.state in (ProcessState.STARTING, ProcessState.BACKING_OFF):
            self._tick_fork(now)
        super().tick(now)

    def _tick_fork(self, now: float) -> None:
        if self.waits:
            if self._fork_server.is_ready:
                self.start()
        elif self.is_forking:
            if now - self._requested_at > _FORK_TIMEOUT_S:
                message = f"killed: it did not fork within {_FORK_TIMEOUT_S:g} s"
                self._fork_server.kill(Death(DeathCause.TIMED_OUT, message, time.time()))
        elif self._lost_at is not None:
            if not self._is_refused and not self._fork_server.is_ready:
                self.start()  # the fork server has died: not a failure of this slot
            elif self._is_refused or now - self._lost_at > _LOST_S:
                self._lost_at = None
                self._failed_starts += 1
                if not self._is_refused:
                    reason = "the fork server did not fork the process"
                    self._failure = StartFailure(reason, summary=reason)
                self._start_at = now + restart_delay_s(self._failed_starts, 0)
                self.state = ProcessState.BACKING_OFF

    def on_death(self, wait_status: int) -> Death:
        """Determine the cause of a death, handle what was running, and schedule the next start."""
        is_starting = self.state is ProcessState.STARTING
        death = super().on_death(wait_status)
        if is_starting:
            self._fork_server.on_failed_worker()
        return death


def _memory_bytes(pid: int | None, limit: int | None) -> int:
    """Return the memory that counts for a limit: with its share of shared pages, if that can exceed the limit."""
    if pid is None:
        return 0
    used = resident_bytes(pid)
    return memory_use(pid).proportional_bytes if limit is not None and used > limit else used


def _parent(pid: int) -> int:
    """Return the parent of a process. Raises: ValueError if it has ended."""
    try:
        return int(stat_fields(pid)[1])
    except (OSError, IndexError) as error:
        raise ValueError(f"process {pid} has ended") from error
