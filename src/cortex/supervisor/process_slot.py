"""The slot of one worker process, as its supervisor manages it: fork, readiness, limits, death, restart.

Processes come and go in a slot. Subclasses add the work: `request_worker_slot` for requests,
`job_worker_slot` for batches.

    BACKING_OFF <------------------------------+
        | start                                | death (restart after a delay)
        v                                      |
    STARTING ---- "ready" ----> READY ---------+
        |                         |
        | stop: kill              | stop, or a successor takes over
        v                         v
    STOPPING -- drained, or the drain time has passed: killed --> STOPPED

State         Process    Entered by                                  Left by
-----------   --------   -----------------------------------------   ------------------------------------------------
BACKING_OFF   none       a new slot; a death; a refused fork;        `start` after its delay (`tick`) -> STARTING;
                         `wait` with a reason (no models yet)        `stop` -> STOPPED
STARTING      yes (1)    `start`                                     message "ready" -> READY; death -> BACKING_OFF;
                                                                     `stop` kills it -> STOPPING
READY         yes        message "ready"                             death -> BACKING_OFF; `stop` -> STOPPING;
                                                                     job worker: "constructing" -> STARTING
STOPPING      yes        `stop`; a successor (`take_over`);          its death -> STOPPED
                         job worker: "leaving"
STOPPED       none       death while STOPPING; any death of a        -
                         standby

(1) None while the slot waits for models without an error.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from cortex.lifecycle import DeathCause, ProcessState
from cortex.processes.orphans import end_with_parent
from cortex.processes.process_tree import CLEANING_S, is_cleaner, is_running, kill_group
from cortex.supervisor.exit_reasons import (
    count_kernel_oom_kills,
    name_death,
    over_memory_limit,
    resident_bytes,
    restart_delay_s,
)
from cortex.supervisor.models.worker_models import WorkerModels
from cortex.worker.channel import Channel
from cortex.worker.monitoring.request_log import mark_streams
from cortex.worker.spec import Death, ProcessStatus, ReplicaSpec, StartFailure

T = TypeVar("T")

#: Raised so that the kernel kills the user's code, and not its supervisor, when memory runs out.
_WORKER_OOM_SCORE = 500

#: A process that dies within this time of being ready counts as a quick death.
QUICK_DEATH_S = 1.0
#: Time limit for the user's exit hooks.
EXIT_S = 2.0
#: A dying process closes its end of the channel a moment before its death is reported.
_CHANNEL_LOST_S = 1.0

#: Forks; returns (pid, read end of stdout, read end of stderr) in the parent and never in the child. The pid is None if
#: another process forks it, in which case the message "forked" has it.
Fork = Callable[["ProcessSlot", Channel], tuple[int | None, int, int]]


class ProcessSlot(ABC):
    """One process at a time, and its successors."""

    def __init__(self, spec: ReplicaSpec, index: int, fork: Fork, is_standby: bool = False) -> None:
        self.index = index
        self.is_standby = is_standby  #: not restarted after a death
        self.models = WorkerModels()
        self.state = ProcessState.BACKING_OFF
        self.pid: int | None = None
        self.call_slots = spec.threads
        self.signature = ""  #: of the last process that was ready, as JSON
        self.channel: Channel | None = None
        self.outputs: dict[int, str] = {}  #: stream by the read end of its pipe
        self._spec = spec
        self._fork = fork
        self._killed_for: Death | None = None
        self._death: Death | None = None
        self._failure: StartFailure | None = None
        self._reported: StartFailure | None = None  #: the cause that the present process gave, if it fails to start
        self._restarts = 0
        self._aborted_starts = 0
        self._failed_starts = 0
        self._quick_deaths = 0
        self._is_forgiven = False  #: the last start failed, but one with other models is about to follow
        self._ready_at = 0.0
        self._start_at = 0.0
        self._oom_kills_before = 0
        self._drain_until: float | None = None
        self._channel_lost_at: float | None = None
        self._cleaners: set[int] = set()  #: remove shared memory of the last process
        self._cleaned_by = 0.0

    @abstractmethod
    def run(self, channel: Channel) -> int:
        """Run the process: called in the fork, returns its exit code."""

    @property
    def user_pid(self) -> int | None:
        """The process that runs user code: `pid`, or one that a fork server with this `pid` has forked."""
        return self.pid

    @property
    def memory_bytes(self) -> int:
        """The resident memory of the process that runs user code."""
        return resident_bytes(self.user_pid) if self.user_pid is not None else 0

    @property
    def copy_pid(self) -> int | None:
        """The process that has created the working copy; None without a process."""
        return self.pid

    @property
    @abstractmethod
    def is_busy(self) -> bool:
        """Return whether deadlines or limits need frequent checks."""

    def take_interrupted(self) -> str:
        """Return the names of what ran in the process that died, once; empty if nothing did."""
        return ""

    @property
    def status(self) -> ProcessStatus:
        """The status reported to the engine."""
        is_starting_again = self._is_forgiven and self.state is ProcessState.BACKING_OFF
        return ProcessStatus(
            index=self.index,
            socket=self._spec.sockets[self.index],
            state=ProcessState.STARTING if is_starting_again else self.state,
            pid=self.user_pid,
            restarts=self._restarts,
            failed_starts=self._failed_starts,
            aborted_starts=self._aborted_starts,
            death=self._death,
            failure=self._failure,
        )

    # Start and messages.

    def start(self) -> None:
        """Fork a process."""
        self._oom_kills_before = count_kernel_oom_kills()
        self._killed_for = None
        self._reported = None
        self._is_forgiven = False
        self._channel_lost_at = None
        self._on_start()
        self.models.on_start()
        try:
            self.channel, theirs = Channel.pair()
            try:
                self.pid, stdout, stderr = self._fork(self, theirs)
            finally:
                theirs.close()
        except OSError as error:  # no more processes, descriptors or memory: others may end
            if self.channel is not None:
                self.channel.close()
                self.channel = None
            self._failed_starts += 1
            reason = f"the process could not be started: {error.strerror or error}"
            self._failure = StartFailure(reason, summary=reason)
            self._start_at = time.monotonic() + restart_delay_s(self._failed_starts, 0)
            self.state = ProcessState.BACKING_OFF
            return
        self.outputs = {stdout: "o", stderr: "e"}
        self.state = ProcessState.STARTING

    def on_message(self, message: dict[str, Any]) -> None:
        """Handle a message of the process. Raises: KeyError, TypeError, ValueError if user code wrote it."""
        kind = message["kind"]
        if kind == "ready" and self.state is ProcessState.STARTING:
            self._on_ready(message)
        elif kind == "failed":
            exception = str(message["exception"])
            self._failure = self._reported = StartFailure(
                str(message["message"]),
                str(message["traceback"]),
                summary=f"{exception} while it started" if exception else "",
            )
        else:
            self.models.on_message(message)

    def _on_ready(self, message: dict[str, Any]) -> None:
        self.state = ProcessState.READY
        self.signature = str(message.get("signature", ""))
        self.models.loading = None
        self._failed_starts = 0
        self._failure = None
        self._ready_at = time.monotonic()

    def on_channel_lost(self) -> None:
        """Handle the end of the channel: the process is dying, or the user's code closed its descriptor."""
        self._channel_lost_at = time.monotonic()

    def on_output(self, data: bytes) -> None:  # noqa: B027 - only commands need it
        """Handle output of the process, which is in the log as well."""

    def configure(self, spec: ReplicaSpec) -> None:
        """Apply changed limits, and send them to the process."""
        self._spec = spec
        if self.channel is not None:
            self.channel.send("configure", **asdict(spec.limits))

    def refuse_start(self, reason: str) -> None:
        """Mark the slot as permanently failed, with the reason shown to users."""
        self._failed_starts += 1
        self._failure = StartFailure(reason)
        self._start_at = math.inf
        self.state = ProcessState.BACKING_OFF

    # Waiting and models.

    def wait(self, reason: str | None) -> None:
        """Postpone the first start until `start` is called; `reason` is the error about its models, if any."""
        self._is_forgiven = False
        self._failure = StartFailure(reason, summary="its models are not available") if reason else None
        self.state = ProcessState.BACKING_OFF if reason else ProcessState.STARTING
        self._start_at = math.inf

    def forgive_start(self) -> None:
        """Discount the start that just failed: it is repeated at once with other models."""
        self._failed_starts = max(self._failed_starts - 1, 0)
        self._failure = None
        self._is_forgiven = True

    # Time.

    def tick(self, now: float) -> None:
        """Enforce deadlines and limits, start a process that is due, continue a stop."""
        if self.state is ProcessState.BACKING_OFF:
            self._tick_without_process()
            if now >= self._start_at and not self._is_being_cleaned(now):
                self.start()
            return
        if self.state in (ProcessState.READY, ProcessState.STOPPING):
            self._tick_process(now)
            if self.channel is not None:
                self.models.send_changes(self.channel)
        if self._channel_lost_at is not None and now - self._channel_lost_at > _CHANNEL_LOST_S:
            self.kill(Death(DeathCause.KILLED, "killed: it closed the socket to its supervisor", time.time()))
        if self._spec.mem_limit_bytes and self.user_pid is not None:
            used = self.memory_bytes
            if used > self._spec.mem_limit_bytes:
                self.kill(over_memory_limit(used, self._spec.mem_limit_bytes))
        if self.state is ProcessState.STOPPING:
            self._tick_stop(now)

    # Stop and death.

    def stop(self, now: float, drain_s: float) -> None:
        """Drain the process and end it; it is killed if it takes longer than `drain_s`."""
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

    def kill(self, reason: Death | None = None) -> None:
        """Kill the process and its process groups. Its death is handled when the kernel reports it.

        What removes shared memory of the process is left, and the next process starts after it: `SharedMemory` of the
        same name would fail, or be removed.
        """
        if self.pid is None:
            return
        if self._killed_for is None:
            self._killed_for = reason
        self._kill_groups()
        with contextlib.suppress(OSError):
            os.kill(self.pid, signal.SIGKILL)  # it may not lead its group yet

    def _kill_groups(self) -> None:
        for pid in {self.user_pid, self.pid}:
            if pid is not None:
                self._cleaners |= kill_group(pid)

    def _is_being_cleaned(self, now: float) -> bool:
        """Return whether shared memory of the last process is being removed; end what takes too long."""
        self._cleaners = {pid for pid in self._cleaners if is_running(pid) and is_cleaner(pid)}
        if now > self._cleaned_by:
            for pid in self._cleaners:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            self._cleaners.clear()
        return bool(self._cleaners)

    def on_death(self, wait_status: int) -> Death:
        """Determine the cause of a death, handle what was running, and schedule the next start."""
        assert self.pid is not None
        self._kill_groups()  # processes of the user's code must not outlive it
        oom_kills = count_kernel_oom_kills() - self._oom_kills_before
        death = replace(name_death(wait_status, oom_kills, self._killed_for), pid=self.user_pid or self.pid)
        self.pid = None
        if self.channel is not None:
            self.channel.close()
            self.channel = None
        death = self._on_dead(death)
        if self.state is ProcessState.STOPPING:
            self._become_stopped()
            return death
        now = time.monotonic()
        if self.state is ProcessState.STARTING:
            self._failed_starts += 1
            self._aborted_starts += 1
            reason = f"the process ended while it started: {death.message}"
            self._failure = self._reported or StartFailure(reason, was_killed=death.is_kill, summary=reason)
            if death.cause is not DeathCause.EXITED:
                self._record_death(death)
        else:
            self._record_death(death)
            self._restarts += 1
            self._quick_deaths = self._quick_deaths + 1 if self._is_quick(death, now) else 0
        if self.is_standby:
            self._become_stopped()
            return death
        delay_s = restart_delay_s(self._failed_starts, self._quick_deaths)
        self._start_at, self._cleaned_by = now + delay_s, now + CLEANING_S
        self.state = ProcessState.BACKING_OFF
        if delay_s == 0 and not self._is_being_cleaned(now):
            self.start()
        return death

    def _record_death(self, death: Death) -> None:
        self._death = death

    def _is_quick(self, death: Death, now: float) -> bool:
        return self._killed_for is None and now - self._ready_at < QUICK_DEATH_S

    def _become_stopped(self) -> None:
        self.state = ProcessState.STOPPED

    # Hooks for subclasses.

    def _on_start(self) -> None:  # noqa: B027 - the fork server has none
        """Reset the state of the previous process."""

    def _tick_without_process(self) -> None:  # noqa: B027 - only requests wait
        """Run the periodic work of a slot that backs off."""

    def _tick_process(self, now: float) -> None:  # noqa: B027 - as `_on_start`
        """Run the periodic work of a process that is ready or being stopped."""

    @abstractmethod
    def _tick_stop(self, now: float) -> None:
        """Continue a stop."""

    def _on_dead(self, death: Death) -> Death:
        """Handle what was running in the process; return the death with details of that."""
        return death


def fork(slot: ProcessSlot, channel: Channel) -> tuple[int, int, int]:
    """Start a process of `slot`; return its pid and the read ends of its stdout and stderr. Raises: OSError."""
    parent = os.getpid()

    def start(stdout: int, stderr: int) -> int:
        if (pid := os.fork()) == 0:
            os.dup2(stdout, 1)
            os.dup2(stderr, 2)
            _become_worker(slot, channel, parent)
        return pid

    return with_output_pipes(start)


def with_output_pipes(start: Callable[[int, int], T]) -> tuple[T, int, int]:
    """Start a process with the write ends of pipes for its output; return the result and the read ends.

    Raises: OSError.
    """
    pipes: list[int] = []
    try:
        pipes += os.pipe()
        pipes += os.pipe()
        stdout_read, stdout_write, stderr_read, stderr_write = pipes
        result = start(stdout_write, stderr_write)
    except OSError:
        for fd in pipes:
            os.close(fd)
        raise
    for fd in (stdout_write, stderr_write):
        os.close(fd)
    for fd in (stdout_read, stderr_read):
        os.set_blocking(fd, False)
    return result, stdout_read, stderr_read


def _become_worker(slot: ProcessSlot, channel: Channel, parent: int) -> NoReturn:
    """Turn a fresh fork into a worker. Never returns, so that no inherited object is finalized in the child."""
    code = 1
    try:
        os.setpgid(0, 0)
        leave_supervisor(parent, channel.fileno())
        with contextlib.suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text(str(_WORKER_OOM_SCORE))
        mark_streams()
        code = slot.run(channel)
    finally:
        os._exit(code)


def leave_supervisor(parent: int, kept: int = 2) -> None:
    """Reset signals and close all descriptors but `kept`, in a fork of the supervisor; end with it."""
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    end_with_parent(parent)
    os.closerange(3, kept)
    os.closerange(kept + 1, _highest_fd() + 1)


def _highest_fd() -> int:
    try:
        return max(map(int, os.listdir("/proc/self/fd")))  # noqa: PTH208 - names only, no Path objects in a fresh fork
    except OSError:
        return int(os.sysconf("SC_OPEN_MAX"))
