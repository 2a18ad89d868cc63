"""The operator in the foreground together with everything that it starts, for containers.

```text
this process, possibly process 1 of a container
  ├─ starts the operator, and starts it again if it dies: gateway and replicas continue meanwhile
  ├─ prints all logs (`log_output`)
  ├─ deploys a project, if there is one to deploy (`deploy_project`)
  ├─ reaps every process whose parent has ended
  └─ SIGTERM, SIGINT, SIGHUP ──▶ SIGTERM to the operator, which drains and stops everything
                             ──▶ `stop_all` for what it may have left
```
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from types import FrameType

from cortex import telemetry
from cortex.cli.deploy_project import StartDeployment
from cortex.cli.log_output import LogOutput
from cortex.client.cleanup import stop_all
from cortex.client.local_operator import ListenOptions, foreground_command, spawn, start_lock_arguments
from cortex.home import Home
from cortex.installation import last_operator
from cortex.processes.backoff import Backoff
from cortex.processes.orphans import adopt_orphans

#: Time for requests in progress. Everything then ends within the 30 seconds that Kubernetes waits by default.
DRAIN_S = 20.0
#: Time that the operator has after the drain time, before it is killed.
_STOP_S = 15.0
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_RESTARTS = Backoff(first_s=0.5, max_s=30.0)
#: An operator that ran for so long has not failed to start.
_STABLE_S = 60.0
_REAP_S = 0.05


def run_foreground(
    home: Home,
    options: ListenOptions,
    drain_s: float,
    output: Callable[[], LogOutput],
    deployment: StartDeployment | None,
    start_lock: int,
) -> int:
    """Run until a signal, or until the operator was shut down or could not start; return the exit code.

    It also ends if the operator refuses `deployment`. `start_lock` is that of `lock_start`.

    Raises: ConflictError if an operator runs already.
    """
    command = [*foreground_command(home, options), "--stop-all", "--drain", f"{drain_s:g}"]
    telemetry.configure(home.logs_dir / "cli.log")
    adopt_orphans()  # otherwise they become children of process 1, which in some containers reaps nothing
    supervision = _Supervision(home, command, drain_s, output(), deployment, start_lock)
    for number in _SIGNALS:
        signal.signal(number, supervision.stop)
    return supervision.run()


class _Supervision:
    """The operator's process and its successors."""

    def __init__(
        self,
        home: Home,
        command: list[str],
        drain_s: float,
        output: LogOutput,
        deployment: StartDeployment | None,
        start_lock: int,
    ) -> None:
        self._home = home
        self._command = command
        self._drain_s = drain_s
        self._output = output
        self._deployment = deployment
        self._start_lock: int | None = start_lock  #: until the first operator has it
        self._deploy_code = 0  #: exit code of a deployment that the operator refused
        self._operator: subprocess.Popen[bytes] | None = None
        self._codes: dict[int, int] = {}  #: exit codes of processes that were reaped since the operator's last start
        self._is_stopping = threading.Event()
        self._is_over = threading.Event()

    def run(self) -> int:
        """Keep the operator running, then stop everything; return the exit code."""
        self._output.start()
        reaper = threading.Thread(target=self._reap, name="reap", daemon=True)
        reaper.start()
        if self._deployment is not None:
            threading.Thread(target=self._deploy, args=(self._deployment,), name="deploy", daemon=True).start()
        code = self._keep_running() or self._deploy_code
        stop_all(self._home, drain_s=0)  # they had their time
        self._is_over.set()
        reaper.join()
        self._output.write("info", "stopped")
        self._output.stop()
        return code

    def stop(self, number: int, _: FrameType | None) -> None:
        """Handle a signal."""
        self._stop()

    def _stop(self) -> None:
        self._is_stopping.set()
        self._signal_operator(signal.SIGTERM)

    def _deploy(self, deployment: StartDeployment) -> None:
        self._deploy_code = deployment.run(self._output.write, self._is_stopping)
        if self._deploy_code:
            self._stop()

    def _keep_running(self) -> int:
        failures = 0
        while True:
            began = time.monotonic()
            self._codes.clear()
            self._operator = operator = self._spawn()
            if self._is_stopping.is_set():  # the signal may have arrived before the operator was known
                self._signal_operator(signal.SIGTERM)
            code = operator.returncode = self._wait(operator.pid)
            if self._is_stopping.is_set() or code == 0:
                return 0
            if failures == 0 and not self._was_up(operator):
                return code if code > 0 else 1  # the same would happen again
            failures = 1 if time.monotonic() - began > _STABLE_S else failures + 1
            delay_s = _RESTARTS.delay_s(failures)
            self._output.write("warning", "the operator ended; starting it again", exit_code=code, delay_s=delay_s)
            if self._is_stopping.wait(delay_s):
                return 0

    def _spawn(self) -> subprocess.Popen[bytes]:
        if (lock := self._start_lock) is None:
            return spawn(self._home, self._command)
        try:
            return spawn(self._home, [*self._command, *start_lock_arguments(lock)], pass_fds=[lock])
        finally:
            os.close(lock)
            self._start_lock = None

    def _signal_operator(self, number: signal.Signals) -> None:
        # Not by the methods of Popen, which reap the process.
        if self._operator is not None and self._operator.pid not in self._codes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._operator.pid, number)

    def _wait(self, pid: int) -> int:
        """Wait for the operator's end, and kill it if it takes too long after a signal; return its exit code."""
        deadline: float | None = None
        while pid not in self._codes:
            if self._is_stopping.is_set():
                deadline = deadline or time.monotonic() + self._drain_s + _STOP_S
                if time.monotonic() > deadline:
                    self._signal_operator(signal.SIGKILL)
            time.sleep(_REAP_S)
        return self._codes[pid]

    def _was_up(self, operator: subprocess.Popen[bytes]) -> bool:
        identity = last_operator(self._home)
        return identity is not None and identity.pid == operator.pid

    def _reap(self) -> None:
        """Reap all children, of which this process started only the operator."""
        while True:
            is_last = self._is_over.wait(_REAP_S)
            try:
                while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                    pid, status = ended
                    self._codes[pid] = os.waitstatus_to_exitcode(status)
            except ChildProcessError:
                pass
            if is_last:
                return
