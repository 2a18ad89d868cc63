"""The slot of a worker that runs a command: names the command's end, and keeps its last lines if it does not start."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from cortex.lifecycle import DeathCause, ProcessState
from cortex.processes.process_tree import descendants
from cortex.supervisor.exit_reasons import name_death, resident_bytes
from cortex.supervisor.request_worker_slot import RequestWorkerSlot, WorkerOutput
from cortex.worker.channel import Channel
from cortex.worker.commands.command_process import STOP_S
from cortex.worker.commands.worker import run_command_worker
from cortex.worker.orphan import Inheritance
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


class CommandWorkerSlot(RequestWorkerSlot):
    """A slot whose processes pass requests to the server of a command, which they start."""

    exit_s = STOP_S + _PROXY_EXIT_S
    _command_pid = 0
    _wait_status: int | None = None  #: of the command, once it has ended
    _tail = b""
    _memory_bytes = 0
    _measure_at = 0.0
    _waits_for = ""

    def run(self, channel: Channel) -> int:
        """Run the process: called in the fork, returns its exit code."""
        output = WorkerOutput(self._spec.log_path, self.index, self.outputs)
        inheritance = Inheritance(output, self._listener)
        return run_command_worker(self._spec, self.index, channel, self._connections.shared_state, inheritance)

    @property
    def status(self) -> ProcessStatus:
        """The status reported to the engine."""
        status = super().status
        return replace(status, waits_for=self._waits_for) if self.state is ProcessState.STARTING else status

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
        elif kind == "unresponsive":
            self.kill(Death(DeathCause.TIMED_OUT, f"unresponsive: {message['message']}", time.time()))
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
