"""Streams and WebSockets of an application that stay open while its neighbours are deployed."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Self

from wsproto import ConnectionType, WSConnection
from wsproto.events import AcceptConnection, CloseConnection, Ping, Request, TextMessage

from harness.installations.installation import Installation
from harness.wait import PATIENCE_S, wait_until

CONFIG = """
    - name: long
      kind: RealtimeAPI
      handler: {type: asgi, path: handler.py, app: app}
      networking: {timeout: 20s}
"""
SOURCE = """
    import asyncio
    from fastapi import FastAPI, WebSocket
    from fastapi.responses import StreamingResponse

    app = FastAPI()

    @app.get("/events")
    async def events():
        async def numbers():
            number = 0
            while True:
                yield f"data: {number}\\n\\n"
                number += 1
                await asyncio.sleep(0.5)
        return StreamingResponse(numbers(), media_type="text/event-stream")

    @app.websocket("/echo")
    async def echo(socket: WebSocket):
        await socket.accept()
        async for text in socket.iter_text():
            await socket.send_text(text)
"""
Client = Callable[[str, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
#: Pause between two messages of a WebSocket's client.
_PAUSE_S = 0.5


class LongConnections:
    """Clients of `SOURCE` in a thread of their own; each checks that it receives every event or message in order."""

    def __init__(self, cortex: Installation) -> None:
        self.ended: list[str] = []  #: connections that ended before `close`, and why
        self.received: dict[str, int] = {}  #: events and messages by connection
        self._host, self._port = cortex.host, cortex.gateway_port
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._tasks: list[asyncio.Task[None]] = []

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(PATIENCE_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def open(self, streams: int, websockets: int) -> None:
        """Open further connections; return once all have received something."""
        asyncio.run_coroutine_threadsafe(self._open(streams, websockets), self._loop).result()
        count = len(self._tasks)
        wait_until(lambda: len(self.received) + len(self.ended) >= count, timeout_s=30)

    def progress(self) -> None:
        """Wait until each open connection has received two further events or messages."""
        before = dict(self.received)
        wait_until(
            lambda: self.ended or all(self.received[name] >= number + 2 for name, number in before.items()),
            timeout_s=20,
        )

    async def _open(self, streams: int, websockets: int) -> None:
        for is_stream in [True] * streams + [False] * websockets:
            name = f"{'stream' if is_stream else 'websocket'} {len(self._tasks)}"
            self._tasks.append(self._loop.create_task(self._watch(name, self._stream if is_stream else self._socket)))

    async def _close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _watch(self, name: str, client: Client) -> None:
        began = time.monotonic()
        try:
            reader, writer = await asyncio.open_connection(self._host, self._port)
            try:
                await client(name, reader, writer)
                reason = "it was closed"
            finally:
                writer.close()
        except (OSError, EOFError, AssertionError) as error:  # also while no gateway listens
            reason = repr(error)
        self.ended.append(f"{name} after {time.monotonic() - began:.1f} s: {reason}")

    async def _stream(self, name: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"GET /long/events HTTP/1.1\r\nhost: x\r\n\r\n")
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 "), head
        number, events = 0, b""
        while True:
            size = int(await reader.readuntil(b"\r\n"), 16)
            events += (await reader.readexactly(size + 2))[:size]  # several at once, if the proxy was late
            *complete, events = events.split(b"\n\n")
            for event in complete:
                assert event == b"data: %d" % number, event
                number += 1
            self.received[name] = number

    async def _socket(self, name: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        protocol = WSConnection(ConnectionType.CLIENT)
        writer.write(protocol.send(Request("x", "/long/echo")))
        number = 0
        while True:
            data = b""
            # A process that is killed before it has read all messages resets the connection: an end without a frame.
            with contextlib.suppress(ConnectionResetError):
                async with asyncio.timeout(PATIENCE_S):  # `wait_for` of Python 3.11 may lose a cancellation
                    data = await reader.read(65536)
            protocol.receive_data(data or None)
            for event in protocol.events():
                if isinstance(event, Ping):
                    writer.write(protocol.send(event.response()))
                    continue
                assert not isinstance(event, CloseConnection), event
                if isinstance(event, TextMessage):
                    assert event.data == str(number), event
                    number += 1
                    self.received[name] = number
                    await asyncio.sleep(_PAUSE_S)
                else:
                    assert isinstance(event, AcceptConnection), event
                writer.write(protocol.send(TextMessage(str(number))))
