"""The audit log in front of a small application."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cortex.lifecycle import TokenScope
from cortex.operator.access.audit import AuditLog, AuditMiddleware, record_change
from cortex.operator.access.auth import AuthMiddleware
from cortex.operator.access.tokens import Tokens
from cortex.state.database import open_sqlite
from cortex.state.queries.audit import AuditEntry, AuditStore
from cortex.state.queries.tokens import TokenStore
from cortex.telemetry import Logger

LOGGER = Logger("test")


class Clock:
    """A time that tests set."""

    def __init__(self) -> None:
        self.now = datetime(2026, 11, 22, tzinfo=UTC)

    def __call__(self) -> datetime:
        return self.now


class Served:
    """An application behind both middlewares, and its audit log."""

    def __init__(self, folder: Path, app: ASGIApp) -> None:
        self.engine = open_sqlite(folder / "state.db")
        self.clock = Clock()
        self.log = AuditLog(AuditStore(self.engine), LOGGER, self.clock)
        self.tokens = Tokens(TokenStore(self.engine), "secret", self.clock)
        authenticated = AuthMiddleware(app, self.tokens, "127.0.0.1", lambda name: False)
        self.app = AuditMiddleware(authenticated, self.log)

    async def call(self, method: str, path: str, token: str = "secret") -> int:
        """Return the status of one request."""
        headers = [(b"host", b"localhost"), (b"authorization", f"Bearer {token}".encode())]
        scope = {"type": "http", "method": method, "path": path, "headers": headers, "client": ("10.0.0.7", 1)}
        sent: list[Message] = []

        async def send(message: Message) -> None:
            sent.append(message)

        async def receive() -> Message:
            return {"type": "http.request", "body": b"", "more_body": False}

        await self.app(scope, receive, send)
        assert [message["type"] for message in sent] == ["http.response.start", "http.response.body"]
        return int(sent[0]["status"])

    def entries(self) -> list[dict[str, Any]]:
        return asyncio.run(self.log.entries(None, None, 1000))


async def change(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer as routes do: with an error for /v1/patch, for two APIs for /v1/deploy."""
    request = Request(scope)
    response: Response = JSONResponse({"by": request.state.principal.name})
    if scope["path"] == "/v1/deploy":
        record_change(request, "creating iris", "iris")
        record_change(request, "sum is\nupdating", "sum", is_done=False)
    elif scope["path"] == "/v1/patch":
        response = JSONResponse({"error": "invalid"}, 400)
    elif scope["path"] == "/v1/shutdown":
        raise RuntimeError("a bug")
    await response(scope, receive, send)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    made = Served(tmp_path, change)
    yield made
    made.engine.dispose()


def summary(entry: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(entry[key] for key in ("token", "action", "api", "result", "detail"))


def test_a_change_is_recorded_with_its_client_and_the_time(served: Served) -> None:
    assert asyncio.run(served.call("DELETE", "/v1/apis/iris/jobs/69da5b1f")) == 200
    assert served.entries() == [
        {
            "at": "2026-11-22T00:00:00+00:00",
            "token": "admin",
            "address": "10.0.0.7",
            "action": "stop job",
            "api": "iris",
            "result": "succeeded",
            "detail": "69da5b1f",
        }
    ]


def test_a_route_records_the_result_for_each_api(served: Served) -> None:
    asyncio.run(served.call("POST", "/v1/deploy"))
    assert [summary(entry) for entry in served.entries()] == [
        ("admin", "deploy", "sum", "failed", "sum is updating"),
        ("admin", "deploy", "iris", "succeeded", "creating iris"),
    ]


def test_a_failed_change_is_recorded_with_its_error(served: Served) -> None:
    assert asyncio.run(served.call("POST", "/v1/patch")) == 400
    with pytest.raises(RuntimeError):
        asyncio.run(served.call("POST", "/v1/shutdown"))
    assert [summary(entry) for entry in served.entries()] == [
        ("admin", "shut down", None, "failed", ""),
        ("admin", "patch", None, "failed", "invalid"),
    ]


def test_a_refused_change_is_recorded(served: Served) -> None:
    made = asyncio.run(served.tokens.create("ci", TokenScope.READ, expires_in_s=60))
    assert asyncio.run(served.call("DELETE", "/v1/apis/iris", made["token"])) == 403
    served.clock.now += timedelta(seconds=61)
    assert asyncio.run(served.call("DELETE", "/v1/apis/iris", made["token"])) == 401
    assert asyncio.run(served.call("DELETE", "/v1/apis/iris", "wrong")) == 401
    refused = ("delete", "iris", "refused")
    unknown, expired, too_narrow = served.entries()
    assert summary(unknown) == (None, *refused, "the operator's token is missing or wrong")
    assert summary(expired)[:4] == summary(too_narrow)[:4] == ("ci", *refused)
    assert expired["detail"].startswith("the token 'ci' expired at 2026-11-22 00:01 UTC")
    assert too_narrow["detail"].startswith("the token 'ci' has the scope read; DELETE /v1/apis/iris requires")


def test_the_error_follows_what_was_to_be_changed(served: Served) -> None:
    assert asyncio.run(served.call("DELETE", "/v1/tokens/ci", "wrong")) == 401
    assert served.entries()[0]["detail"] == "ci: the operator's token is missing or wrong"


def test_reads_are_not_recorded(served: Served) -> None:
    assert asyncio.run(served.call("GET", "/v1/apis/iris")) == 200
    assert asyncio.run(served.call("GET", "/v1/apis/iris", "wrong")) == 401
    assert served.entries() == []


def test_clients_without_a_token_can_add_a_limited_number_of_entries_per_minute(served: Served) -> None:
    async def call_many() -> None:
        for _ in range(100):
            assert await served.call("POST", "/v1/deploy", "wrong") == 401
        await served.call("POST", "/v1/deploy")

    asyncio.run(call_many())
    assert [entry["token"] for entry in served.entries()] == ["admin"] * 2 + [None] * 60
    served.clock.now += timedelta(minutes=1)
    asyncio.run(call_many())
    assert len(served.entries()) == 2 * 62


def test_entries_of_concurrent_requests_are_committed_together(served: Served) -> None:
    commits: list[int] = []

    class CountingStore(AuditStore):
        def add(self, entries: Sequence[AuditEntry]) -> None:
            commits.append(len(entries))
            super().add(entries)

    log = AuditLog(CountingStore(served.engine), LOGGER, served.clock)
    app = AuditMiddleware(AuthMiddleware(change, served.tokens, "127.0.0.1", lambda name: False), log)
    served.app = app

    async def call_many() -> None:
        await asyncio.gather(*(served.call("POST", "/v1/apis/iris/refresh") for _ in range(20)))

    asyncio.run(call_many())
    assert sum(commits) == len(served.entries()) == 20
    assert len(commits) < 5


def test_a_database_that_fails_does_not_fail_the_change(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    with served.engine.begin() as connection:
        connection.exec_driver_sql("DROP TABLE audit_log")
    assert asyncio.run(served.call("POST", "/v1/apis/iris/refresh")) == 200
    (record,) = [record for record in caplog.records if record.message == "audit log can't be written"]
    assert "refresh" in json.dumps(record.__dict__["fields"], default=str)
