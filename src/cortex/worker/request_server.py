"""Base class of the servers in a request worker: the context of their process, their connections, request limits.

Subclasses handle a request: `MethodServer` by a method of the user's class, `ApplicationServer` by an ASGI application,
`GrpcServer` by an rpc, and `CommandServer` by passing it on to a command.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cortex.worker.http.connection import Connection
from cortex.worker.http.connection_pool import ConnectionPool
from cortex.worker.monitoring.metrics import MetricFile, RequestRecorder
from cortex.worker.shared_state import SharedConnectionState
from cortex.worker.spec import ReplicaSpec, RequestLimits

if TYPE_CHECKING:
    from cortex.payloads.signature import ApiSignature
    from cortex.worker.http.streaming_connection import StreamingConnection
    from cortex.worker.monitoring.spans import Tracing

#: The event loop counts as blocked if it misses a deadline by this much, or by the timeout if that is less.
_BLOCKED_S = 5.0
#: The event loop cancels a late call before the supervisor ends the process, however short the timeout is.
_GRACE_NS = 250_000_000


def blocked_grace_ns(timeout_s: float) -> int:
    """Return how long after the deadline of a call on the event loop the supervisor ends the process as blocked."""
    return int(min(timeout_s, _BLOCKED_S) * 1e9) + _GRACE_NS


@dataclass(frozen=True)
class WorkerContext:
    """The parts of a process that serves requests, each of which exists once."""

    spec: ReplicaSpec
    loop: asyncio.AbstractEventLoop
    shared_state: SharedConnectionState
    file: MetricFile | None = None  #: None: nothing is counted
    tracing: Tracing | None = None  #: None: no spans are exported


class RequestServer(ABC):
    """The requests of a process. Event-loop thread only."""

    slots: int  #: requests that may be inside at once, those of the batch that is being collected included
    shares_loop = True  #: calls run on the event loop, so that one of them can block all others

    def __init__(self, context: WorkerContext, new_connection: Callable[..., Connection] = Connection) -> None:
        self.loop = context.loop
        self.connections = ConnectionPool(
            context.loop,
            context.shared_state,
            RequestRecorder(context.file),
            self.handle,
            context.spec.limits,
            new_connection,
        )
        self._tracing = context.tracing
        self.configure(context.spec.limits)

    def configure(self, limits: RequestLimits) -> None:
        """Set the limits of subsequent requests."""
        self.limits = self.connections.limits = limits
        # Computed here, because each request needs them.
        self.timeout_ns = int(limits.timeout_s * 1e9)
        self.grace_ns = blocked_grace_ns(limits.timeout_s)

    def begin(self, connection: StreamingConnection) -> bool:
        """Begin a request whose head has arrived; return False if it is answered: its time is over."""
        now_ns = time.monotonic_ns()
        waited_ns = connection.gateway_wait_ns(now_ns)
        connection.arrived_ns = now_ns - min(waited_ns, self.timeout_ns)
        if self._tracing is not None:
            connection.span = self._tracing.start_request(connection, now_ns)
        if waited_ns >= self.timeout_ns:
            connection.respond_error(504, f"timed out after {self.limits.timeout_s:g} s, before it could run")
            return False
        connection.started_ns = now_ns
        return True

    @abstractmethod
    def handle(self, connection: Connection) -> None:
        """Begin the request of a connection."""

    def signature(self) -> ApiSignature | None:
        """Return what the API takes and returns; None if that is not known."""
        return None

    def run(self) -> None:
        """Serve until `stop`."""
        self.loop.run_forever()

    @abstractmethod
    def stop(self) -> None:
        """End the calls, then make `run` return."""
