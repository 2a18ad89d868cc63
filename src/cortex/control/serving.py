"""The operator's HTTP server: uvicorn, bounded in what callers without a token can take of it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

#: More are closed, those first that have not sent a request: anyone on the machine can open connections.
MAX_CONNECTIONS = 128
#: How long a new connection may wait with its first request.
FIRST_REQUEST_S = 10.0


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


def create_server(app: ASGIApp) -> uvicorn.Server:
    """Return the server of an application; `should_exit` ends it."""
    config = uvicorn.Config(
        app,
        loop="none",
        http=_Protocol,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=1,
    )
    return _Server(config)
