"""The audit log: each change that a client requests is stored before the client gets its response."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cortex.lifecycle import AuditResult
from cortex.operator.access.scopes import RequestedRoute, find_route
from cortex.operator.access.tokens import Principal
from cortex.state.queries.audit import AuditEntry, AuditFilter, AuditStore
from cortex.telemetry import Logger

_MAX_DETAIL = 500
#: Anyone who can connect can be refused, so only so many refusals of clients without a token are stored per minute.
_MAX_ANONYMOUS = 60
_MINUTE = timedelta(minutes=1)
_RESULTS = {401: AuditResult.REFUSED, 403: AuditResult.REFUSED}


@dataclass(frozen=True)
class _Change:
    api: str | None
    detail: str
    is_done: bool


def record_change(request: Request, detail: str, api: str | None = None, is_done: bool = True) -> None:
    """Add what a route changed to the request's audit entry; several calls make several entries."""
    changes: list[_Change] = request.scope.setdefault("state", {}).setdefault("changes", [])
    changes.append(_Change(api, detail, is_done))


class AuditLog:
    """The audit log of this operator. A database that fails is logged: the change has happened by then."""

    def __init__(
        self, store: AuditStore, logger: Logger, clock: Callable[[], datetime] = lambda: datetime.now(UTC)
    ) -> None:
        self.clock = clock
        self._store = store
        self._logger = logger
        self._waiting: list[AuditEntry] = []
        self._lock = asyncio.Lock()
        self._minute = clock()  #: start of the minute in which refusals of clients without a token are counted
        self._anonymous = 0

    async def record(self, entries: Sequence[AuditEntry]) -> None:
        """Store entries; those of concurrent requests are committed together."""
        self._waiting += filter(self._is_stored, entries)
        async with self._lock:
            batch, self._waiting = self._waiting, []
            if not batch:
                return
            try:
                await asyncio.to_thread(self._store.add, batch)
            except Exception as error:
                self._logger.error("audit log can't be written", error=error, entries=[str(entry) for entry in batch])

    async def find(self, wanted: AuditFilter, limit: int) -> Sequence[AuditEntry]:
        """Return the latest entries that match, the newest first."""
        return await asyncio.to_thread(self._store.entries, wanted, limit)

    async def entries(self, api: str | None, since: datetime | None, limit: int) -> list[dict[str, Any]]:
        """Return the latest entries as JSON, the newest first."""
        found = await self.find(AuditFilter(api, since), limit)
        return [
            {
                "at": entry.at.isoformat(),
                "token": entry.token,
                "address": entry.address,
                "action": entry.action,
                "api": entry.api,
                "result": entry.result,
                "detail": entry.detail,
            }
            for entry in found
        ]

    def _is_stored(self, entry: AuditEntry) -> bool:
        if entry.token is not None:
            return True
        if entry.at - self._minute >= _MINUTE:
            if self._anonymous > _MAX_ANONYMOUS:
                self._logger.warning(
                    "refused requests are missing in the audit log", count=self._anonymous - _MAX_ANONYMOUS
                )
            self._minute, self._anonymous = entry.at, 0
        self._anonymous += 1
        return self._anonymous <= _MAX_ANONYMOUS


class AuditMiddleware:
    """ASGI middleware that records the requests to routes that change something, the refused ones included.

    It holds the start of a response until the entry is stored. `request.state.error` has the message of an error whose
    response is not JSON.
    """

    def __init__(self, app: ASGIApp, log: AuditLog) -> None:
        self._app = app
        self._log = log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward a request."""
        route = find_route(scope["method"], scope["path"]) if scope["type"] == "http" else None
        if route is None or not route.access.change:
            await self._app(scope, receive, send)
            return
        start: Message | None = None

        async def record_and_send(message: Message) -> None:
            nonlocal start
            if message["type"] == "http.response.start":
                start = message
                return
            if start is not None:
                await self._log.record(self._entries(scope, route, start["status"], message.get("body", b"")))
                await send(start)
                start = None
            await send(message)

        try:
            await self._app(scope, receive, record_and_send)
        except Exception:  # a bug, which the operator's log has
            await self._log.record(self._entries(scope, route, 500, b""))
            raise

    def _entries(self, scope: Scope, route: RequestedRoute, status: int, body: bytes) -> list[AuditEntry]:
        state: dict[str, Any] = scope.get("state", {})
        principal: Principal | None = state.get("principal")
        changes: list[_Change] = state.get("changes", [])
        if status >= 400 or not changes:
            problem = (state.get("error") or _error(body)) if status >= 400 else ""
            detail = ": ".join(filter(None, (route.subject, problem)))
            changes = [_Change(route.api, detail, status < 400)]
        return [
            AuditEntry(
                at=self._log.clock(),
                token=principal.name if principal else None,
                address=(scope.get("client") or ("",))[0],
                action=route.access.change,
                api=change.api or route.api,
                result=AuditResult.SUCCEEDED if change.is_done else _RESULTS.get(status, AuditResult.FAILED),
                detail=" ".join(change.detail.split())[:_MAX_DETAIL],
            )
            for change in changes
        ]


def _error(body: bytes) -> str:
    """Return the message of an error response."""
    try:
        return str(json.loads(body)["error"])
    except (ValueError, KeyError, TypeError):
        return body.decode(errors="replace").strip()
