"""The dashboard in this process, over real stores of jobs and APIs; no operator and no replica runs."""

from __future__ import annotations

import asyncio
import re
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, fields
from html.parser import HTMLParser
from types import SimpleNamespace
from typing import Any
from urllib.parse import unquote, urlencode

from starlette.types import ASGIApp, Message

from cortex.config.schema import Api
from cortex.home import Home
from cortex.installation import OperatorIdentity
from cortex.jobs.spec import BatchFailure, JobOrigin, JobRecord, NewBatch, Report, Workload
from cortex.lifecycle import ApiKind, JobStatus, TokenScope
from cortex.operator.access.tokens import Principal, Tokens
from cortex.operator.dashboard.app import with_sessions
from cortex.operator.dashboard.pages.jobs import job_pages
from cortex.operator.dashboard.pages.schedules import schedule_pages
from cortex.operator.dashboard.pages.workloads import workload_pages
from cortex.operator.dashboard.rendering import Pages
from cortex.operator.dashboard.sessions import Sessions
from cortex.operator.http.services import Services
from cortex.processes.identity import Identity
from cortex.state.queries.tokens import TokenStore
from cortex.telemetry import Logger
from harness.jobs.job_checks import options
from harness.jobs.schedules import ScheduleHarness

_VOID = {"meta", "link", "input", "img", "br"}


@dataclass(frozen=True)
class Page:
    """A response of the dashboard."""

    status: int
    location: str
    text: str

    @property
    def main(self) -> str:
        """Its text without tags, as it is read."""
        return " ".join(re.sub(r"<[^>]+>", " ", self.text.partition("<main")[2].partition("</main>")[0]).split())


class JobPages:
    """The pages with the stores behind them."""

    def __init__(self, home: Home, made: ScheduleHarness) -> None:
        self.home = home
        self.apis, self.store, self.jobs, self.schedules = made.apis, made.store, made.jobs, made.schedules
        self.async_apis = made.async_apis
        self.harness = made
        self._tokens = Tokens(TokenStore(made.databases[0]), "secret")
        self._sessions = Sessions(self._tokens)
        identity = OperatorIdentity(Identity.of(1), "http://127.0.0.1:8889", "http://127.0.0.1:8888")
        jobs = SimpleNamespace(service=self.jobs, schedules=self.schedules, async_apis=self.async_apis)
        infrastructure = SimpleNamespace(cluster=None)
        given = {"home": home, "apis": self.apis, "identity": identity, "jobs": jobs, "infrastructure": infrastructure}
        empty: dict[str, Any] = dict.fromkeys(field.name for field in fields(Services))
        self.services = Services(**(empty | given))
        shown = Pages("127.0.0.1:8889")
        self._app: ASGIApp = with_sessions(
            [pages(self.services, shown) for pages in (job_pages, workload_pages, schedule_pages)],
            identity.url,
            self._sessions,
            shown,
            Logger("test"),
        )
        self.sign_in()

    def sign_in(self, scope: TokenScope = TokenScope.ADMIN, api: str | None = None) -> None:
        """Go on as a user with another token."""
        self._cookie = self._sessions.sign_in(self._sessions.create_code(Principal("ana", scope, api), "ana"))

    @property
    def csrf(self) -> str:
        return self._sessions.find(self._cookie).csrf

    async def get(self, path: str) -> Page:
        return await self._send("GET", path)

    async def post(self, path: str, /, **form: str) -> Page:
        return await self._send("POST", path, urlencode({"csrf": self.csrf, **form}).encode())

    async def _send(self, method: str, target: str, body: bytes = b"") -> Page:
        path, _, query = f"/dashboard{target}".partition("?")
        headers = {"cookie": f"cortex_8889={self._cookie}", "origin": "http://127.0.0.1:8889", "host": "127.0.0.1:8889"}
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "scheme": "http",
            "method": method,
            "path": unquote(path),
            "raw_path": path.encode(),
            "root_path": "/dashboard",
            "query_string": query.encode(),
            "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
            "server": ("127.0.0.1", 8889),
            "client": ("127.0.0.1", 1),
            "state": {},
        }
        sent: list[Message] = []

        async def receive() -> Message:
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: Message) -> None:
            sent.append(message)

        await self._app(scope, receive, send)
        names = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
        text = b"".join(message.get("body", b"") for message in sent[1:]).decode()
        return Page(sent[0]["status"], names.get("location", ""), text)

    # Jobs.

    def deploy(self, name: str, kind: ApiKind = ApiKind.BATCH, **settings: Any) -> None:
        """Deploy an API, of which nothing runs."""
        self.harness.deploy(api_of(name, kind, **settings))

    async def submit(self, *payloads: bytes, api: str = "digits", source: Any = None, **changed: Any) -> JobRecord:
        """Store a job of batches with one item each."""
        spec = api_of(api)
        origin = JobOrigin(api, "api-1", "spec-1", "rev-1", "hash-1", spec.model_dump_json(), ApiKind.BATCH)
        batches = [NewBatch(1, payload) for payload in payloads]
        return await self.store.create(
            origin, options(**{"max_attempts": 1} | changed), source or {"kind": "upload", "batch_size": 1}, batches
        )

    async def fail(self, job: JobRecord, *failures: BatchFailure) -> JobRecord:
        """Process every batch; those of `failures` fail for good. The job is over then."""
        leased = await self.store.lease(job.id, "w", 1, [], 10_000, 2**30)
        assert leased.lease is not None
        report = Report(leased.lease.token, leased.lease.batches[-1].seq, failures, seconds=2.0)
        await self.store.lease(job.id, "w", 1, [report], 1, 2**30)
        await self.store.change(job.id, JobStatus.COMPLETED_WITH_FAILURES if failures else JobStatus.SUCCEEDED)
        ended = await self.store.get(job.id)
        assert ended is not None
        return ended

    # Workloads.

    async def send(self, api: str, *bodies: bytes) -> list[uuid.UUID]:
        """Add workloads to the queue of an AsyncAPI."""
        added = [Workload(uuid.uuid4(), "application/json", body) for body in bodies]
        for workload in added:
            await self.async_apis.add(api, workload)
        return [workload.id for workload in added]

    async def process(self, api: str, *outcomes: bytes | str) -> None:
        """Process the first workloads of a queue, one by one; a text is an error. `b""`: it is leased, and no more."""
        queue = await self.store.workloads.open(api)
        for outcome in outcomes:
            leased = await self.store.lease(queue.job_id, "w", 1, [], 1, 2**30)
            assert leased.lease is not None
            seq = leased.lease.batches[0].seq
            failures = (BatchFailure(seq, outcome),) if isinstance(outcome, str) else ()
            results = ((seq, outcome),) if isinstance(outcome, bytes) else ()
            if outcome:
                await self.store.lease(queue.job_id, "w", 1, [Report(leased.lease.token, seq, failures, results)], 0, 1)


def api_of(name: str, kind: ApiKind = ApiKind.BATCH, **settings: Any) -> Api:
    """Return an API with secrets in its configuration."""
    handler = {"type": "python", "path": "handler.py", "interface": "handler", "env": {"KEY": "swordfish"}}
    handler |= {"config": {"password": "swordfish", "size": 3}}
    data = {"name": name, "kind": kind, "networking": {"endpoint": f"/{name}"}, "handler": handler}
    return Api.model_validate(data | settings)


@asynccontextmanager
async def open_job_pages(home: Home) -> AsyncIterator[JobPages]:
    """Open the pages with empty stores."""
    made = ScheduleHarness(home, time.time)
    await made.store.startup()
    try:
        yield JobPages(home, made)
    finally:
        await made.store.shutdown()
        made.dispose()


def visit(home: Home, scenario: Callable[[JobPages], Awaitable[None]]) -> None:
    """Run a scenario with the pages."""

    async def run() -> None:
        async with open_job_pages(home) as pages:
            await scenario(pages)

    asyncio.run(run())


class Balance(HTMLParser):
    """Checks that tags are closed in order, and collects what a page must not have."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.problems: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = dict(attrs)
        self.problems += [f"{tag} {name}" for name in names if name == "style" or name.startswith("on")]
        if tag == "script" and "src" not in names:
            self.problems.append("inline script")
        if tag not in _VOID and tag != "path":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.problems.append(f"unexpected </{tag}>")


def check(page: Page) -> Page:
    """Check what is true of every page."""
    assert page.status == 200, page.text
    parser = Balance()
    parser.feed(page.text)
    assert (parser.problems, parser.open) == ([], [])
    assert page.text.count("<h1>") == 1
    assert "swordfish" not in page.text
    assert not any(character in page.text for character in "\x1b\x00\u202e")
    assert page.text.count("<table") == page.text.count("<caption")
    return page
