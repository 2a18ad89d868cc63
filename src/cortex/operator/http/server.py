"""The operator's HTTP servers: uvicorn, on a port for those with a token and on a socket for gateway and workers."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

#: More are closed, those first that have not sent a request: anyone on the machine can open connections.
MAX_CONNECTIONS = 128
#: How long a new connection may wait with its first request.
FIRST_REQUEST_S = 10.0
#: Gateway and workers keep connections to the jobs socket; whoever closes one first must be they, or a request that is
#: just being sent on it would be lost.
JOBS_KEEP_ALIVE_S = 3600
_JOBS_BACKLOG = 1024


class _Server(uvicorn.Server):
    """uvicorn without its own signal handlers: it would end the process before replicas are let go of."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Protocol(HttpToolsProtocol):
    """A connection that is closed if it never says anything."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.loop.call_later(FIRST_REQUEST_S, self._close_if_silent)
        if len(self.connections) > MAX_CONNECTIONS:
            silent = (other for other in self.connections if isinstance(other, _Protocol) and other.is_silent)
            next((other for other in silent if other is not self), self).transport.close()

    @property
    def is_silent(self) -> bool:
        """Tell whether no request came yet and the connection is still open."""
        return self.cycle is None and not self.transport.is_closing()

    def _close_if_silent(self) -> None:
        if self.cycle is None:
            self.transport.close()


def create_server(app: ASGIApp, tls: ssl.SSLContext | None = None) -> uvicorn.Server:
    """Return the server of an application on a port that anyone on the machine can reach; `should_exit` ends it."""
    return _server(app, _Protocol, keep_alive_s=5, tls=tls)


def create_jobs_server(app: ASGIApp) -> uvicorn.Server:
    """Return the server of an application on a private socket; `should_exit` ends it."""
    return _server(app, HttpToolsProtocol, JOBS_KEEP_ALIVE_S)


def listen_privately(path: Path) -> socket.socket:
    """Open a unix socket that only its owner may use, whatever an operator that was killed left in its place."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    part = path.with_name(f"{path.name}.part")
    part.unlink(missing_ok=True)
    listener.bind(str(part))
    part.chmod(0o600)
    listener.listen(_JOBS_BACKLOG)
    part.rename(path)
    return listener


class _Config(uvicorn.Config):
    """uvicorn's, with a context that is made already, and is given other certificates while it serves."""

    tls: ssl.SSLContext | None = None

    def load(self) -> None:
        super().load()
        self.ssl = self.tls


def _server(
    app: ASGIApp, protocol: type[HttpToolsProtocol], keep_alive_s: int, tls: ssl.SSLContext | None = None
) -> uvicorn.Server:
    config = _Config(
        app,
        loop="none",
        http=protocol,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=keep_alive_s,
        timeout_graceful_shutdown=1,
    )
    config.tls = tls
    return _Server(config)
