"""The slot of a worker that runs a command: names the command's end, and keeps its last lines if it does not start.

A command whose probes fail is reported as one that starts, with the reason, so that the gateway sends it no requests.
Those that it has go on. It is ended if it stays so, later each time, because a restart has not helped.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from cortex.lifecycle import DeathCause, ProcessState
from cortex.processes.backoff import Backoff
from cortex.processes.process_tree import descendants
from cortex.supervisor.exit_reasons import name_death, resident_bytes
from cortex.supervisor.request_worker_slot import RequestWorkerSlot
from cortex.worker.channel import Channel
from cortex.worker.commands.command_process import STOP_S
from cortex.worker.commands.worker import run_command_worker
from cortex.worker.spec import Death, ProcessStatus, StartFailure

#: Output of a command that is kept until it is ready.
_TAIL_BYTES = 8 * 1024
_TAIL_LINES = 20
#: Interval of measurements of memory, which read a file per thread.
_MEASURE_S = 0.25
#: What the line has that names an error: `ValueError: bad weights`, `Error: no weights`, `thread 'main' panicked`.
_ERROR = re.compile(r"error|exception|panic|fatal", re.IGNORECASE)
#: Time to stop the proxy, in addition to that of the command.
_PROXY_EXIT_S = 0.5
#: Time after which a command whose probes fail is restarted, the first time and at most.
_MAX_FAILING = Backoff(60.0, 600.0)
#: A command that has been ready for this long after such a restart begins with the first time again.
_RECOVERED_S = 600.0


class CommandWorkerSlot(RequestWorkerSlot):
    """A slot whose processes pass requests to the server of a command, which they start."""

    exit_s = STOP_S + _PROXY_EXIT_S
    _command_pid = 0
    _wait_status: int | None = None  #: of the command, once it has ended
    _tail = b""
    _memory_bytes = 0
    _measure_at = 0.0
    _waits_for = ""
    _unready_for = ""  #: why it gets no requests, although it was ready; "": it is
    _unready_ends = 0  #: in a row

    def run(self, channel: Channel) -> int:
        """Run the process: called in the fork, returns its exit code."""
        max_failing_s = _MAX_FAILING.delay_s(self._unready_ends + 1)
        return run_command_worker(self._spec, self.index, channel, self.shared_state, max_failing_s)

    @property
    def status(self) -> ProcessStatus:
        """The status reported to the engine."""
        status = super().status
        if self.state is ProcessState.STARTING:
            return replace(status, waits_for=self._waits_for)
        if self.state is ProcessState.READY and self._unready_for:
            failure = StartFailure(f"the command is not ready: {self._unready_for}", summary="it is not ready")
            return replace(status, state=ProcessState.STARTING, failure=failure)
        return status

    @property
    def has_room(self) -> bool:
        """Return whether the process would run another request at once."""
        return super().has_room and not self._unready_for

    @property
    def user_pid(self) -> int | None:
        """The process of the command."""
        return self.pid and (self._command_pid or self.pid)

    @property
    def memory_bytes(self) -> int:
        """The resident memory of the command and of the processes that it has started."""
        now = time.monotonic()
        if self._command_pid and self.pid is not None and now >= self._measure_at:
            self._measure_at = now + _MEASURE_S
            self._memory_bytes = sum(map(resident_bytes, descendants(self.pid)))
        return self._memory_bytes

    def _on_start(self) -> None:
        super()._on_start()
        self._command_pid = 0
        self._wait_status = None
        self._tail = b""
        self._waits_for = ""
        self._unready_for = ""
        self._memory_bytes = 0
        self._measure_at = 0.0

    def on_message(self, message: dict[str, Any]) -> None:
        """Handle a message of the process. Raises: KeyError, TypeError, ValueError if the command wrote it."""
        kind = message["kind"]
        if kind == "command":
            self._command_pid = int(message["pid"])
        elif kind == "waiting":
            self._waits_for = str(message["message"])
        elif kind == "ended":
            self._wait_status = int(message["wait_status"])
        elif kind == "unready":
            self._unready_for = str(message["message"])
        elif kind == "recovered":
            self._unready_for = ""
        elif kind == "unresponsive" and self._killed_for is None:
            is_first = time.monotonic() - self._ready_at > _RECOVERED_S + _MAX_FAILING.delay_s(self._unready_ends + 1)
            self._unready_ends = 1 if is_first else self._unready_ends + 1
            self.kill(Death(DeathCause.KILLED, f"killed: {message['message']}", time.time()))
        else:
            super().on_message(message)

    def on_output(self, data: bytes) -> None:
        """Keep the last lines of a command that is not ready."""
        if self.state is ProcessState.STARTING:
            self._tail = (self._tail + data)[-_TAIL_BYTES:]

    def on_death(self, wait_status: int) -> Death:
        """Determine the cause of a death, handle what was running, and schedule the next start."""
        if self._wait_status is not None:
            wait_status = self._wait_status
            if self.state is ProcessState.STARTING and self._killed_for is None:
                self._reported = self._start_failure(wait_status)
        if self._reported is not None and not self._reported.traceback:
            self._reported = replace(self._reported, traceback=self._last_lines())
        return super().on_death(wait_status)

    def _start_failure(self, wait_status: int) -> StartFailure:
        death = name_death(wait_status, 0)
        verb = "" if death.cause in (DeathCause.EXITED, DeathCause.SIGNALLED) else "died: "
        reason = f"the command {verb}{death.message} before it was ready"
        if wait_status == 0:
            reason += ": it must run in the foreground"
            return StartFailure(reason, summary=reason)
        line = error_line(self._last_lines().splitlines())
        return StartFailure(f"{reason}: {line}" if line else reason, was_killed=death.is_kill, summary=reason)

    def _last_lines(self) -> str:
        lines = self._tail.decode(errors="replace").strip().splitlines()
        return "\n".join(lines[-_TAIL_LINES:])


def error_line(lines: Sequence[str]) -> str:
    """Return the last line that names an error, else the last line."""
    return next((line.strip() for line in reversed(lines) if _ERROR.search(line)), lines[-1] if lines else "")
