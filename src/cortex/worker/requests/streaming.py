"""Streaming responses: chunks of a user's generator, or the body of a starlette response that sends itself.

Chunks are produced on a handler thread or on the event loop. A slow client suspends its generator once
`MAX_UNSENT_BYTES` are waiting for it: other calls use the thread and the call slot meanwhile. After the API's timeout
without progress, its call ends, and its connection once it has read what was sent.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from cortex.errors import UserError, type_name
from cortex.predictor.binding import BoundMethod
from cortex.predictor.user_forks import await_ending_forks, end_if_forked, process_id
from cortex.worker.http.background_tasks import contain_exit
from cortex.worker.http.cancellation import log_late_cleanup
from cortex.worker.http.connection import Connection
from cortex.worker.http.responses import BODILESS, NO_HEADERS, Header, ValidHeaders, validate_head
from cortex.worker.http.streaming_connection import declared_length
from cortex.worker.requests.calls import FailedCall
from cortex.worker.requests.payload import (
    BYTES,
    JSON_LINES,
    TEXT,
    encode_chunk,
    stream_media_type,
    validate_part,
)
from cortex.worker.requests.runner import Runner

if TYPE_CHECKING:
    from starlette.responses import Response

MAX_UNSENT_BYTES = 8 * 1024 * 1024
#: A thread may produce chunks of so many bytes before the event loop has written them; each counts as some more.
_MAX_AHEAD_BYTES, _CHUNK_BYTES = 256 * 1024, 1024
_END = object()
#: Content types of streams, by what OpenAPI documents show.
_ANNOTATED = {"application/x-ndjson": JSON_LINES, "text/plain": TEXT, "application/octet-stream": BYTES}


@dataclass(frozen=True)
class StreamHead:
    """The head of a streaming response."""

    status: int = 200
    media_type: bytes | None = None  #: None: determined by the first chunk; empty: one of `headers`
    headers: ValidHeaders = NO_HEADERS
    media_type_if_empty: bytes | None = None  #: used without chunks, if `media_type` is None

    @classmethod
    def of_items(cls, method: BoundMethod) -> StreamHead:
        """Return the head of the items of a method, which may annotate their type."""
        return cls(media_type_if_empty=_ANNOTATED.get(method.signature.result.media_type))


class ResponseStream:
    """One streaming response. Its head is sent with the first chunk, so that an error before it is still a 500."""

    def __init__(
        self,
        connection: Connection,
        runner: Runner,
        timeout_ns: int,
        grace_ns: int,
        on_error: Callable[[BaseException], FailedCall | None],
        head: StreamHead,
    ) -> None:
        """Create the stream; `on_error` logs an exception of user code, or returns the response that it asks for."""
        self._connection = connection
        self._request_id = connection.request_id.decode("latin-1")
        self._runner = runner
        self._timeout_ns = timeout_ns
        self._grace_ns = grace_ns  #: of calls on the event loop, until the supervisor takes it for blocked
        self._timeout_s = timeout_ns / 1e9
        self._on_error = on_error
        self._head = head
        self._pid = process_id()
        self._started = False
        self._is_cut_off = False  #: the client is too slow
        self._has_failed = False  #: the event loop could not write a chunk
        self._is_written = threading.Event()  #: the event loop has all chunks of the thread
        self._steps_begun = self._steps_done = 0  #: of the event loop, for the thread
        self._is_writable = True

    def run(self, chunks: Iterator[Any]) -> bool:
        """Iterate on a handler thread; the connection is only accessed on the event loop.

        Returns whether the call has ended; otherwise the client is slow: call it again after `writable`. The thread
        waits until the first chunk is sent, because it would keep the event loop from the GIL; then after each
        `_MAX_AHEAD_BYTES`, because it produces chunks faster than the loop can send them.
        """
        try:
            if self._started:
                self._extend_deadline()
                self._connection.wait_for_client(False)
            if self._is_cut_off or self._connection.is_abandoned:
                _close(chunks)
                end_if_forked(self._pid)
                return True
            ahead = _MAX_AHEAD_BYTES  # the first chunk
            for chunk in chunks:
                end_if_forked(self._pid)
                data = encode_chunk(chunk)
                self._run_on_loop(self._write, chunk, data)
                self._extend_deadline()
                ahead += len(data) + _CHUNK_BYTES
                if ahead > _MAX_AHEAD_BYTES:
                    self._wait_for_loop()
                    ahead = 0
                if self._connection.is_abandoned or self._has_failed:
                    _close(chunks)
                    end_if_forked(self._pid)
                    return True
                if not self._is_writable:
                    self._connection.wait_for_client(True)
                    return False
            end_if_forked(self._pid)
            self._run_on_loop(self._end)
        except BaseException as error:  # the edge of the user's code
            self._run_on_loop(self._abort, error, self._refuse_or_log(error))
        return True

    def _run_on_loop(self, step: Callable[..., None], *args: Any) -> None:
        """Run a step on the event loop, unless an earlier one has failed. On the thread that produces chunks."""

        def run() -> None:
            try:
                if not self._has_failed:
                    step(*args)
            except Exception as error:  # the thread must not wait for it
                self._has_failed = True
                self._abort(error, self._refuse_or_log(error))
            finally:
                self._steps_done += 1
                if self._steps_done == self._steps_begun:
                    self._is_written.set()

        self._steps_begun += 1
        self._runner.wake(run)

    def _wait_for_loop(self) -> None:
        """Wait until the event loop has written all chunks. On the thread that produces them."""
        while self._steps_done < self._steps_begun:
            self._is_written.clear()
            if self._steps_done < self._steps_begun:
                self._is_written.wait()

    async def writable(self) -> None:
        """Wait until the client has read what was sent; cut it off if it reads nothing for the timeout of the API."""
        self._connection.wait_for_client(True)
        if not await self._connection.flushed_in_time(self._timeout_s):
            self._is_cut_off = True
            self._connection.cut_off_slow_client(self._timeout_s)
        self._is_writable = True

    async def run_async(
        self, chunks: AsyncIterable[Any] | Iterator[Any], on_wait: Callable[[], None], on_resume: Callable[[], None]
    ) -> None:
        """Iterate on the event loop; `on_wait` is called before a slow client is awaited, and `on_resume` after it."""
        source = chunks if isinstance(chunks, AsyncIterable) else self._as_async(chunks)
        iterator = source.__aiter__()
        try:
            while not self._connection.is_abandoned:
                async with asyncio.timeout(self._timeout_s):
                    try:
                        chunk = await await_ending_forks(iterator.__anext__())
                    except StopAsyncIteration:
                        self._end()
                        return
                self._write(chunk, encode_chunk(chunk))
                if not self._is_writable:
                    on_wait()
                    try:
                        await self.writable()
                    finally:
                        on_resume()
                    self._extend_deadline(self._grace_ns)
                    self._connection.wait_for_client(False)
                    if self._is_cut_off:
                        return
                self._extend_deadline(self._grace_ns)
        except BaseException as error:  # the edge of the user's code
            if isinstance(error, asyncio.CancelledError) and not self._connection.open:
                return  # the client has disconnected
            self._abort(error, self._refuse_or_log(error))
        finally:
            if isinstance(iterator, AsyncGenerator):
                await self._close_async(iterator)

    async def _close_async(self, chunks: AsyncGenerator[Any, None]) -> None:
        """Close a generator, which is cancelled if that takes longer than a call may take."""
        try:
            async with asyncio.timeout(self._timeout_s) as limit:
                await chunks.aclose()
        except TimeoutError:
            if not limit.expired():
                raise
            log_late_cleanup(self._request_id, self._timeout_s)

    async def _as_async(self, chunks: Iterator[Any]) -> AsyncGenerator[Any, None]:
        """Iterate over a plain generator that an `async def` method returned."""
        try:
            while (chunk := self._runner.call_inline(next, chunks, _END)) is not _END:
                yield chunk
        finally:
            self._runner.call_inline(_close, chunks)

    def _extend_deadline(self, grace_ns: int = 0) -> None:
        self._connection.extend(time.monotonic_ns() + self._timeout_ns + grace_ns)

    def _write(self, chunk: Any, data: bytes) -> None:
        connection = self._connection
        if self._started:
            connection.stream(data)
        else:
            self._start(stream_media_type(chunk), data)
        self._is_writable = connection.unsent_bytes <= MAX_UNSENT_BYTES

    def _start(self, media_type: bytes | None, chunk: bytes = b"") -> None:
        self._started = True
        head = self._head
        media_type = media_type if head.media_type is None else head.media_type
        self._connection.start_stream(head.status, media_type, head.headers, chunk)

    def _end(self) -> None:
        if not self._started:
            self._start(self._head.media_type_if_empty)
        self._connection.end_stream()

    def _refuse_or_log(self, error: BaseException) -> FailedCall | None:
        end_if_forked(self._pid)
        return self._on_error(error)

    def _abort(self, error: BaseException, refused: FailedCall | None) -> None:
        """Respond with an error if the response has not begun; disconnect otherwise."""
        if self._started:
            self._connection.abort()
        elif refused is not None:
            self._connection.respond_error(refused.status, refused.message, refused.headers, refused.fields)
        else:
            message = f"{type_name(error)} before the first chunk; the logs have the traceback"
            self._connection.respond_error(500, f"internal server error: {message}")


def _close(chunks: Iterator[Any]) -> None:
    close = getattr(chunks, "close", None)
    if close is not None:
        close()


class OpenedResponse(NamedTuple):
    """The head of a starlette response and its body; call `aclose()` on a body that is not read to its end."""

    status: int
    headers: ValidHeaders  #: without those that the connection writes itself
    chunks: AsyncGenerator[bytes, None]
    done: asyncio.Task[None]  #: ends with the response's background task, and raises what that task raised


async def open_response(response: Response, headers: Iterable[Header] = (), method: str = "GET") -> OpenedResponse:
    """Start a starlette response and wait for its head; its background task runs after the last chunk is taken.

    `headers` and `method` are those of the request, for range requests of files. Raises what the response raises.
    """
    call = _AsgiCall(response, headers, method)
    try:
        head = await call.next()
        if head is None:
            raise UserError(f"{type_name(response)} ended without an answer")
        headers_sent = validate_head(head["status"], head.get("headers", ()))
        length = declared_length(head.get("headers", ())) if method != "HEAD" else None
        length = None if head["status"] in BODILESS else length
    except BaseException:
        await call.close()
        raise
    return OpenedResponse(head["status"], headers_sent, call.chunks(length), call.task)


class _AsgiCall:
    """One ASGI call of a response; at most one message is queued, so that a slow client slows the response down."""

    def __init__(self, response: Response, headers: Iterable[Header], method: str) -> None:
        self._messages: asyncio.Queue[Any] = asyncio.Queue(maxsize=1)
        self._response = response
        self._body_sent = False
        self._error: Exception | None = None
        self._closing = False
        self._scope = {
            "type": "http",
            # From 2.4 on a response detects a disconnected client itself, without a task that waits for it.
            "asgi": {"version": "3.0", "spec_version": "2.4"},
            "http_version": "1.1",
            "method": method,
            "path": "/",
            "query_string": b"",
            "headers": [(name.lower(), value) for name, value in headers],
        }
        self.task = asyncio.ensure_future(self._run())

    async def next(self) -> Any:
        """Return the next message, None at the end; raises what the response raised."""
        message = await self._messages.get()
        if message is None and self._error is not None:
            raise self._error
        return message

    async def chunks(self, length: int | None) -> AsyncGenerator[bytes, None]:
        """Yield the body; the background task continues after its last chunk.

        Raises: UserError if it does not have the declared length. It is sent in chunks, so nobody else notices that.
        """
        more, sent_bytes = True, 0
        try:
            while more and (message := await self.next()) is not None:
                more = message.get("more_body", False)
                if body := validate_part(message.get("body", b"")):
                    sent_bytes += len(body)
                    yield body
            more = False
            if length is not None and sent_bytes != length:
                raise UserError(f"the body has {sent_bytes} bytes, but its content-length is {length}")
        finally:
            if more:
                await self.close()

    async def close(self) -> None:
        """Cancel the response."""
        self._closing = True
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        # The cancelled task was waiting for the client, so the user's generator was not notified: close it now.
        aclose = getattr(getattr(self._response, "body_iterator", None), "aclose", None)
        if aclose is not None:
            await aclose()

    async def _run(self) -> None:
        try:
            try:
                await contain_exit(self._response(self._scope, self._receive, self._send))
            except asyncio.CancelledError as error:
                if self._closing:
                    raise
                raise RuntimeError("the response cancelled itself") from error
        except Exception as exc:
            if self._body_sent:
                raise  # from the background task
            self._error = exc
        if not self._body_sent:
            await self._messages.put(None)

    async def _send(self, message: Any) -> None:
        if message["type"] not in ("http.response.start", "http.response.body"):
            return
        self._body_sent = message["type"] == "http.response.body" and not message.get("more_body", False)
        await self._messages.put(message)

    async def _receive(self) -> Any:
        return await asyncio.get_running_loop().create_future()  # never done: the task is cancelled on disconnection
