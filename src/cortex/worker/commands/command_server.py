"""The requests of a process that runs a command: the proxy between the gateway and the command's server.

    StreamingConnection ── handle ──> CommandServer ── CommandCall ──> UpstreamConnection ──> the server

The proxy keeps what the server can't: a request that runs when the server dies gets a response with the cause, requests
wait while it restarts, and its connections, from this machine or another, are those of every worker.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from cortex.worker.commands.command_call import RESTART, CommandCall
from cortex.worker.commands.command_process import CommandProcess
from cortex.worker.commands.proxied_server import ProxiedServer
from cortex.worker.commands.readiness_probe import ProbeResult, probe
from cortex.worker.commands.upstream import Address, Upstream, UpstreamConnection
from cortex.worker.http.connection import READ_BYTES, Connection
from cortex.worker.http.streaming_connection import StreamingConnection
from cortex.worker.request_server import RequestServer, WorkerContext

#: What a server has sent before its end is passed on within this time.
FLUSH_S = 0.02


class CommandConnection(StreamingConnection):
    """A connection from the gateway for the requests of a command: errors below `/v1` have OpenAI's form."""

    __slots__ = ()
    may_have_openai_errors = True


class CommandServer(RequestServer, ProxiedServer):
    """Passes on the requests of one process. Event-loop thread only."""

    def __init__(self, context: WorkerContext, process: CommandProcess, address: Address) -> None:
        """Create the proxy of a server that listens at `address`."""
        super().__init__(context, CommandConnection)
        spec = context.spec
        self.slots = spec.max_concurrency
        self.upstream = Upstream(self.loop, process, address, memoryview(bytearray(READ_BYTES)))
        self.strips_prefix = spec.strip_prefix
        self.answered_at = time.monotonic()  #: when the server last answered anything but an error of its own
        self._readiness_path = spec.readiness
        self._process = process
        self._running: set[CommandCall] = set()

    def handle(self, connection: Connection) -> None:
        """Pass on the request of a connection, whose head has arrived."""
        assert isinstance(connection, StreamingConnection)
        if not self.begin(connection):
            return
        call = CommandCall(self, connection, connection.arrived_ns + self.timeout_ns, self._running.discard)
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
        is_late = time.monotonic() - self.answered_at > self.limits.timeout_s
        running = [call for call in self._running if call.began_at < since]
        return self.answered_at > since or any(not is_late or call.is_uploading for call in running)

    def stop(self) -> None:
        """End the command and its processes, then let the event loop end."""
        self.is_stopping = True
        self._stopping = self.loop.create_task(self._stop())

    async def _stop(self) -> None:
        await self._process.stop()
        await asyncio.sleep(FLUSH_S)
        for call in list(self._running):
            call.close_websocket(RESTART, "the service restarts")
        self.loop.stop()
