"""The operator's HTTP servers (uvicorn): a TCP port for clients, a Unix socket for the gateway and the job workers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

#: Limit of the TCP port, because anyone on the machine can connect. Beyond it, idle new connections are closed first.
MAX_CONNECTIONS = 128
#: Timeout of a new connection's first request.
FIRST_REQUEST_S = 10.0
#: Keep-alive timeout of the jobs socket, longer than that of its clients: if the server closed a connection first,
#: a request sent at that moment would be lost.
JOBS_KEEP_ALIVE_S = 3600


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: they would end the process before the operator has shut down."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Protocol(HttpToolsProtocol):
    """A connection that is closed if it sends no request."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.loop.call_later(FIRST_REQUEST_S, self._close_if_idle)
        if len(self.connections) > MAX_CONNECTIONS:
            idle = (other for other in self.connections if isinstance(other, _Protocol) and other.is_idle)
            next((other for other in idle if other is not self), self).transport.close()

    @property
    def is_idle(self) -> bool:
        """Return True if the connection is open and has sent no request."""
        return self.cycle is None and not self.transport.is_closing()

    def _close_if_idle(self) -> None:
        if self.cycle is None:
            self.transport.close()


def create_server(app: ASGIApp, tls: ssl.SSLContext | None = None) -> uvicorn.Server:
    """Return the server for the TCP port; `should_exit` stops it."""
    return _server(app, _Protocol, keep_alive_s=5, tls=tls)


def create_jobs_server(app: ASGIApp) -> uvicorn.Server:
    """Return the server for the jobs socket; `should_exit` stops it."""
    return _server(app, HttpToolsProtocol, JOBS_KEEP_ALIVE_S)


class _Config(uvicorn.Config):
    """uvicorn's configuration with an existing TLS context, which gets renewed certificates while serving."""

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
        log_level=logging.WARNING,  # the operator logs its own start, once for both servers
        access_log=False,
        server_header=False,
        timeout_keep_alive=keep_alive_s,
        timeout_graceful_shutdown=1,
    )
    config.tls = tls
    return _Server(config)
