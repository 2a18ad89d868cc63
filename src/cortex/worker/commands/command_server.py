"""The requests of a process that runs a command: the proxy between the gateway and the command's server.

    StreamingConnection ── handle ──> CommandServer ── CommandCall ──> UpstreamConnection ──> the server

The proxy keeps what the server can't: a request that runs when the server dies gets a response with the cause, requests
wait while it restarts, and its connections, from this machine or another, are those of every worker.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from cortex.worker.commands.command_call import RESTART, CommandCall, ProxiedServer
from cortex.worker.commands.command_process import CommandProcess
from cortex.worker.commands.readiness_probe import ProbeResult, probe
from cortex.worker.commands.upstream import Address, Upstream, UpstreamConnection
from cortex.worker.http.connection import READ_BYTES, Connection
from cortex.worker.http.connection_pool import ConnectionPool
from cortex.worker.http.streaming_connection import StreamingConnection
from cortex.worker.monitoring.metrics import MetricFile, RequestRecorder
from cortex.worker.shared_state import SharedConnectionState
from cortex.worker.spec import ReplicaSpec, RequestLimits

if TYPE_CHECKING:
    from cortex.worker.monitoring.spans import Tracing

#: What a server has sent before its end is passed on within this time.
FLUSH_S = 0.02


class CommandConnection(StreamingConnection):
    """A connection from the gateway for the requests of a command: errors below `/v1` have OpenAI's form."""

    __slots__ = ()
    may_have_openai_errors = True


class CommandServer(ProxiedServer):
    """Passes on the requests of one process. Event-loop thread only."""

    def __init__(
        self,
        spec: ReplicaSpec,
        process: CommandProcess,
        address: Address,
        loop: asyncio.AbstractEventLoop,
        shared_state: SharedConnectionState,
        file: MetricFile | None,
        tracing: Tracing | None,
    ) -> None:
        """Create the proxy of a server that listens at `address`. Without `tracing`, it exports no spans."""
        self.connections = ConnectionPool(
            loop, shared_state, RequestRecorder(file), self.handle, spec.max_body_bytes, CommandConnection
        )
        self.upstream = Upstream(loop, process, address, memoryview(bytearray(READ_BYTES)))
        self.strips_prefix = spec.strip_prefix
        self.answered_at = time.monotonic()  #: when the server last answered anything but an error of its own
        self.is_stopping = False
        self._readiness_path = spec.readiness
        self._process = process
        self._tracing = tracing
        self._loop = loop
        self._running: set[CommandCall] = set()
        self.configure(spec.limits)

    def configure(self, limits: RequestLimits) -> None:
        """Set the limits of subsequent requests."""
        self.connections.configure(limits)
        self.timeout_s = limits.timeout_s
        self.websocket_idle_s = limits.websocket_idle_s

    def handle(self, connection: Connection) -> None:
        """Pass on the request of a connection, whose head has arrived."""
        assert isinstance(connection, StreamingConnection)
        now_ns = time.monotonic_ns()
        timeout_ns = int(self.timeout_s * 1e9)
        waited_ns = connection.gateway_wait_ns(now_ns)
        connection.arrived_ns = now_ns - min(waited_ns, timeout_ns)
        if waited_ns >= timeout_ns:
            connection.respond_error(504, f"timed out after {self.timeout_s:g} s, before it could run")
            return
        connection.started_ns = now_ns
        if self._tracing is not None:
            connection.span = self._tracing.start_request(connection, now_ns)
        call = CommandCall(self, connection, connection.arrived_ns + timeout_ns, self._running.discard)
        connection.call = call
        self._running.add(call)
        call.begin()

    def find_holders(self, connection: UpstreamConnection) -> list[int]:
        """Return the processes of the command that hold the other end of a connection; none if they are not known."""
        return self._process.find_holders(connection.sock)

    def has_died(self, holders: Sequence[int]) -> bool:
        """Return whether the end of a connection is that of its process, or of the command."""
        return self._process.has_died(holders)

    def answered(self) -> None:
        """Note that the server has answered."""
        self.answered_at = time.monotonic()

    async def probe(self) -> ProbeResult:
        """Probe the server, at the address at which it listens now."""
        upstream = self.upstream
        if upstream.address is not None:
            upstream.is_of_command(upstream.address)
        address = upstream.find_address()
        if address is None:
            return ProbeResult(self._process.why_no_address())
        result = await probe(address, self._readiness_path, upstream.is_of_command)
        if result.is_ready:
            self.answered()
        elif not result.is_silent:
            upstream.lose(address)
        return result

    def is_busy(self, since: float) -> bool:
        """Return whether requests explain that the server has answered no probe `since` then: it works on them.

        It answers them, or a request has been running all the time that is not late yet, or whose body still arrives.
        """
        is_late = time.monotonic() - self.answered_at > self.timeout_s
        running = [call for call in self._running if call.began_at < since]
        return self.answered_at > since or any(not is_late or call.is_uploading for call in running)

    def stop(self, done: Callable[[], None]) -> None:
        """End the command and its processes, then call `done`."""
        self.is_stopping = True
        self._loop.create_task(self._stop(done))

    async def _stop(self, done: Callable[[], None]) -> None:
        await self._process.stop()
        await asyncio.sleep(FLUSH_S)
        for call in list(self._running):
            call.close_websocket(RESTART, "the service restarts")
        done()
