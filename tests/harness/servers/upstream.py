"""Simple HTTP servers in place of replicas, a simple HTTP client, and a gateway between them."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import parse_qs, urlsplit

import httptools
import orjson
import uvloop

from cortex.gateway.config import GatewaySettings
from cortex.gateway.haproxy import HaproxyGateway
from cortex.gateway.routes import ApiBackend, RoutingTable, Server
from cortex.home import Home
from harness.ports import free_port
from harness.wait import SLACK

T = TypeVar("T")


def run(scenario: Coroutine[Any, Any, T], timeout_s: float = 240.0) -> T:
    """Run a test's coroutine on the loop that the operator uses."""
    return uvloop.run(asyncio.wait_for(scenario, timeout_s))


class Upstream:
    """A server on a unix socket, or on a free TCP port, that returns each request as JSON.

    Query parameters change the response: `?sleep=0.5` delays it, `?wait=1` delays it until `release`, `?size=1000`
    sends that many bytes, `?close=1` closes the connection instead, `?chunks=1` sends one chunk and leaves the
    connection in `open_streams`, `?header=name:value` adds a header, `?status=400` sets the status. While `mute` is
    set, no request is answered.
    """

    def __init__(self, path: Path, host: str = "") -> None:
        self.path = path
        self.host = host
        self.address = str(path)  #: address for the gateway; set by `start`
        self.served = 0
        self.aborted = 0
        self.live = 0
        self.most_live = 0
        self.mute = False
        self.seen: deque[dict[str, Any]] = deque(maxlen=100)
        self.open_streams: list[asyncio.Transport] = []
        self.waiting: deque[Callable[[], None]] = deque()
        self.connections: set[_Connection] = set()
        self._server: asyncio.Server | None = None

    async def start(self) -> Upstream:
        loop = asyncio.get_running_loop()
        if self.host:
            self._server = await loop.create_server(lambda: _Connection(self), self.host, 0, backlog=1024)
            host, port = self._server.sockets[0].getsockname()[:2]
            self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        else:
            self._server = await loop.create_unix_server(lambda: _Connection(self), str(self.path), backlog=1024)
        return self

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
        for connection in list(self.connections):
            connection.transport.abort()

    def release(self, count: int) -> None:
        """Answer the oldest requests with `?wait=1`."""
        for _ in range(count):
            self.waiting.popleft()()


class _Connection(asyncio.Protocol):
    transport: asyncio.Transport
    _headers: dict[str, str]
    _all_headers: list[tuple[str, str]]

    def __init__(self, upstream: Upstream) -> None:
        self._upstream = upstream
        self._parser = httptools.HttpRequestParser(self)
        self._busy = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]
        self._upstream.connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._upstream.connections.discard(self)
        if self._busy:
            self._upstream.live -= 1
            self._upstream.aborted += 1
            self._busy = False

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_message_begin(self) -> None:
        self._url, self._headers, self._all_headers, self._body = b"", {}, [], b""
        self._busy = True
        self._upstream.live += 1
        self._upstream.most_live = max(self._upstream.most_live, self._upstream.live)

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.decode().lower()] = value.decode("latin-1")
        self._all_headers.append((name.decode().lower(), value.decode("latin-1")))

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        query = parse_qs(urlsplit(self._url.decode()).query)
        delay_s = float(query.get("sleep", ["0"])[0])
        if self._upstream.mute:
            return
        if "wait" in query:
            self._upstream.waiting.append(lambda: self._answer(query))
        elif delay_s:
            asyncio.get_running_loop().call_later(delay_s, self._answer, query)
        else:
            self._answer(query)

    def _answer(self, query: dict[str, list[str]]) -> None:
        if not self._busy:
            return
        method = self._parser.get_method().decode()
        seen = {"method": method, "url": self._url.decode(), "headers": self._headers, "body": len(self._body)}
        self._upstream.seen.append({**seen, "all_headers": self._all_headers})
        self._busy = False
        self._upstream.live -= 1
        self._upstream.served += 1
        if "close" in query:
            self.transport.close()
        elif "chunks" in query:
            self.transport.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\nx\r\n")
            self._upstream.open_streams.append(self.transport)
        elif "size" in query:
            self._write(b"x" * int(query["size"][0]), query)
        else:
            self._write(orjson.dumps({"server": self._upstream.path.name, **seen}), query)

    def _write(self, body: bytes, query: dict[str, list[str]]) -> None:
        status = query.get("status", ["200"])[0].encode()
        head = b"HTTP/1.1 %s OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n" % (status, len(body))
        self.transport.write(
            head + "".join(f"{line}\r\n" for line in query.get("header", ())).encode() + b"\r\n" + body
        )


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return orjson.loads(self.body)


class Client:
    """One connection to the gateway, opened at the first request and kept alive."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.reader: asyncio.StreamReader | None = None
        self.writer: asyncio.StreamWriter | None = None
        self.connects = 0

    async def connect(self) -> asyncio.StreamWriter:
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self._port)
        self.connects += 1
        return self.writer

    async def get(self, target: str, **headers: str) -> Answer:
        return await self.request("GET", target, b"", headers)

    async def request(self, method: str, target: str, body: bytes, headers: dict[str, str]) -> Answer:
        writer = self.writer or await self.connect()
        lines = [f"{method} {target} HTTP/1.1", "host: gateway", *(f"{k}: {v}" for k, v in headers.items())]
        if body or method == "POST":
            lines.append(f"content-length: {len(body)}")
        writer.write("\r\n".join([*lines, "", ""]).encode() + body)
        return await self.answer(head_only=method == "HEAD")

    async def answer(self, head_only: bool = False) -> Answer:
        assert self.reader is not None
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        first, *rest = head.rstrip().split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in rest)}
        length = 0 if head_only else int(headers.get("content-length", "0"))
        body = await self.reader.readexactly(length)
        if headers.get("connection") == "close":
            self.close()
        return Answer(int(first.split()[1]), headers, body)

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()
        self.reader = self.writer = None


async def ask(port: int, target: str, method: str = "GET", body: bytes = b"", **headers: str) -> Answer:
    """Send one request on a connection of its own."""
    client = Client(port)
    try:
        return await client.request(method, target, body, headers)
    finally:
        client.close()


async def eventually(predicate: Callable[[], Awaitable[T]], timeout_s: float = 10.0) -> T:
    """Poll until the result is truthy, and return it; `timeout_s` is for an idle machine. Raises: TimeoutError."""
    async with asyncio.timeout(timeout_s * SLACK):
        while True:
            value = await predicate()
            if value:
                return value
            await asyncio.sleep(0.01)


def backend(name: str, *servers: Server, **settings: Any) -> ApiBackend:
    """Return the backend of an API whose endpoint is its name."""
    defaults: dict[str, Any] = {
        "endpoint": f"/{name}", "timeout_s": 10.0, "max_body_bytes": 10_000_000, "max_queue": 100,
        "unavailable": "starting",
    }  # fmt: skip
    return ApiBackend(api=name, servers=servers, **{**defaults, **settings})


def table(*backends: ApiBackend, **fields: Any) -> RoutingTable:
    return RoutingTable(tuple(sorted(backends, key=lambda each: each.api)), **fields)


class World:
    """A home with its gateway and the servers behind it."""

    def __init__(self, home: Home, settings: GatewaySettings) -> None:
        self.home, self.settings, self.port = home, settings, settings.port
        self.gateways: list[HaproxyGateway] = []
        self.gateway = self.another_gateway()
        self.upstreams: dict[str, Upstream] = {}

    def another_gateway(self) -> HaproxyGateway:
        """Return the gateway object of a next operator; the test stops it at its end, also if it fails."""
        self.gateways.append(HaproxyGateway(self.home, self.settings))
        return self.gateways[-1]

    async def server(self, name: str, capacity: int = 10, host: str = "") -> Server:
        if name not in self.upstreams:
            self.upstreams[name] = await Upstream(self.home.sockets_dir / name, host).start()
        return Server(name, self.upstreams[name].address, capacity)


@contextlib.asynccontextmanager
async def world(home: Home, **settings: Any) -> AsyncIterator[World]:
    """Yield a gateway that is not started yet; stop everything afterwards."""
    made = World(home, GatewaySettings(port=free_port(), **settings))
    try:
        yield made
    finally:
        async with contextlib.AsyncExitStack() as ends:  # all of them, even if one raises
            for upstream in made.upstreams.values():
                ends.push_async_callback(upstream.stop)
            for gateway in made.gateways:
                ends.push_async_callback(gateway.stop)


async def release(made: World, count: int) -> None:
    """Answer this many requests with `?wait=1`, at any of the servers, as they arrive."""
    for _ in range(count):

        async def waiting() -> Upstream | None:
            return next((each for each in made.upstreams.values() if each.waiting), None)

        upstream = await eventually(waiting)
        assert upstream is not None
        upstream.release(1)


class Load:
    """Keep-alive clients that send requests continuously, and collect every response that is not 200."""

    def __init__(self, port: int, target: str, clients: int = 8, pause_s: float = 0.03) -> None:
        self._port, self._target, self._pause_s = port, target, pause_s
        self.clients = [Client(port) for _ in range(clients)]
        self.answers = 0
        self.failures: list[str] = []
        self._going = True
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Load:
        self._tasks = [asyncio.create_task(self._send(client)) for client in self.clients]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._going = False
        await asyncio.gather(*self._tasks)
        for client in self.clients:
            client.close()

    async def more(self, count: int = 40) -> None:
        """Wait for `count` further responses."""
        goal = self.answers + count

        async def reached() -> bool:
            return self.answers >= goal

        await eventually(reached)

    async def _send(self, client: Client) -> None:
        while self._going:
            try:
                answer = await client.get(self._target)
                if answer.status != 200:
                    self.failures.append(f"{answer.status} {answer.body!r}")
            except (OSError, asyncio.IncompleteReadError) as error:
                self.failures.append(repr(error))
                client.close()
            self.answers += 1
            await asyncio.sleep(self._pause_s)


async def _serve(path: str) -> None:
    await Upstream(Path(path)).start()
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(_serve(sys.argv[1]))
