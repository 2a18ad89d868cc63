"""The operator's HTTP servers (uvicorn): a TCP port for clients, a Unix socket for the gateway and the job workers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import uvicorn
from starlette.types import ASGIApp
from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from cortex.errors import UnauthorizedError
from cortex.operator.access.tokens import Principal
from cortex.processes.sockets import replace_listener
from cortex.telemetry import Logger
from cortex.worker.commands.socket_table import SocketTable

#: The user of a client on this machine, or the address of another one.
Peer = int | str

#: Limit of the TCP port, because anyone on the machine can connect. Beyond it, `choose_victim` decides which is closed.
MAX_CONNECTIONS = 128
#: Time for a whole request whose token is not known yet, its response included.
ANONYMOUS_S = 10.0
#: Limit of a head that is not complete, which the parser does not have. The longest are those of browsers with cookies.
MAX_HEAD_BYTES = 256 * 1024
#: Interval of the checks whether connections may stay.
CHECK_S = 2.0
#: Time for the response to a client that has ended its side of the connection, and that may have left.
HALF_CLOSED_S = 30.0
#: Keep-alive timeout of the jobs socket, longer than that of its clients: if the server closed a connection first,
#: a request sent at that moment would be lost.
JOBS_KEEP_ALIVE_S = 3600
_SOCKET_CHECK_S = 1.0
_LAST_ANSWERS_S = 2.0

_logger = Logger("cortex.operator")
_sockets = SocketTable()


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: they would end the process before the operator has shut down."""

    def __init__(self, config: uvicorn.Config, on_shutdown: Callable[[], None] | None = None) -> None:
        super().__init__(config)
        self._on_shutdown = on_shutdown

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Refuse connections, close each one after its present answer, and call `on_shutdown`, which ends long ones."""
        if self._on_shutdown is not None:
            asyncio.get_running_loop().call_soon(self._on_shutdown)
        await super().shutdown(sockets)


class _HTTP10Cycle(RequestResponseCycle):
    """A response to an HTTP/1.0 client, which can't read chunks: one of unknown length ends with the connection."""

    _has_no_length = False

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self._has_no_length = all(name.lower() != b"content-length" for name, _ in message["headers"])
        if self._has_no_length:
            self.chunked_encoding = False
            self.expected_content_length = len(message.get("body", b""))
        await super().send(message)


class _BaseProtocol(HttpToolsProtocol):
    """A connection of either server."""

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        if self.parser.get_http_version() == "1.0":
            self.cycle.__class__ = _HTTP10Cycle


class _Protocol(_BaseProtocol):
    """A connection that keeps its place only while it serves a request that its token or session permits.

    It stays open until the response if its client half-closes it.
    """

    peer: Peer = ""
    idle_since = 0.0  #: time at which it was accepted, or at which its last response was complete
    _served: RequestResponseCycle | None = None
    _head_bytes = 0  #: received since the last request was complete; 0 while a body arrives
    _is_in_head = True

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.peer = _peer_of(transport)
        self.idle_since = self.loop.time()
        self.loop.call_later(CHECK_S, self._check)
        if len(self.connections) > MAX_CONNECTIONS:
            held = [other for other in self.connections if isinstance(other, _Protocol)]
            others = [other for other in held if not other.is_permitted]
            choose_victim((_most_of_one_token(held) if others == [self] else []) or others or [self]).abort()

    def data_received(self, data: bytes) -> None:
        if self._is_in_head:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self.abort()
                return
        super().data_received(data)

    def on_headers_complete(self) -> None:
        self._is_in_head, self._head_bytes = False, 0
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._is_in_head = True
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self.idle_since = self.loop.time()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Return whether the connection stays open for a response. TLS can't be half-closed in asyncio."""
        is_answerable = self.cycle is not None and not (self.cycle.more_body or self.cycle.response_complete)
        if not is_answerable or self.scheme == "https":
            return False
        self.cycle.keep_alive = False
        self.loop.call_later(HALF_CLOSED_S, self.transport.close)
        return True

    @property
    def is_permitted(self) -> bool:
        """Return True while a request is served that its token or session permits, and once the connection is closed.

        The middlewares that check it set the principal, and answer at once if they refuse it.
        """
        return self.transport.is_closing() or self.principal is not None

    @property
    def principal(self) -> Principal | None:
        """Return the principal of the request that is served."""
        served = self._served
        return None if served is None or served.response_complete else served.scope["state"].get("principal")

    def abort(self) -> None:
        """Close the connection at once: a client that reads no responses can't keep it."""
        self.connections.discard(self)
        self.transport.abort()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._served = cycle
        super()._start_asgi_task(cycle, app)

    def _check(self) -> None:
        """Close a connection whose request takes too long without a token, or whose token is not valid any more."""
        if self.transport.is_closing():
            return
        self.loop.call_later(CHECK_S, self._check)
        principal = self.principal
        if principal is None:
            if self.loop.time() - self.idle_since > ANONYMOUS_S:
                self.abort()
        elif isinstance(self.config, _Config):
            try:
                self.config.check_validity(principal)
            except UnauthorizedError:
                self.abort()


class _Idle(Protocol):
    @property
    def peer(self) -> Peer: ...

    @property
    def idle_since(self) -> float: ...


C = TypeVar("C", bound=_Idle)


def choose_victim(connections: Sequence[C]) -> C:
    """Return the connection to close: of the peer that has most of them, the one that has been idle longest."""
    counts = Counter(connection.peer for connection in connections)
    return min(connections, key=lambda connection: (-counts[connection.peer], connection.idle_since))


def _most_of_one_token(connections: Sequence[_Protocol]) -> list[_Protocol]:
    """Return the connections of a token or session that has more than half of all; they make room, too."""
    counts = Counter(each.principal for each in connections if each.principal is not None)
    for principal, count in counts.most_common(1):
        if count > MAX_CONNECTIONS // 2:
            return [each for each in connections if each.principal == principal]
    return []


def _peer_of(transport: asyncio.Transport) -> Peer:
    """Return the user of a client on this machine, which has many addresses; else the address."""
    sock = transport.get_extra_info("socket")
    uid = _sockets.find_user(sock)
    address = transport.get_extra_info("peername")  # None if the client has reset the connection
    return uid if uid is not None else address[0] if address else ""


def create_server(
    app: ASGIApp, tls: ssl.SSLContext | None = None, check_validity: Callable[[Principal], None] = lambda _: None
) -> uvicorn.Server:
    """Return the server for the TCP port; `should_exit` stops it.

    It cuts off responses whose principal `check_validity` raises UnauthorizedError for.
    """
    return _Server(_Config(app, _Protocol, 5, tls, check_validity))


def create_jobs_server(app: ASGIApp, on_shutdown: Callable[[], None] | None = None) -> uvicorn.Server:
    """Return the server for the jobs socket; `should_exit` stops it, and `on_shutdown` ends the requests that wait."""
    return _Server(_Config(app, _BaseProtocol, JOBS_KEEP_ALIVE_S), on_shutdown)


class JobsServer:
    """The server of the jobs socket.

    It listens again if the socket is deleted, as cleaners of `/tmp` do, or if the process that replaced it has ended.
    """

    def __init__(self, app: ASGIApp, path: Path, on_shutdown: Callable[[], None]) -> None:
        self._app = app
        self._path = path
        self._on_shutdown = on_shutdown
        self._servers: list[uvicorn.Server] = []
        self._serving: list[asyncio.Task[None]] = []
        self._inode = 0  #: of the socket at which the last server listens

    def listen(self) -> None:
        """Serve at the socket, which replaces one that an earlier process has left."""
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        listener = replace_listener(self._path)
        self._inode = self._path.stat().st_ino
        server = create_jobs_server(self._app, self._on_shutdown)
        self._servers.append(server)
        self._serving.append(asyncio.create_task(server.serve(sockets=[listener]), name="serve workers"))

    async def keep_listening(self) -> None:
        """Listen again whenever nobody listens at the path, until cancelled. Connections of the old socket stay."""
        while True:
            await asyncio.sleep(_SOCKET_CHECK_S)
            if not self._is_listened_at():
                try:
                    self.listen()
                except OSError as error:  # no disk, say: the next check tries again
                    _logger.error("the jobs socket can't be created again", error=error)
                else:
                    _logger.warning("nothing listened at the jobs socket; it is created again", path=str(self._path))

    def _is_listened_at(self) -> bool:
        """Return True if this server listens at the path, or another process: `cortex upgrade`, or a new operator."""
        try:
            if self._path.stat().st_ino == self._inode:
                return True
            with socket.socket(socket.AF_UNIX) as probe:
                probe.setblocking(False)
                probe.connect(str(self._path))
        except (FileNotFoundError, NotADirectoryError, ConnectionRefusedError):
            return False
        except OSError:  # its queue is full, say
            return True
        return True

    async def stop(self) -> None:
        """Stop serving; requests have a second to finish, and those that are cancelled then have time for an answer."""
        for server in self._servers:
            server.should_exit = True
        await asyncio.gather(*self._serving)
        if cancelled := [task for server in self._servers for task in server.server_state.tasks]:
            await asyncio.wait(cancelled, timeout=_LAST_ANSWERS_S)


class _Config(uvicorn.Config):
    """uvicorn's configuration with the check of tokens, and with a TLS context that gets renewed certificates."""

    def __init__(
        self,
        app: ASGIApp,
        protocol: type[HttpToolsProtocol],
        keep_alive_s: int,
        tls: ssl.SSLContext | None = None,
        check_validity: Callable[[Principal], None] = lambda _: None,
    ) -> None:
        super().__init__(
            app,
            loop="none",
            http=protocol,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level=logging.WARNING,  # the operator logs its own start, once for both servers
            access_log=False,
            server_header=False,
            timeout_keep_alive=keep_alive_s,
            timeout_graceful_shutdown=1,
        )
        self.tls, self.check_validity = tls, check_validity

    def load(self) -> None:
        super().load()
        self.ssl = self.tls
