"""A WSGI application as an ASGI application, on as many threads as calls of it may run at once.

`environ` is that of a2wsgi, whose responder occupies a thread until the client has read the response. Its body is not
one of PEP 3333, either: `readline(n)` finds its end at its start, `readlines()` fails if it is empty, and it passes an
incomplete body on as complete.
"""

from __future__ import annotations

import asyncio
import io
import shutil
import tempfile
from collections.abc import Awaitable, Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from typing import Any

from a2wsgi.wsgi import build_environ

from cortex.predictor.applications import ON_THREAD
from cortex.predictor.user_forks import end_if_forked, ending_forks, process_id

Message = dict[str, Any]
Send = Callable[[Message], Awaitable[None]]

#: Larger bodies of unknown length are on the disk.
_MEMORY_BYTES = 1024 * 1024


def wsgi_as_asgi(app: Any, threads: int) -> Callable[[Any, Any, Any], Awaitable[None]]:
    """Return a WSGI application as an ASGI application that runs on `threads` threads."""
    pool, free = ThreadPoolExecutor(threads, thread_name_prefix="WSGI"), asyncio.Semaphore(threads)

    async def asgi(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            with tempfile.SpooledTemporaryFile(_MEMORY_BYTES) as file:
                await _Call(app, scope, receive, send, file).run(pool, free)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1000})

    return asgi


class _Call:
    """One call of the application. It leaves its thread to other calls while its client reads nothing."""

    def __init__(self, app: Any, scope: Any, receive: Any, send: Send, file: Any) -> None:
        """Create the call; `file` is empty."""
        self._app = app
        self._to_client = send
        self._file = file
        self._loop = asyncio.get_running_loop()
        self._pid = process_id()
        # `environ` has one key for X-Forwarded-For and X_Forwarded_For: clients could forge what the gateway sets.
        headers = [header for header in scope["headers"] if b"_" not in header[0]]
        body: Any = io.BufferedReader(_RequestBody(receive, self._loop))
        scope = {**scope, "headers": headers}
        self._environ: Any = build_environ(scope, body)
        self._response: Iterable[bytes] | None = None
        self._parts: Iterator[bytes] = iter(())
        self._head: list[Message] = []  #: until it is sent
        self._sending: asyncio.Task[None] | None = None  #: of the last part
        self._is_started = False  #: the head is sent
        self._failure: Exception | None = None  #: of `send`, between two runs on a thread
        self._error: Any = None  #: what the application has passed to `start_response`

    async def run(self, pool: ThreadPoolExecutor, free: asyncio.Semaphore) -> None:
        """Run the application. Raises: what it raises, or has passed to `start_response`."""
        run, step = copy_context().run, ending_forks(self._run_on_thread)
        is_complete = False
        while not is_complete:
            if self._sending is not None:
                await asyncio.wait([self._sending])
            async with free:
                try:
                    await self._to_client({"type": ON_THREAD})
                except Exception as error:  # the client has disconnected: raised for the thread
                    self._failure = error
                is_complete = await self._loop.run_in_executor(pool, run, step)
        if self._error is not None:
            raise self._error

    def _run_on_thread(self) -> bool:
        """Run the application, and return whether its response is complete; otherwise, its client is slow.

        The response is closed once its last part is sent: work after it delays nothing.
        """
        is_slow = False
        try:
            if self._failure is not None:
                raise self._failure
            if self._response is None:
                self._buffer_body()
                self._response = self._app(self._environ, self._start_response)
                self._parts = iter(self._response)
            elif self._sending is not None:
                self._sending.result()
            for part in self._parts:
                self._is_started = True
                self._sending = self._begin_to_send(_body(part, more=True))
                if is_slow := not self._sending.done():
                    return False
                self._sending.result()
            self._send(_body(b"", more=False))
            return True
        finally:
            end_if_forked(self._pid)
            if not is_slow:
                getattr(self._response, "close", lambda: None)()

    def _buffer_body(self) -> None:
        """Read a body of unknown length: frameworks read no more than CONTENT_LENGTH."""
        if self._environ.pop("HTTP_TRANSFER_ENCODING", None) is not None:
            shutil.copyfileobj(self._environ["wsgi.input"], self._file)
            self._environ["CONTENT_LENGTH"] = str(self._file.tell())
            self._file.seek(0)
            self._environ["wsgi.input"] = self._file

    def _start_response(self, status: str, headers: list[tuple[str, str]], exc_info: Any = None) -> Any:
        end_if_forked(self._pid)
        if exc_info is not None:
            self._error = exc_info[1]
            if self._is_started:
                raise self._error
        encoded = [(name.strip().lower().encode("latin-1"), value.strip().encode("latin-1")) for name, value in headers]
        start = {"type": "http.response.start", "status": int(status.split(" ", 1)[0]), "headers": encoded}
        self._head = [start]
        return self._write

    def _write(self, part: bytes) -> None:
        """Send a part from within the application, which occupies its thread until the client has read enough."""
        self._is_started = True
        self._send(_body(part, more=True))
        self._send({"type": ON_THREAD})

    def _send(self, message: Message) -> None:
        """Send a message. Raises: what `send` raises, if the client has disconnected."""
        end_if_forked(self._pid)
        asyncio.run_coroutine_threadsafe(self._send_with_head(message), self._loop).result()

    def _begin_to_send(self, message: Message) -> asyncio.Task[None]:
        """Begin to send a message; return the task once it is done, or waits for the client."""
        end_if_forked(self._pid)
        begun: Future[asyncio.Task[None]] = Future()

        def begin() -> None:
            task = self._loop.create_task(self._send_with_head(message))
            self._loop.call_soon(begun.set_result, task)  # after its first step

        self._loop.call_soon_threadsafe(begin)
        return begun.result()

    async def _send_with_head(self, message: Message) -> None:
        messages, self._head = [*self._head, message], []
        for each in messages:
            await self._to_client(each)


def _body(part: bytes, *, more: bool) -> Message:
    return {"type": "http.response.body", "body": part, "more_body": more}


class _RequestBody(io.RawIOBase):
    """The body of a request, for a thread; `receive` returns its parts on the event loop."""

    def __init__(self, receive: Callable[[], Any], loop: asyncio.AbstractEventLoop) -> None:
        self._receive = receive
        self._loop = loop
        self._part = memoryview(b"")
        self._has_more = True

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Read what has arrived, at least a byte; 0 at the end. Raises: ConnectionResetError."""
        while not self._part and self._has_more:
            message = asyncio.run_coroutine_threadsafe(self._receive(), self._loop).result()
            if message["type"] == "http.disconnect":
                raise ConnectionResetError("the client disconnected before its request was complete")
            self._part = memoryview(message.get("body", b""))
            self._has_more = message.get("more_body", False)
        size = min(len(buffer), len(self._part))
        buffer[:size], self._part = self._part[:size], self._part[size:]
        return size
