"""Supervisors of tests, forked from a process that has imported their modules, as the zygote of an engine does it.

Each test process has one such process. It stays the parent of the supervisors, so that tests learn their exit status.
As a program, this serves the socket at standard input.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

#: Variables with these prefixes are read when an interpreter starts.
_STARTUP_VARIABLES = ("PYTHON", "LD_", "MALLOC_", "GLIBC_", "OPENSSL_", "LC_", "LANG", "HOME")
_MAX_BYTES = 1 << 20


class SupervisorProcess:
    """A forked supervisor, with the methods of `subprocess.Popen` that tests use."""

    def __init__(self, server: _Server, pid: int) -> None:
        self.pid, self.returncode = pid, None
        self._server = server

    def poll(self) -> int | None:
        """Return the exit status, negative for a signal; None while it runs."""
        if self.returncode is None:
            self.returncode = self._server.request({"ended": self.pid})
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end, and return the exit status. Raises: subprocess.TimeoutExpired."""
        if self.poll() is None:
            descriptor = os.pidfd_open(self.pid)
            try:
                if not select.select([descriptor], [], [], timeout)[0]:
                    raise subprocess.TimeoutExpired("supervisor", timeout or 0.0)
            finally:
                os.close(descriptor)
        status = self.poll()
        assert status is not None
        return status

    def send_signal(self, number: int) -> None:
        """Send a signal unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """Request its end."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it at once."""
        self.send_signal(signal.SIGKILL)


class _Server:
    """The process that forks."""

    def __init__(self, python: str, environ: Mapping[str, str]) -> None:
        self._lock = threading.Lock()
        self._channel, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
        with theirs:
            command = [python, "-P", __file__]
            self._process = subprocess.Popen(command, stdin=theirs, start_new_session=True, env=environ)

    def request(self, request: dict[str, Any]) -> Any:
        with self._lock:
            self._channel.send(json.dumps(request).encode())
            return json.loads(self._channel.recv(_MAX_BYTES))


def start_supervisor(python: str, spec: str, environ: Mapping[str, str]) -> SupervisorProcess:
    """Start the supervisor of the specification in a file, in a session of its own."""
    startup = {name: value for name, value in environ.items() if name.startswith(_STARTUP_VARIABLES)}
    server = _server(python, tuple(sorted(startup.items())))
    return SupervisorProcess(server, server.request({"spec": spec, "env": dict(environ), "cwd": str(Path.cwd())}))


@cache
def _server(python: str, startup: tuple[tuple[str, str], ...]) -> _Server:
    others = {name: value for name, value in os.environ.items() if not name.startswith(_STARTUP_VARIABLES)}
    return _Server(python, others | dict(startup))


def _serve(channel: socket.socket) -> dict[str, Any]:
    """Answer requests; return that for a supervisor in its fork."""
    while data := channel.recv(_MAX_BYTES):
        request: dict[str, Any] = json.loads(data)
        if "ended" in request:
            pid, status = os.waitpid(request["ended"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if pid else None
        else:
            answer = os.fork()
            if answer == 0:
                channel.close()
                return request
        channel.send(json.dumps(answer).encode())
    os._exit(0)


def _main() -> None:
    from cortex.supervisor import supervisor  # noqa: PLC0415 - the tests need it in this process only

    gc.collect()
    gc.freeze()
    request = _serve(socket.socket(fileno=os.dup(0)))
    os.setsid()
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.close(null)
    os.environ.clear()
    os.environ.update(request["env"])
    time.tzset()
    with contextlib.suppress(FileNotFoundError):
        os.chdir(request["cwd"])
    sys.argv = ["supervisor", request["spec"]]
    supervisor.main()


if __name__ == "__main__":
    _main()
