"""The HTTP gateway of `cortex dev`: passes requests to the processes of APIs, and holds them while code is reloaded.

It does what the gateway does for replicas (`gateway/config.py`), with the connections of a worker and with the proxy
before the server of a command. One connection to the process serves one request.

    client ── TCP ──▶ DevConnection ──▶ _ProcessCall ── hold, connect ──▶ process
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING
from urllib.parse import parse_qs

from cortex.config.schema import Api
from cortex.dev.client_connection import DevConnection, ServedRequest
from cortex.dev.routing import DevRoute, find_route, why_unknown
from cortex.gateway.routes import Share, required_apis
from cortex.lifecycle import ApiKind
from cortex.processes.sockets import accept_one
from cortex.worker.commands.command_call import RESTART, CommandCall
from cortex.worker.commands.forwarding import request_head
from cortex.worker.commands.proxied_server import ProxiedServer
from cortex.worker.commands.upstream import Upstream, UpstreamConnection
from cortex.worker.http.connection import READ_BYTES, Connection
from cortex.worker.http.connection_pool import ConnectionPool
from cortex.worker.http.responses import Header, validate_head
from cortex.worker.monitoring.metrics import RequestRecorder
from cortex.worker.shared_state import MAX_CONNECTIONS, SharedConnectionState
from cortex.worker.spec import TERMINAL_HINT, RequestLimits

if TYPE_CHECKING:
    from cortex.dev.dev_api import DevApi

#: Calls have no deadline, since a debugger may stop them.
TIMEOUT_S = 24 * 3600.0
#: Longer bodies of errors are cut, so that they are no JSON, and not shown.
_MAX_ERROR_BYTES = 64 * 1024
_HEALTH = frozenset({"/livez", "/readyz", "/healthz"})


def _needed_apis(api: Api) -> list[str]:
    """Return the APIs that must serve for an API or TrafficSplitter to be ready, as at the gateway."""
    if api.kind is not ApiKind.SPLITTER:
        return [api.name]
    return required_apis(Share(each.name, each.weight) for each in api.apis or () if not each.shadow)


class UnavailableError(Exception):
    """An API has no process that could answer; the message is the reason."""


class DevGateway(ProxiedServer):
    """Listens on one port for all APIs. `upstreams` may be replaced at any time; without any, it answers 503."""

    limits = RequestLimits(
        timeout_s=TIMEOUT_S, max_body_bytes=sys.maxsize, on_disconnect="cancel", websocket_idle_s=TIMEOUT_S
    )

    def __init__(
        self, on_response: Callable[[ServedRequest], object], notice_changes: Callable[[], Awaitable[None]]
    ) -> None:
        """Create a gateway; it calls `notice_changes` before each request, so that a file saved before counts."""
        self.upstreams: Sequence[DevApi] = ()
        self.notice_changes = notice_changes
        #: Cleared while `upstreams` may change: requests wait until it is set.
        self.paths_known = asyncio.Event()
        self.paths_known.set()
        self._on_response = on_response
        self._listeners: list[socket.socket] = []
        self._accepted = 0
        self._calls: set[_ProcessCall] = set()

    async def start(self, host: str, port: int) -> int:
        """Listen, at any free port for 0; return the port. Raises: OSError."""
        self._loop = loop = asyncio.get_running_loop()
        self.upstream = _Processes(loop)
        connect, recorder = partial(DevConnection, self._on_response), RequestRecorder(None)
        self._pool = ConnectionPool(loop, SharedConnectionState(), recorder, self._handle, self.limits, connect)
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        for family, address in dict.fromkeys((family, address[0]) for family, *_, address in found):
            listener = socket.create_server((str(address), port), family=family, backlog=100)
            port = port or listener.getsockname()[1]
            listener.setblocking(False)
            self._listeners.append(listener)
            loop.add_reader(listener, self._accept, listener)
        return port

    async def stop(self) -> None:
        """Close all connections."""
        for listener in self._listeners:
            self._loop.remove_reader(listener)
            listener.close()
        self._pool.retire(lambda connection: None)
        tasks = [each.task for each in self._calls]
        for each in [*self._calls]:
            each.disconnect()
        await asyncio.gather(*tasks, return_exceptions=True)

    def cut_streams(self, upstream: DevApi, before: float) -> int:
        """Disconnect responses that began before a time (`time.perf_counter`) and still continue; return how many."""
        found = [each for each in self._calls if each.is_stream_of(upstream, before)]
        for each in found:
            each.cut()
        return len(found)

    def _accept(self, listener: socket.socket) -> None:
        sock = accept_one(listener)
        if sock is not None:
            self._accepted += 1
            with contextlib.suppress(OSError):  # the client has disconnected already
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._pool.add(sock, self._accepted % MAX_CONNECTIONS, lambda connection: None)

    def _handle(self, connection: Connection) -> None:
        assert isinstance(connection, DevConnection)
        self._calls.add(_ProcessCall(self, connection, self._calls.discard))


class _Processes(Upstream):
    """The processes, each connection to which is given by its API."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.buffer = memoryview(bytearray(READ_BYTES))

    def connect(self, receiver: CommandCall) -> UpstreamConnection:
        assert isinstance(receiver, _ProcessCall) and receiver.sock is not None
        return _ProcessConnection(self, receiver, receiver.sock)


class _ProcessConnection(UpstreamConnection):
    __slots__ = ()

    def __init__(self, upstream: Upstream, receiver: CommandCall, sock: socket.socket) -> None:
        super().__init__(upstream, receiver)
        sock.setblocking(False)
        self.sock, self._fd, self.is_connected = sock, sock.fileno(), True
        self.resume()


class _ProcessCall(CommandCall):
    """One request: its route, its wait for a process, and its way to the process and back."""

    death_s = 0.0
    max_headers = sys.maxsize  #: the process limits them
    _connection: DevConnection
    _route: DevRoute | None = None
    sock: socket.socket | None = None  #: to the process

    def __init__(self, gateway: DevGateway, connection: DevConnection, on_over: Callable[[_ProcessCall], None]) -> None:
        self._is_done = asyncio.Event()
        deadline_ns = time.monotonic_ns() + int(TIMEOUT_S * 1e9)
        super().__init__(gateway, connection, deadline_ns, lambda call: self._is_done.set())
        self._gateway = gateway
        self._is_lost = False
        self._error_body = b""
        connection.call = self
        self.task = self._loop.create_task(self._run())  # later, because the parser of the connection runs
        self.task.add_done_callback(lambda task: on_over(self))

    async def _run(self) -> None:
        try:
            await self._answer()
        except Exception as error:  # the client must not wait for ever
            self._loop.call_exception_handler({"message": "cortex dev could not pass a request on", "exception": error})
            if self.status:
                self._break_off()
            else:
                self._connection.respond_error(500, "cortex dev could not pass the request on; the terminal shows why")

    async def _answer(self) -> None:
        gateway, connection = self._gateway, self._connection
        path = connection.path
        await gateway.notice_changes()
        await gateway.paths_known.wait()
        route = find_route(path, gateway.upstreams)
        if route is not None and route.asks_ready:
            self._answer_ready([route.upstream])
        elif route is not None and route.documentation:
            self._answer_documentation(route)
        elif route is not None:
            await self._pass_on(route)
        elif path == "/readyz":
            self._answer_all_ready()
        elif path in _HEALTH:
            connection.respond(200, b"application/json", b'{"ok": true}')
        elif not gateway.upstreams:
            connection.respond_error(503, "cortex dev is starting; the terminal shows the URLs once they are ready")
        else:
            connection.api_name = ""
            connection.respond_error(404, why_unknown(path, gateway.upstreams))

    def _answer_all_ready(self) -> None:
        upstreams = {each.api.name: each for each in self._gateway.upstreams}
        asked = parse_qs(self._connection.url.partition(b"?")[2].decode("latin-1")).get("api") or [*upstreams]
        if unknown := [name for name in asked if name not in upstreams]:
            self._connection.respond_error(404, f"{', '.join(unknown)}: no such API")
            return
        self._answer_ready([upstreams[name] for name in asked])

    def _answer_ready(self, asked: Sequence[DevApi]) -> None:
        serving = {each.api.name for each in self._gateway.upstreams if each.is_serving}
        needed = [_needed_apis(each.api) for each in asked]
        is_ready = bool(needed) and all(names and serving.issuperset(names) for names in needed)
        body = b'{"ready":true}' if is_ready else b'{"ready":false}'
        self._connection.respond(200 if is_ready else 503, b"application/json", body)

    def _answer_documentation(self, route: DevRoute) -> None:
        from cortex.dev.documentation import documentation_response  # noqa: PLC0415 - many sessions open no page

        upstream, connection = route.upstream, self._connection
        encodings = dict(connection.headers).get(b"accept-encoding", b"")
        response = documentation_response(upstream.api, upstream.signature, route.documentation, encodings)
        headers = validate_head(response.status_code, response.raw_headers)
        connection.respond(response.status_code, None, bytes(response.body), headers)

    async def _pass_on(self, route: DevRoute) -> None:
        connection, self._route = self._connection, route
        upstream, api = route.upstream, route.upstream.api
        connection.api_name = api.name
        # As at the gateway: to other APIs, what follows an upgrade would be another request.
        has_websockets = (api.is_application or api.runs_command) and connection.method == "GET"
        self._is_upgrade = connection.is_upgrade = connection.is_upgrade and has_websockets
        try:
            self.sock = await upstream.connect()
        except UnavailableError as error:
            if upstream in self._gateway.upstreams:
                connection.respond_error(503, str(error))
            else:  # it was removed meanwhile
                connection.respond_error(404, why_unknown(connection.path, self._gateway.upstreams))
            return
        try:
            self.begin()
            await self._is_done.wait()
            if self._is_lost:
                self._answer_for_process(await upstream.exit_reason(self.sock))
        finally:
            upstream.disconnect(self.sock)

    def _answer_for_process(self, exit_reason: str) -> None:
        """Answer a request that its process has not answered: as a replica does, if the process died."""
        if exit_reason:
            self._respond_error(500, f"the process that handled this request died: {exit_reason}")
        else:
            self._respond_error(502, "the process of the API closed the connection before it answered")

    def is_stream_of(self, upstream: DevApi, before: float) -> bool:
        """Return whether this is a response of an API that began before a time, and still continues."""
        is_of = self._route is not None and self._route.upstream is upstream
        return is_of and self.status > 0 and self._connection.started < before

    def cut(self) -> None:
        """End a response."""
        if self._is_upgraded:
            self.close_websocket(RESTART, "cortex dev runs other code now")
        else:
            self._break_off()

    def disconnect(self) -> None:
        """Close the connection of the client."""
        self._connection.close()

    def wake(self) -> None:
        """Pass on what has arrived of the body; end the call, or the wait, if the client has disconnected."""
        if self.sock is not None:
            super().wake()
        elif self._connection.call is not self:
            self.task.cancel()

    def _request_head(self, method: bytes, target: bytes, headers: Sequence[Header]) -> bytes:
        assert self._route is not None
        head = request_head(method, target, headers, None, self._is_upgrade)
        if self._route.endpoint is not None:
            head += b"x-cortex-endpoint: %b\r\n" % self._route.endpoint.encode()
        return head + b"x-cortex-info: 1\r\n" if self._route.asks_info else head

    def _lost(self) -> None:
        if self._is_upgraded:
            super()._lost()
        else:
            self._is_lost = True
            self._is_done.set()

    # Of the parser.

    def on_header(self, name: bytes, value: bytes) -> None:
        """Collect a header that user code can set."""
        if not name.lower().startswith(b"x-cortex-"):
            super().on_header(name, value)

    def on_body(self, data: bytes) -> None:
        """Collect a part of the body; that of an error has the reason for the terminal."""
        super().on_body(data)
        if self._code >= 400 and len(self._error_body) < _MAX_ERROR_BYTES:
            self._error_body += data

    def on_chunk_complete(self) -> None:
        """Pass on the parts of a stream as they are."""
        if self._code and not self._is_over:
            self._respond()

    def on_message_complete(self) -> None:
        """Note the end of the response."""
        super().on_message_complete()
        self._connection.reason = _error_message(self._error_body)


def _error_message(body: bytes) -> str:
    """Return the message of an error response, of Cortex or of a framework; "" if it has none."""
    try:
        found = json.loads(body)
    except ValueError:
        return ""
    if not isinstance(found, dict):
        return ""
    error = found.get("error", found.get("detail", ""))
    if isinstance(error, dict):  # in OpenAI's form
        error = error.get("message", "")
    return error.replace(TERMINAL_HINT, "") if isinstance(error, str) else json.dumps(error)
