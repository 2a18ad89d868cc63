"""A request worker that outlives its supervisor: it finishes its requests, and serves while the gateway still sends.

The gateway keeps its connections to a process open, and the operator needs a moment to remove the route. After that the
process has no purpose, so it ends once no request has arrived for a while. No supervisor enforces deadlines any more:
faulthandler ends the process at the orphan limit, from a thread of its own, which needs no interpreter lock. A call
that holds this lock when the supervisor dies keeps the process from noticing it: the operator kills such a process.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import faulthandler
import math
import os
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from cortex.worker.http.connection import ConnectionPool
from cortex.worker.shared_state import MAX_CONNECTIONS
from cortex.worker.spec import ORPHAN_SERVES_S, RequestLimits, orphan_limit_s

#: The process ends after this many checks in a row without a request.
_QUIET_CHECKS = 5
_CHECK_S = 0.05
#: A dying process closes its sockets a moment before it stops being the parent of its children.
_PARENT_EXIT_S = 1.0
_PARENT_CHECK_S = 0.01

_PR_SET_PDEATHSIG = 1
_STDERR = 2


class RequestServer(Protocol):
    """The requests of this process: `MethodServer`, `ApplicationServer`, `CommandServer` or `GrpcServer`."""

    connections: ConnectionPool
    timeout_s: float

    def configure(self, limits: RequestLimits) -> None:
        """Set the limits of subsequent requests."""

    def set_suspects(self, groups: Mapping[str, int]) -> None:
        """Bisect the requests of batches that killed a previous process."""


class InheritedOutput(Protocol):
    """The output of this process, which its supervisor reads and logs while it lives."""

    def take_over(self) -> None:
        """Log the output in this process from now on."""

    def finish(self) -> None:
        """Log the rest, if the output was taken over."""


@dataclass(frozen=True)
class Inheritance:
    """Resources of the supervisor that a worker takes over if the supervisor dies."""

    output: InheritedOutput
    listener: socket.socket | None  #: accepts the worker's connections; None if the worker may not accept any


def outlive_supervisor() -> None:
    """Survive the death of the supervisor. Call it on the thread that returned from the fork."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, 0)


class Orphan:
    """The behaviour of a process after its supervisor's death. Event-loop thread only, except for `finish`."""

    def __init__(
        self, server: RequestServer, loop: asyncio.AbstractEventLoop, inheritance: Inheritance, stop: Callable[[], None]
    ) -> None:
        """Create it while the supervisor is alive; `stop` ends the process in order."""
        self._server = server
        self._loop = loop
        self._output = inheritance.output
        self._listener = inheritance.listener
        self._stop = stop
        self._supervisor = os.getppid()
        self._lost_at = 0.0
        self._is_orphan = False
        self._retires_at = self._ends_at = math.inf
        self._served = 0
        self._quiet_checks = 0

    def begin(self) -> None:
        """Begin once the channel to the supervisor is closed."""
        self._lost_at = time.monotonic()
        self._confirm_death()

    def finish(self) -> None:
        """Log the rest of the output, at the end of the process."""
        if self._is_orphan:
            self._output.finish()

    def _confirm_death(self) -> None:
        if os.getppid() != self._supervisor:
            self._serve_alone()
        elif time.monotonic() - self._lost_at > _PARENT_EXIT_S:
            os._exit(
                1
            )  # the supervisor lives and passes the connections to another process: user code broke the channel
        else:
            self._loop.call_later(_PARENT_CHECK_S, self._confirm_death)

    def _serve_alone(self) -> None:
        self._is_orphan = True
        faulthandler.dump_traceback_later(orphan_limit_s(self._server.timeout_s), exit=True, file=_STDERR)
        self._accept_waiting()
        with contextlib.suppress(Exception):  # serving has priority
            self._output.take_over()
        self._retires_at = time.monotonic() + ORPHAN_SERVES_S
        self._ends_at = self._retires_at + self._server.timeout_s  # every call that is still running is overdue
        self._served = self._server.connections.served
        self._loop.call_later(_CHECK_S, self._check)

    def _accept_waiting(self) -> None:
        """Serve the connections that wait at the dead supervisor's socket, and refuse further ones."""
        if self._listener is None:
            return
        with contextlib.suppress(OSError):  # no more connections are waiting
            self._listener.shutdown(socket.SHUT_RDWR)
            for number in range(MAX_CONNECTIONS):
                # The supervisor assigned indexes from the other end; nothing reads the rows any more.
                sock = self._listener.accept()[0]
                self._server.connections.add(sock, MAX_CONNECTIONS - 1 - number, on_close=lambda connection: None)
        self._listener.close()

    def _check(self) -> None:
        """Stop if there are no requests. Between two checks, the event loop reads whatever is in the sockets."""
        connections = self._server.connections
        served, before = connections.served, self._served
        self._served = served
        self._quiet_checks = 0 if connections.has_requests or served != before else self._quiet_checks + 1
        if self._quiet_checks >= _QUIET_CHECKS or time.monotonic() > self._ends_at:
            self._stop()
            return
        if time.monotonic() > self._retires_at:
            self._retires_at = math.inf
            connections.retire(lambda connection: None)  # no other process has it, so a released connection is closed
        self._loop.call_later(_CHECK_S, self._check)
