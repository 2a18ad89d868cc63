"""Routes for job workers: join a job, exchange reports for leases, renew leases.

This is plain ASGI, because workers make hundreds of exchanges per second. Each worker has a token of its own, so that
user code, which runs in its process, cannot act for another worker.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import orjson
from starlette.types import Receive, Scope, Send

from cortex.errors import CortexError, NotFoundError, TooLargeError, UnauthorizedError
from cortex.jobs.http import wire
from cortex.jobs.spec import HOOK_SEQ, BatchFailure, Report
from cortex.operator.jobs.dispatcher import Dispatcher
from cortex.telemetry import Logger

PREFIX = "/worker/"
#: Maximum duration of a long poll.
MAX_WAIT_S = 20.0


class WorkerRoutes:
    """ASGI application for job workers. `token` returns the token of a worker."""

    def __init__(self, dispatcher: Dispatcher, token: Callable[[str], str], logger: Logger) -> None:
        self._dispatcher = dispatcher
        self._token = token
        self._logger = logger
        self._actions: dict[str, Callable[[str, bytes], Coroutine[Any, Any, bytes]]] = {
            "join": self._join,
            "exchange": self._exchange,
            "renew": self._renew,
            "hook": self._hook,
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request of any method and path below the prefix."""
        try:
            answer = await self._answer(scope, receive)
            if answer is None:
                return
            status = 200
        except CortexError as error:
            status, answer = error.http_status, orjson.dumps({"error": str(error), "code": error.code})
        except Exception as error:
            self._logger.error("request of a worker failed", exc_info=error, path=scope["path"])
            status, answer = 500, b'{"error":"internal error","code":"internal"}'
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(answer))]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": answer})

    async def _answer(self, scope: Scope, receive: Receive) -> bytes | None:
        worker, _, name = scope["path"].removeprefix(PREFIX).partition("/")
        given = next((value for key, value in scope["headers"] if key == b"authorization"), b"")
        if not hmac.compare_digest(given, f"Bearer {self._token(worker)}".encode()):
            raise UnauthorizedError("the worker's token is missing or wrong")
        action = self._actions.get(name)
        if action is None or scope["method"] != "POST":
            raise NotFoundError("there is no such worker route")
        body = await _read(receive)
        return None if body is None else await _unless_gone(receive, action(worker, body))

    async def _join(self, worker: str, body: bytes) -> bytes:
        return wire.write_joined(
            await self._dispatcher.join(worker, wire.parse(wire.JoinRequest, body).pid, MAX_WAIT_S)
        )

    async def _exchange(self, worker: str, body: bytes) -> bytes:
        asked = wire.parse_exchange(body)
        wait_s = min(asked.wait_s, MAX_WAIT_S)
        return wire.write_exchanged(
            await self._dispatcher.exchange(
                worker, asked.pid, asked.job_id, asked.reports, asked.max_batches, asked.max_bytes, wait_s
            )
        )

    async def _renew(self, worker: str, body: bytes) -> bytes:
        asked = wire.parse(wire.RenewalRequest, body)
        return wire.write(await self._dispatcher.renew(worker, asked.pid, asked.tokens, asked.all))

    async def _hook(self, worker: str, body: bytes) -> bytes:
        """Record the outcome of `on_job_complete` from a worker of an older version; newer ones report it as others."""
        done = wire.parse(wire.HookReport, body)
        failures = (BatchFailure(HOOK_SEQ, done.error, done.traceback),) if done.error else ()
        report = Report(done.token, HOOK_SEQ, failures)
        await self._dispatcher.exchange(worker, done.pid, done.job, (report,), 0, 0, 0.0)
        return b"{}"


async def _read(receive: Receive) -> bytes | None:
    """Return the body; None if the worker disconnects before its end. Raises: TooLargeError."""
    pieces: list[bytes] = []
    total = 0
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return None
        pieces.append(message.get("body", b""))
        total += len(pieces[-1])
        if total > wire.MAX_BODY_BYTES:
            raise TooLargeError(f"the body is larger than {wire.MAX_BODY_BYTES} bytes")
        if not message.get("more_body"):
            return b"".join(pieces)


async def _unless_gone(receive: Receive, work: Coroutine[Any, Any, bytes]) -> bytes | None:
    """Return the answer; None if the worker disconnects first, so that nothing is leased to a dead worker."""
    answer = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((answer, gone), return_when=asyncio.FIRST_COMPLETED)
        return answer.result() if answer.done() else None
    finally:
        answer.cancel()
        gone.cancel()


async def _disconnected(receive: Callable[[], Awaitable[Any]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
