"""Run a starlette response that sends its own body (a stream, a file) and hand that body out in pieces.

It knows ASGI, which such responses speak, and nothing of connections.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from cortex.errors import UserError
from cortex.replica.background_tasks import contained
from cortex.replica.payload import checked_head

if TYPE_CHECKING:
    from starlette.responses import Response

Header = tuple[bytes, bytes]


class OpenedResponse(NamedTuple):
    """The head of an answer and its body, piece by piece; `aclose()` the body if nobody reads it to its end."""

    status: int
    headers: tuple[Header, ...]  #: less those that the server writes itself
    chunks: AsyncGenerator[bytes, None]
    done: asyncio.Task[None]  #: ends with the response's background task, and raises what that raised


async def open_response(response: Response, headers: Iterable[Header] = (), method: str = "GET") -> OpenedResponse:
    """Start a response and wait for its head; its background task runs after the last piece has been taken.

    `headers` and `method` are the request's: files answer ranges. Raises what the response raises.
    """
    run = _Run(response, headers, method)
    try:
        head = await run.next()
        if head is None:
            raise UserError(f"{type(response).__name__} ended without an answer")
        headers_sent = checked_head(head["status"], head.get("headers", ()))
    except BaseException:
        await run.close()
        raise
    return OpenedResponse(head["status"], headers_sent, run.chunks(), run.task)


class _Run:
    """One call of a response; at most one message waits, so a slow reader slows the response down."""

    def __init__(self, response: Response, headers: Iterable[Header], method: str) -> None:
        self._messages: asyncio.Queue[Any] = asyncio.Queue(maxsize=1)
        self._response = response
        self._body_sent = False
        self._error: Exception | None = None
        self._closing = False
        self._scope = {
            "type": "http",
            # From 2.4 on a response notices a lost client by itself and starts no task to wait for it.
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

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        """Yield the body; ends with its last piece, while the background task goes on."""
        more = True
        try:
            while more and (message := await self.next()) is not None:
                more = message.get("more_body", False)
                if body := message.get("body", b""):
                    yield bytes(body)
            more = False
        finally:
            if more:
                await self.close()

    async def close(self) -> None:
        """Stop the response where it is."""
        self._closing = True
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        # The task was waiting for us, not for the user's generator, which has not noticed: let it clean up now.
        aclose = getattr(getattr(self._response, "body_iterator", None), "aclose", None)
        if aclose is not None:
            await aclose()

    async def _run(self) -> None:
        try:
            await self._call()
        except Exception as exc:
            if self._body_sent:
                raise  # the background task's
            self._error = exc
        if not self._body_sent:
            await self._messages.put(None)

    async def _call(self) -> None:
        try:
            await contained(self._response(self._scope, self._receive, self._send))
        except asyncio.CancelledError as error:
            if self._closing:
                raise
            raise RuntimeError("the response cancelled itself") from error

    async def _send(self, message: Any) -> None:
        if message["type"] not in ("http.response.start", "http.response.body"):
            return
        self._body_sent = message["type"] == "http.response.body" and not message.get("more_body", False)
        await self._messages.put(message)

    async def _receive(self) -> Any:
        return await asyncio.get_running_loop().create_future()  # the task is cancelled when the client has gone
