"""The HTTP server of `cortex dev`: routes requests to the processes of APIs, and holds them while code is reloaded.

It does what the gateway does for replicas (`gateway/config.py`): ids, routes, and headers that clients can't set. One
connection to the process serves one request. Its response passes through unchanged, but for the request id.

    client ── TCP ──▶ _ClientConnection ── hold, connect ──▶ process
                 request, parsed, its body in pieces ──▶
                 ◀── response, as it is, until its end
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from httptools import HttpParserUpgrade, HttpRequestParser, HttpResponseParser

from cortex.config.schema import Api
from cortex.lifecycle import ApiKind
from cortex.worker.http.connection import error_body, response_head
from cortex.worker.spec import TERMINAL_HINT

if TYPE_CHECKING:
    from cortex.dev.dev_api import DevApi

_READ_BYTES = 64 * 1024
_SHOWN_PATH = 200
_FIRST_ERROR = 400
#: Longer bodies of errors are cut, so that they are no JSON, and not shown.
_MAX_ERROR_BYTES = 64 * 1024
#: Headers of a connection, which are not those of the request.
_OF_CONNECTION = frozenset({b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer", b"transfer-encoding"})
_HEALTH = frozenset({"/livez", "/readyz", "/healthz"})
#: Paths below the endpoint of a RealtimeAPI without an application.
_SUBPATHS = ("/v2", "/signature")


class UnavailableError(Exception):
    """An API has no process that could answer; the message is the reason."""


@dataclass(frozen=True)
class Head:
    """The head of a request."""

    method: str
    url: bytes
    headers: tuple[tuple[bytes, bytes], ...]
    keeps_alive: bool
    is_chunked: bool
    is_upgrade: bool
    is_http_1_0: bool = False  #: the end of the connection may be that of the response's body

    @property
    def path(self) -> str:
        """Return the path without the query."""
        return self.url.partition(b"?")[0].decode("latin-1")

    def header(self, name: bytes) -> bytes:
        """Return the value of a header; empty without one."""
        return next((value for key, value in self.headers if key == name), b"")


@dataclass(frozen=True)
class _Route:
    upstream: DevApi
    endpoint: str | None = None  #: set for paths below it
    asks_info: bool = False
    documentation: str = ""  #: the path below the endpoint, if `cortex dev` answers it


@dataclass(frozen=True)
class ServedRequest:
    """A request with its status and time, for the terminal."""

    api: str  #: "" if no API has its path
    method: str
    path: str
    status: int  #: 0 if the client disconnected before the response
    seconds: float
    reason: str = ""  #: message of an error response


@dataclass(eq=False)
class _Exchange:
    """A request and its response."""

    head: Head
    request_id: str
    upstream: DevApi | None = None
    started: float = field(default_factory=time.perf_counter)
    status: int = 0
    reason: str = ""  #: message of an error response
    writer: asyncio.StreamWriter | None = None  #: to the process


class DevGateway:
    """Listens on one port for all APIs. `upstreams` may be replaced at any time; without any, it answers 503."""

    def __init__(self, on_response: Callable[[ServedRequest], object]) -> None:
        self.upstreams: Sequence[DevApi] = ()
        #: Cleared while `upstreams` may change: requests with paths that no API has wait until it is set.
        self.paths_known = asyncio.Event()
        self.paths_known.set()
        self._on_response = on_response
        self._numbers = itertools.count(1)
        self._exchanges: set[_Exchange] = set()
        self._clients: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server

    async def start(self, host: str, port: int) -> int:
        """Listen, at any free port for 0; return the port. Raises: OSError."""
        self._server = await asyncio.start_server(self._serve, host, port)
        return int(self._server.sockets[0].getsockname()[1])

    async def stop(self) -> None:
        """Close all connections."""
        self._server.close()
        for task in self._clients:
            task.cancel()
        await asyncio.gather(*self._clients, return_exceptions=True)

    def cut_streams(self, upstream: DevApi, before: float) -> int:
        """Disconnect responses that began before a time (`time.perf_counter`) and still continue; return how many."""
        found = [
            each for each in self._exchanges if each.upstream is upstream and each.status and each.started < before
        ]
        for each in found:
            if each.writer is not None:
                each.writer.transport.abort()
        return len(found)

    # Connections of clients.

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._clients.add(task)
        client = _ClientConnection(reader, writer)
        try:
            while (head := await client.next_head()) is not None:
                exchange = _Exchange(head, f"{time.time_ns() // 1_000_000}-{os.getpid()}-{next(self._numbers)}")
                self._exchanges.add(exchange)
                try:
                    await self._answer(client, exchange)
                finally:
                    self._exchanges.discard(exchange)
                if not head.keeps_alive or head.is_upgrade or client.is_broken:
                    return
        except (OSError, asyncio.CancelledError):
            pass  # the client has disconnected, or `cortex dev` ends
        finally:
            self._clients.discard(task)
            writer.transport.abort() if client.is_broken else writer.close()

    async def _answer(self, client: _ClientConnection, exchange: _Exchange) -> None:
        head = exchange.head
        if client.error:
            await client.respond_error(400, client.error, exchange.request_id)
            return
        route = self._route(head)
        if route is None and head.path not in _HEALTH:
            await self.paths_known.wait()
            route = self._route(head)
        if route is None:
            if head.path in _HEALTH:
                await client.respond(200, b"application/json", b'{"ok": true}', exchange.request_id)
            elif not self.upstreams:
                message = "cortex dev is starting; the terminal shows the URLs once they are ready"
                await client.respond_error(503, message, exchange.request_id)
            else:
                exchange.status, exchange.reason = 404, self._unknown_path(head.path)
                await client.respond_error(404, exchange.reason, exchange.request_id)
                self._report("", exchange)
            return
        if route.documentation:
            from cortex.dev.documentation import documentation_response  # noqa: PLC0415 - many sessions open no page

            response = documentation_response(
                route.upstream.api, route.upstream.signature, route.documentation, head.header(b"accept-encoding")
            )
            headers = tuple(each for each in response.raw_headers if each[0] != b"content-length")
            await client.respond(response.status_code, None, bytes(response.body), exchange.request_id, headers)
            return
        exchange.upstream = route.upstream
        try:
            await self._forward(client, exchange, route)
        finally:
            self._report(route.upstream.api.name, exchange)

    def _report(self, api: str, exchange: _Exchange) -> None:
        seconds = time.perf_counter() - exchange.started
        head = exchange.head
        self._on_response(ServedRequest(api, head.method, head.path, exchange.status, seconds, exchange.reason))

    def _unknown_path(self, path: str) -> str:
        """Return the message for a path of no API; it names the ones that there are."""
        for each in self.upstreams:
            if (below := _below(path, each.api)) is not None:
                paths = "/docs, /openapi.json, /info and /v2" if each.api.kind is ApiKind.REALTIME else "/<id>"
                return f"{each.api.name} has no path {below[:_SHOWN_PATH]}; below its endpoint, it has {paths}"
        endpoints = ", ".join(each.api.networking.endpoint for each in self.upstreams)
        return f"no API has the path {path[:_SHOWN_PATH]}; the endpoints are {endpoints}"

    async def _forward(self, client: _ClientConnection, exchange: _Exchange, route: _Route) -> None:
        try:
            connection = await route.upstream.connect()
        except UnavailableError as error:
            exchange.status, exchange.reason = 503, str(error)
            await client.respond_error(503, exchange.reason, exchange.request_id)
            return
        try:
            reader, writer = await asyncio.open_connection(sock=connection)
            exchange.writer = writer
            writer.write(_request_head(exchange, route, client.host))
            sending = asyncio.create_task(client.send_body(exchange.head, writer))
            try:
                exchange.status = await _Response(exchange, reader, client).relay()
                if not exchange.status and client.is_incomplete:
                    exchange.status, exchange.reason = 400, "the connection ended before the request body was complete"
                    await client.respond_error(400, exchange.reason, exchange.request_id)
                elif not exchange.status and not client.reader.at_eof():
                    await self._answer_for_process(client, exchange, await route.upstream.exit_reason(connection))
            finally:
                sending.cancel()
                await asyncio.gather(sending, return_exceptions=True)
                writer.transport.abort()
        finally:
            route.upstream.disconnect(connection)

    async def _answer_for_process(self, client: _ClientConnection, exchange: _Exchange, exit_reason: str) -> None:
        """Answer a request that its process has not answered: as a replica does, if the process died."""
        if exit_reason:
            exchange.status, exchange.reason = 500, f"the process that handled this request died: {exit_reason}"
        else:
            exchange.status, exchange.reason = 502, "the process of the API closed the connection before it answered"
        await client.respond_error(exchange.status, exchange.reason, exchange.request_id)

    # Routes.

    def _route(self, head: Head) -> _Route | None:
        path = head.path
        found = [each for each in self.upstreams if _below(path, each.api) is not None]
        for upstream in sorted(found, key=lambda each: -len(each.api.networking.endpoint)):
            below = _below(path, upstream.api) or ""
            target = self._drawn(upstream)
            if target is None:
                continue
            if route := _route_below(target, upstream.api, below):
                return route
        return None

    def _drawn(self, upstream: DevApi) -> DevApi | None:
        """Return the API that answers a request to an endpoint: for a TrafficSplitter, one by weight."""
        if upstream.api.kind is not ApiKind.SPLITTER:
            return upstream
        shares = [share for share in upstream.api.apis or () if not share.shadow]
        names = {each.api.name: each for each in self.upstreams}
        targets = [(names[share.name], share.weight) for share in shares if share.name in names]
        if not targets or not any(weight for _, weight in targets):
            return None
        return random.choices([each for each, _ in targets], [weight for _, weight in targets])[0]  # noqa: S311


def _below(path: str, api: Api) -> str | None:
    """Return the part of a path below an endpoint; None if it is elsewhere."""
    endpoint = api.networking.endpoint.rstrip("/")
    below = path.removeprefix(endpoint)
    return below if path.startswith(endpoint) and below[:1] in ("", "/") else None


def _route_below(target: DevApi, owner: Api, below: str) -> _Route | None:
    endpoint = owner.networking.endpoint.rstrip("/")
    api = target.api
    if api.runs_command:
        return _Route(target, endpoint or "/")
    if below in ("", "/"):
        return _Route(target)
    if api.is_application:
        return _Route(target, endpoint or "/")
    if owner.networking.docs and (below in ("/openapi.json", "/docs") or below.startswith("/docs/")):
        return _Route(target, documentation=below)
    if api.kind is not ApiKind.REALTIME:
        return _Route(target, endpoint or "/") if below.count("/") == 1 else None
    if below == "/info":
        return _Route(target, asks_info=True)
    if target.has_routes:
        return _Route(target, endpoint or "/")
    is_served = any(below == each or below.startswith(f"{each}/") for each in _SUBPATHS)
    # Without a process, `connect` waits for one, which may have routes, or raises why there is none.
    return _Route(target, endpoint or "/") if is_served or target.has_routes is None else None


def _request_head(exchange: _Exchange, route: _Route, client_host: str) -> bytes:
    """Return the head of a request for a process, without what clients may not set."""
    head = exchange.head
    lines = [b"%b %b HTTP/1.%d" % (head.method.encode(), head.url, 0 if head.is_http_1_0 else 1)]
    for name, value in head.headers:
        is_of_connection = name in _OF_CONNECTION or (name == b"upgrade" and not head.is_upgrade)
        if not is_of_connection and not name.startswith((b"x-cortex-", b"x-forwarded-")):
            lines.append(b"%b: %b" % (name, value))
    if head.is_chunked:
        lines.append(b"transfer-encoding: chunked")
    if head.is_upgrade:
        lines.append(b"connection: upgrade")
    lines.append(b"x-cortex-request-id: %b" % exchange.request_id.encode())
    if route.endpoint is not None:
        lines.append(b"x-cortex-endpoint: %b" % route.endpoint.encode())
    if route.asks_info:
        lines.append(b"x-cortex-info: 1")
    lines += [b"x-forwarded-for: %b" % client_host.encode(), b"x-forwarded-proto: http"]
    return b"\r\n".join([*lines, b"", b""])


class _ClientConnection:
    """The connection of a client: heads and bodies of its requests, and responses of the gateway itself."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writer = writer
        self.reader = reader
        self.error = ""  #: why what the client has sent is not HTTP
        self.is_broken = False  #: a response was cut off
        self.is_incomplete = False  #: the client has ended its side of the connection within a request
        peer = writer.get_extra_info("peername")
        self.host = str(peer[0]) if peer else ""
        self._parser = HttpRequestParser(self)
        self._events: deque[Head | bytes | None] = deque()  #: heads, pieces of bodies, and None at the end of each
        self._url = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._rest = b""  #: what followed the head of an upgrade

    async def next_head(self) -> Head | None:
        """Return the next request; None if the client has disconnected."""
        while True:
            while self._events:
                event = self._events.popleft()
                if isinstance(event, Head):
                    return event
            if not await self._read():
                return None

    async def send_body(self, head: Head, upstream: asyncio.StreamWriter) -> None:
        """Pass the body of a request on while it arrives; then end the request if the client disconnects."""
        while True:
            while self._events:
                event = self._events.popleft()
                if isinstance(event, bytes):
                    upstream.write(b"%x\r\n%b\r\n" % (len(event), event) if head.is_chunked else event)
                    await upstream.drain()
                elif event is None:
                    if head.is_chunked:
                        upstream.write(b"0\r\n\r\n")
                    await self._watch(head, upstream)
                    return
            if not await self._read():
                self.is_incomplete = True
                upstream.transport.abort()
                return

    async def _watch(self, head: Head, upstream: asyncio.StreamWriter) -> None:
        if head.is_upgrade:
            data = self._rest
            while True:
                upstream.write(data)
                await upstream.drain()
                if not (data := await self.reader.read(_READ_BYTES)):
                    break
        else:
            while not self._events and await self._read():
                pass
            if self._events:
                return  # the next request is here already
        upstream.transport.abort()

    async def _read(self) -> bool:
        data = await self.reader.read(_READ_BYTES)
        if not data:
            return False
        try:
            self._parser.feed_data(data)
        except HttpParserUpgrade as upgrade:
            self._rest = data[upgrade.args[0] :]
        except Exception:  # of httptools
            self.error = "the request is not valid HTTP"
            self._events.append(Head("", b"", (), keeps_alive=False, is_chunked=False, is_upgrade=False))
        return True

    # Callbacks of the parser.

    def on_message_begin(self) -> None:
        """Begin with the next request."""
        self._url, self._headers = b"", []

    def on_url(self, url: bytes) -> None:
        """Append a part of the request target."""
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """Append a header."""
        self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """Complete the head."""
        headers = tuple(self._headers)
        is_chunked = any(name == b"transfer-encoding" and value.lower() == b"chunked" for name, value in headers)
        method = self._parser.get_method().decode("latin-1")
        is_upgrade = self._parser.should_upgrade()
        is_http_1_0 = self._parser.get_http_version() == "1.0"
        keeps_alive = self._parser.should_keep_alive() and not is_http_1_0
        self._events.append(Head(method, self._url, headers, keeps_alive, is_chunked, is_upgrade, is_http_1_0))

    def on_body(self, data: bytes) -> None:
        """Append a piece of the body."""
        self._events.append(bytes(data))

    def on_message_complete(self) -> None:
        """End the request."""
        self._events.append(None)

    # Responses of the gateway.

    async def respond(
        self,
        status: int,
        media_type: bytes | None,
        body: bytes,
        request_id: str,
        headers: tuple[tuple[bytes, bytes], ...] = (),
    ) -> None:
        """Write a response."""
        identified = (*headers, (b"x-cortex-request-id", request_id.encode()))
        start = response_head(status, media_type, identified) + b"content-length: %d\r\n\r\n" % len(body)
        self.writer.write(start + body)
        await self.writer.drain()

    async def respond_error(self, status: int, message: str, request_id: str) -> None:
        """Write an error response."""
        await self.respond(status, b"application/json", error_body(message, request_id), request_id)


class _Response:
    """Relays the response of a process, and finds its end."""

    def __init__(self, exchange: _Exchange, reader: asyncio.StreamReader, client: _ClientConnection) -> None:
        self._exchange = exchange
        self._reader = reader
        self._client = client
        self._is_over = False
        self._error_body = b""
        self._parser = HttpResponseParser(self)

    async def relay(self) -> int:
        """Pass the response on; return its status, 0 without one."""
        head = await self._read_head()
        if head is None:
            return 0
        start, rest = head
        status = self._exchange.status = int(start[9:12])
        line, _, fields = start.partition(b"\r\n")
        request_id = b"x-cortex-request-id: %b\r\n" % self._exchange.request_id.encode()
        kept = (each for each in fields.splitlines(keepends=True) if not each.lower().startswith(b"x-cortex-"))
        self._client.writer.write(line + b"\r\n" + request_id + b"".join(kept) + rest)
        if status == 101:
            await self._relay_rest()
            return status
        self._feed(start + rest)
        if self._exchange.head.method == "HEAD":
            self._is_over = True
        while not self._is_over:
            await self._client.writer.drain()
            data = await self._read()
            if not data:
                self._client.is_broken = not self._exchange.head.is_http_1_0
                return status
            self._client.writer.write(data)
            self._feed(data)
        await self._client.writer.drain()
        return status

    async def _read_head(self) -> tuple[bytes, bytes] | None:
        """Return the head of the final response, and what follows it; pass interim responses on."""
        data = b""
        while True:
            if b"\r\n\r\n" in data:
                end = data.index(b"\r\n\r\n") + 4
                if not (data[9:10] == b"1" and data[9:12] != b"101"):
                    return data[:end], data[end:]
                self._client.writer.write(data[:end])
                data = data[end:]
                continue
            more = await self._read()
            if not more:
                return None
            data += more

    async def _relay_rest(self) -> None:
        while data := await self._read():
            self._client.writer.write(data)
            await self._client.writer.drain()
        self._client.writer.close()

    async def _read(self) -> bytes:
        try:
            return await self._reader.read(_READ_BYTES)
        except OSError:
            return b""

    def _feed(self, data: bytes) -> None:
        with contextlib.suppress(
            Exception
        ):  # of httptools: after a protocol error the end of the connection is the end
            self._parser.feed_data(data)

    def on_body(self, data: bytes) -> None:
        """Keep the body of an error, for its message."""
        if self._exchange.status >= _FIRST_ERROR and len(self._error_body) < _MAX_ERROR_BYTES:
            self._error_body += data

    def on_message_complete(self) -> None:
        """Note the end of the response."""
        self._is_over = True
        self._exchange.reason = _error_message(self._error_body)


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
