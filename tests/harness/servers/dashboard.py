"""Pages of the dashboard in this process, behind the operator's real authentication, sessions and audit log."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
from fastapi import APIRouter, FastAPI
from sqlalchemy import Engine

from cortex.lifecycle import TokenScope
from cortex.operator.access.audit import AuditLog, AuditMiddleware
from cortex.operator.access.auth import AuthMiddleware
from cortex.operator.access.tokens import ADMIN_NAME, Principal, Tokens
from cortex.operator.dashboard.app import with_sessions
from cortex.operator.dashboard.rendering import Pages
from cortex.operator.dashboard.security import PREFIX
from cortex.operator.dashboard.sessions import Sessions
from cortex.state.database import open_state
from cortex.state.queries.audit import AuditEntry, AuditStore
from cortex.state.queries.tokens import TokenStore
from cortex.telemetry import Logger

URL = "http://127.0.0.1:8889"
LOGGER = Logger("test")
ADMIN = Principal(ADMIN_NAME, TokenScope.ADMIN)


@dataclass
class Parts:
    """What the pages under test can use."""

    engine: Engine
    tokens: Tokens
    audit_log: AuditLog
    pages: Pages


class ServedDashboard:
    """Some pages, and browsers that are signed in."""

    def __init__(self, parts: Parts, routers: Iterable[APIRouter], url: str = URL) -> None:
        self.parts = parts
        self._url = url
        self._cookie = f"{'__Secure-' if url.startswith('https:') else ''}cortex_8889"
        self._sessions = Sessions(parts.tokens)
        app = FastAPI()
        app.mount(PREFIX, with_sessions(routers, url, self._sessions, parts.pages, LOGGER))
        app.add_middleware(AuthMiddleware, tokens=parts.tokens, host="127.0.0.1", is_own_name=lambda name: False)
        app.add_middleware(AuditMiddleware, log=parts.audit_log)
        self._app = app

    def sign_in(self, principal: Principal = ADMIN) -> SignedIn:
        """Return a browser that may do what the client's token permits."""
        cookie = self._sessions.sign_in(self._sessions.create_code(principal, principal.name))
        return SignedIn(self, cookie, self._sessions.find(cookie).csrf)

    def sign_in_with(self, scope: TokenScope, name: str) -> SignedIn:
        """Return a browser with a new token of this scope."""
        made = asyncio.run(self.parts.tokens.create(name, scope))
        return self.sign_in(self.parts.tokens.identify(f"Bearer {made['token']}"))

    def new_code(self) -> str:
        """Return a code of the admin's token."""
        return self._sessions.create_code(ADMIN, ADMIN.name)

    def send(self, method: str, path: str, cookie: str, **options: object) -> httpx.Response:
        async def send() -> httpx.Response:
            transport = httpx.ASGITransport(self._app, client=("10.0.0.7", 1))
            async with httpx.AsyncClient(transport=transport, base_url=self._url) as client:
                headers = {"cookie": f"{self._cookie}={cookie}", "origin": self._url}
                return await client.request(method, PREFIX + path, headers=headers, **options)  # type: ignore[arg-type]

        return asyncio.run(send())

    def audit(self) -> list[AuditEntry]:
        """Return the entries of the audit log, the newest first."""
        return list(AuditStore(self.parts.engine).entries())


@dataclass
class SignedIn:
    """A browser without JavaScript."""

    dashboard: ServedDashboard
    cookie: str
    csrf: str

    def get(self, path: str, **query: str) -> httpx.Response:
        return self.dashboard.send("GET", path, self.cookie, params=query or None)

    def post(self, path: str, **fields: str) -> httpx.Response:
        return self.dashboard.send("POST", path, self.cookie, data={"csrf": self.csrf, **fields})


@contextmanager
def served_dashboard(
    folder: Path, routers: Callable[[Parts], Iterable[APIRouter]], url: str = URL
) -> Iterator[ServedDashboard]:
    """Yield pages whose state is in a database in `folder`."""
    engine = open_state(folder / "state.db")
    try:
        tokens = Tokens(TokenStore(engine), "secret")
        parts = Parts(engine, tokens, AuditLog(AuditStore(engine), LOGGER), Pages("127.0.0.1:8889"))
        yield ServedDashboard(parts, routers(parts), url)
    finally:
        engine.dispose()


def assert_readable(page: httpx.Response) -> None:
    """Check landmarks, captions of tables, names of fields, and that nothing is inline."""
    text = page.text
    assert page.headers["cache-control"] == "no-store"
    for part in ("<main", "<header", "<nav", 'aria-current="page"', "Skip to content"):
        assert part in text
    assert text.count("<h1>") == 1
    assert text.count("<table") == text.count("<caption")
    assert not re.search(r"<[^>]+\s(style|on\w+)=", text)
    assert not re.search(r"<(script|style)>", text)
    for label in re.findall(r"(?s)<label[^>]*>(.*?)</label>", text):
        assert re.sub(r"<[^>]+>", "", label).strip()
