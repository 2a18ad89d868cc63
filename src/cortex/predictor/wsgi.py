"""A WSGI application as an ASGI application: calls and responses by a2wsgi, request bodies by the standard library.

The body of a2wsgi is not one of PEP 3333: `readline(n)` finds its end at its start, and `readlines()` fails if it is
empty. It also passes an incomplete body on as complete.
"""

from __future__ import annotations

import asyncio
import io
import shutil
import tempfile
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import Any

from a2wsgi import WSGIMiddleware

from cortex.predictor.user_forks import end_if_forked, process_id

#: Key of the request's body and its file in the scope, which a2wsgi puts into `environ`.
_BODY = "cortex.body"
_CLIENT = "cortex.client"
#: Larger bodies of unknown length are on the disk.
_MEMORY_BYTES = 1024 * 1024


def wsgi_as_asgi(app: Any, threads: int) -> Callable[[Any, Any, Any], Awaitable[None]]:
    """Return a WSGI application as an ASGI application that runs on `threads` threads."""

    def call(environ: Any, start_response: Any) -> _Response:
        parent = process_id()
        environ["wsgi.input"], file = environ["asgi.scope"][_BODY]
        if environ.pop("HTTP_TRANSFER_ENCODING", None) is not None:  # frameworks read no more than CONTENT_LENGTH
            shutil.copyfileobj(environ["wsgi.input"], file)
            environ["CONTENT_LENGTH"] = str(file.tell())
            file.seek(0)
            environ["wsgi.input"] = file

        response = _Response(start_response, environ["asgi.scope"][_CLIENT], parent)
        try:
            response.parts = app(environ, response.start)
            return response
        except StopIteration as error:  # a future can't have it: the request would hang
            raise RuntimeError("the application raised StopIteration") from error
        finally:
            end_if_forked(parent)

    wsgi: Any = WSGIMiddleware(call, workers=threads)

    async def asgi(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await wsgi(scope, receive, send)
            return
        # `environ` has one key for X-Forwarded-For and X_Forwarded_For: clients could forge what the gateway sets.
        headers = [header for header in scope["headers"] if b"_" not in header[0]]
        body = io.BufferedReader(_RequestBody(receive, asyncio.get_running_loop()))
        client = _Client(send)
        with tempfile.SpooledTemporaryFile(_MEMORY_BYTES) as file:
            await wsgi({**scope, "headers": headers, _BODY: (body, file), _CLIENT: client}, receive, client.send)
        if client.error is not None:
            raise client.error

    return asgi


class _Client:
    """The client of a request. a2wsgi would wait forever for the next part after a `send` that raised."""

    def __init__(self, send: Callable[[Any], Awaitable[None]]) -> None:
        self.error: Exception | None = None
        self._send = send

    async def send(self, message: Any) -> None:
        """Send a message, unless an earlier one has failed."""
        if self.error is None:
            try:
                await self._send(message)
            except Exception as error:  # raised for the thread of the application
                self.error = error


class _Response:
    """The response of an application. Its head is sent with its first bytes: before them, an error can replace it.

    a2wsgi closes it once its last part is sent: work after the response delays nothing.
    """

    def __init__(self, start_response: Callable[..., Callable[[bytes], None]], client: _Client, parent: int) -> None:
        self.parts: Iterable[bytes] = ()
        self._start_response = start_response
        self._head: tuple[str, Any] | None = None
        self._write: Callable[[bytes], None] | None = None  #: once the head is sent
        self._client = client
        self._parent = parent

    def start(self, status: str, headers: Any, exc_info: Any = None) -> Callable[[bytes], None]:
        """Set the head; PEP 3333 calls this `start_response`. Raises: the error in `exc_info`, if the head is sent."""
        end_if_forked(self._parent)
        if exc_info is not None and self._write is not None:
            raise exc_info[1].with_traceback(exc_info[2])
        if exc_info is None and self._head is not None:
            raise RuntimeError("the application called start_response a second time, without exc_info")
        self._head = status, headers
        return self._write_part

    def __iter__(self) -> Iterator[bytes]:
        """Yield the parts, until one can't be sent. Raises: what `send` raised."""
        try:
            for part in self.parts:
                end_if_forked(self._parent)
                if part or self._write is not None:
                    self._send_head()
                    yield part
                    self._check_client()
            self._send_head()
        finally:
            end_if_forked(self._parent)

    def _write_part(self, part: bytes) -> None:
        end_if_forked(self._parent)
        self._send_head()(part)
        self._check_client()

    def _check_client(self) -> None:
        if self._client.error is not None:
            raise self._client.error

    def _send_head(self) -> Callable[[bytes], None]:
        if self._head is None:
            raise RuntimeError("the application has not called start_response")
        if self._write is None:
            self._write = self._start_response(*self._head)
        return self._write

    def close(self) -> None:
        """Close the response of the application."""
        try:
            getattr(self.parts, "close", lambda: None)()
        except StopIteration as error:
            raise RuntimeError("the response of the application raised StopIteration") from error
        finally:
            end_if_forked(self._parent)


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
