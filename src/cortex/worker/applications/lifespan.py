"""The lifespan of an application: its startup before the process is ready, its shutdown after the last request.

One ASGI call of type `lifespan` runs for as long as the process. An application that does not support it raises an
exception before it receives the first message, or answers with messages of other protocols.
"""

from __future__ import annotations

import asyncio
from typing import Any

from cortex.errors import UserError
from cortex.predictor.tracebacks import describe, format_user_traceback
from cortex.worker.http.background_tasks import contain_exit
from cortex.worker.monitoring.request_log import write_log

#: Time for the shutdown; the supervisor kills the process soon after.
SHUTDOWN_S = 1.0


class Lifespan:
    """The lifespan call of one process. Event-loop thread only."""

    def __init__(self, app: Any) -> None:
        self.state: dict[str, Any] = {}  #: set by the application at its startup; each request has a copy
        self.app = app
        self._to_app: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._from_app: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()  #: None: the call has ended
        self._received = False
        self._is_supported = True
        self._error: BaseException | None = None
        self._task: asyncio.Task[None] | None = None

    async def startup(self) -> None:
        """Start the application. Raises: UserError with the user's frames if it can't start."""
        self._task = asyncio.create_task(self._run())
        self._to_app.put_nowait({"type": "lifespan.startup"})
        answer = await self._from_app.get()
        if answer is not None and answer["type"] == "lifespan.startup.complete":
            return
        if answer is not None:  # failed; frameworks raise the reason after they have reported it
            await asyncio.wait([self._task], timeout=SHUTDOWN_S)
        if self._error is not None and self._received and self._is_supported:
            raise UserError(describe(self._error), format_user_traceback(self._error)) from self._error
        if answer is not None:
            reason = str(answer.get("message", "")).strip()
            last_line = reason.splitlines()[-1] if reason else "it gave no reason"
            raise UserError(f"the application failed to start: {last_line}", reason)

    async def shutdown(self) -> None:
        """Shut the application down, within `SHUTDOWN_S`."""
        if self._task is None or self._task.done():
            return
        self._to_app.put_nowait({"type": "lifespan.shutdown"})
        await asyncio.wait([self._task], timeout=SHUTDOWN_S)
        if not self._task.done():
            write_log(f"the application did not shut down within {SHUTDOWN_S:g} s\n")
        elif self._error is not None:
            write_log(f"the application failed to shut down:\n{format_user_traceback(self._error)}")

    async def _run(self) -> None:
        scope = {"type": "lifespan", "asgi": {"version": "3.0", "spec_version": "2.0"}, "state": self.state}
        try:
            await contain_exit(self.app(scope, self._receive, self._send))
        except BaseException as error:  # the edge of the user's code
            self._error = error
        self._from_app.put_nowait(None)

    async def _receive(self) -> dict[str, Any]:
        message = await self._to_app.get()
        self._received = True
        return message

    async def _send(self, message: dict[str, Any]) -> None:
        if not message["type"].startswith("lifespan."):
            self._is_supported = False
            raise RuntimeError(f"the message {message['type']!r} does not belong to a lifespan")
        self._from_app.put_nowait(message)
