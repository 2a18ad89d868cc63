"""A streaming answer: chunks of a generator, produced on a thread or on the loop, written as the client takes them.

A slow client delays its generator only after `MAX_UNSENT_BYTES` are waiting for it, and is given up on after the API's
time-out without progress.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Iterator
from functools import partial
from typing import Any

from cortex.replica.errors import error_body
from cortex.replica.http import Connection
from cortex.replica.payload import encode_chunk, stream_media_type
from cortex.replica.recorder import Recorder
from cortex.replica.response_head import Header
from cortex.replica.runner import Runner

MAX_UNSENT_BYTES = 8 * 1024 * 1024
_NS_PER_S = 1_000_000_000

Log = Callable[[Connection, BaseException], None]


class Stream:
    """One streaming answer. The head is sent with the first chunk, so that an early error is still a 500."""

    def __init__(
        self,
        connection: Connection,
        runner: Runner,
        loop: asyncio.AbstractEventLoop,
        recorder: Recorder,
        timeout_ns: int,
        status: int = 200,
        media_type: bytes | None = None,  # None: by the first chunk; empty: among `headers`
        headers: tuple[Header, ...] = (),
    ) -> None:
        self._connection = connection
        self._runner = runner
        self._loop = loop
        self._recorder = recorder
        self._timeout_ns = timeout_ns
        self._timeout_s = timeout_ns / _NS_PER_S
        self._status = status
        self._media_type = media_type
        self._headers = headers
        self._started = False
        self._room = threading.Event()
        self._room.set()

    def run(self, chunks: Iterator[Any], log: Log) -> None:
        """Take chunks on a handler thread; every touch of the connection happens on the loop."""
        try:
            for chunk in chunks:
                self._runner.wake(partial(self._write, chunk, encode_chunk(chunk)))
                self._extend()
                if not self._room.wait(self._timeout_s) or not self._connection.open:
                    break
            else:
                self._runner.wake(self._end)
                return
            self._runner.wake(self._connection.close)
            _close(chunks)
        except BaseException as error:  # the edge of the user's code
            log(self._connection, error)
            self._runner.wake(partial(self._break, error))

    async def run_async(self, chunks: AsyncIterable[Any] | Iterator[Any], log: Log) -> None:
        """Take chunks on the loop."""
        source = chunks if isinstance(chunks, AsyncIterable) else _as_async(chunks)
        iterator = source.__aiter__()
        try:
            while self._connection.open:
                async with asyncio.timeout(self._timeout_s):
                    try:
                        chunk = await anext(iterator)
                    except StopAsyncIteration:
                        self._end()
                        return
                    self._write(chunk, encode_chunk(chunk))
                    self._extend()
                    if self._connection.unsent_bytes > MAX_UNSENT_BYTES:
                        await self._connection.flushed()
        except BaseException as error:  # the edge of the user's code
            if isinstance(error, asyncio.CancelledError) and not self._connection.open:
                return  # the client is gone
            log(self._connection, error)
            self._break(error)
        finally:
            if isinstance(iterator, AsyncGenerator):
                await iterator.aclose()

    def _extend(self) -> None:
        if self._connection.open:
            self._connection.extend(time.monotonic_ns() + self._timeout_ns)

    def _write(self, chunk: Any, data: bytes) -> None:
        connection = self._connection
        if not self._started:
            self._start(stream_media_type(chunk) if self._media_type is None else self._media_type)
        connection.stream(data)
        if connection.unsent_bytes > MAX_UNSENT_BYTES and self._room.is_set():
            self._room.clear()
            self._loop.create_task(self._make_room())

    async def _make_room(self) -> None:
        await self._connection.flushed()
        self._room.set()

    def _start(self, media_type: bytes | None) -> None:
        self._started = True
        if self._connection.open:
            timing = self._recorder.finish(self._connection, self._status)
            self._connection.start_stream(self._status, media_type, self._headers, timing)

    def _end(self) -> None:
        if not self._started:
            self._start(self._media_type)
        self._connection.end_stream()

    def _break(self, error: BaseException) -> None:
        """End an answer that can't be completed: as an error if it has not begun, else by cutting it off."""
        connection = self._connection
        if self._started:
            connection.close()
        elif connection.open:
            message = (
                f"internal server error: {type(error).__name__} before the first chunk; the logs have the traceback"
            )
            body = error_body(message, connection.request_id.decode("latin-1"))
            connection.answer(500, b"application/json", body, (), self._recorder.finish(connection, 500))


async def _as_async(chunks: Iterator[Any]) -> AsyncGenerator[Any, None]:
    for chunk in chunks:
        yield chunk


def _close(chunks: Iterator[Any]) -> None:
    close = getattr(chunks, "close", None)
    if close is not None:
        close()
