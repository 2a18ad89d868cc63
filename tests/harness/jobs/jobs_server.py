"""The job routes on a real Unix socket, with in-memory implementations of the services behind them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import tempfile
import threading
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from starlette.responses import Response
from starlette.types import ASGIApp

from cortex.errors import ConflictError, NotFoundError
from cortex.jobs.http.view import JobView, WorkerCounts
from cortex.jobs.intake.items import split_items, split_lines
from cortex.jobs.intake.submission import SubmissionLimits
from cortex.jobs.spec import (
    Assignment,
    ExchangeReply,
    ItemList,
    JobCounts,
    JobOrigin,
    JobRecord,
    RenewalReply,
    Report,
    StopSignal,
    Submission,
    Upload,
    Workload,
    WorkloadView,
    source_to_json,
)
from cortex.lifecycle import JobStatus
from cortex.operator.http.async_routes import AsyncRoutes
from cortex.operator.http.gateway_routes import create_jobs_app
from cortex.operator.http.job_routes import JobRoutes
from cortex.operator.http.operator_server import create_jobs_server
from cortex.operator.http.worker_routes import WorkerRoutes
from cortex.operator.jobs.jobs import worker_token
from cortex.operator.jobs.workload_bodies import check_body
from cortex.payloads.signature import BodySignature
from cortex.processes.sockets import replace_listener
from cortex.telemetry import Logger
from harness.connections import UnixConnection

LIMITS = SubmissionLimits(max_body_bytes=1024 * 1024, max_batch_bytes=1000)
SPEC = {"name": "sum", "kind": "BatchAPI", "handler": {"path": "sum.py", "env": {"KEY": "swordfish"}}}


class MemoryJobs:
    """Jobs of one API, `sum`, in memory."""

    def __init__(self) -> None:
        self.records: dict[str, JobRecord] = {}
        self.batches: dict[str, list[bytes]] = {}
        self.uploads = 0  #: in progress
        self.paths = ["s3://bucket/a", "s3://bucket/b"]
        self.fails_with: Exception | None = None

    def limits(self, api: str) -> SubmissionLimits:
        self._require_api(api)
        return LIMITS

    async def submit(
        self,
        api: str,
        submission: Submission,
        items: AsyncIterator[bytes] | None = None,
        *,
        is_trusted: bool = False,
        traceparent: str = "",
    ) -> JobRecord:
        self._require_api(api)
        source, payloads = submission.source, []
        if isinstance(source, Upload):
            assert items is not None
            self.uploads += 1
            try:
                async for batches in split_lines(items, source.batch_size, LIMITS.max_batch_bytes):
                    payloads += [batch.payload for batch in batches]
            finally:
                self.uploads -= 1
        elif isinstance(source, ItemList):
            payloads = [batch.payload for batch in split_items(source.items, source.batch_size, LIMITS.max_batch_bytes)]
        record = JobRecord(
            id=f"{len(self.records):016x}",
            number=len(self.records),
            origin=JobOrigin("sum", "a1", "s1", "r1", "p1", json.dumps(SPEC)),
            options=submission.options,
            source=source_to_json(source),
            status=JobStatus.PENDING,
            created_at=1_700_000_000.0,
            counts=JobCounts(batches=len(payloads)),
        )
        self.records[record.id], self.batches[record.id] = record, payloads
        return record

    async def dry_run(self, api: str, submission: Submission, *, is_trusted: bool = False) -> AsyncIterator[str]:
        self._require_api(api)
        for path in self.paths:
            yield path
        if self.fails_with:
            raise self.fails_with
        yield "validations passed"

    async def get(self, api: str, job_id: str) -> JobView:
        return JobView(self._require(api, job_id), "http://localhost:8888/sum", WorkerCounts(pending=1))

    async def stop(self, api: str, job_id: str) -> None:
        self._require(api, job_id)
        del self.records[job_id]

    def _require_api(self, api: str) -> None:
        if self.fails_with:
            raise self.fails_with
        if api != "sum":
            raise NotFoundError(f"{api} is not deployed")

    def _require(self, api: str, job_id: str) -> JobRecord:
        self._require_api(api)
        if job_id not in self.records:
            raise NotFoundError(f"unable to find BatchAPI job {job_id} ({api} api)")
        return self.records[job_id]


class MemoryWorkers:
    """Returns replies that a test sets, and records calls."""

    def __init__(self) -> None:
        self.joined: Assignment | StopSignal | None = None
        self.exchanged = ExchangeReply()
        self.hangs = False
        self.waiting = 0
        self.calls: list[tuple[Any, ...]] = []

    async def join(self, worker: str, pid: int, wait_s: float) -> Assignment | StopSignal | None:
        self._record("join", worker, pid, wait_s)
        return self.joined

    async def exchange(
        self,
        worker: str,
        pid: int,
        job_id: str,
        reports: Sequence[Report],
        max_batches: int,
        max_bytes: int,
        wait_s: float,
    ) -> ExchangeReply:
        self._record("exchange", worker, pid, job_id, reports, max_batches, max_bytes, wait_s)
        if self.hangs:
            self.waiting += 1
            try:
                await asyncio.Event().wait()
            finally:
                self.waiting -= 1
        return self.exchanged

    async def renew(self, worker: str, pid: int, tokens: Sequence[str], is_all: bool = False) -> RenewalReply:
        self._record("renew", worker, pid, tokens)
        return RenewalReply(lost=tuple(tokens[1:]))

    def _record(self, *call: Any) -> None:
        if call[1] == "gone":
            raise NotFoundError("gone is not a worker of this operator")
        if call[2] == 13:
            raise ConflictError("there is a newer process than 13")
        if call[2] == 14:
            raise RuntimeError("a bug")
        self.calls.append(call)


class MemoryWorkloads:
    """Workloads of the AsyncAPIs `greet` and `older`, in memory; tests set their statuses."""

    def __init__(self) -> None:
        self.added: list[Workload] = []
        self.keys: list[str] = []
        self.views: dict[uuid.UUID, WorkloadView] = {}
        self.waited: list[float] = []
        self.may_end = threading.Event()  #: while set, waiting callers are answered
        self.may_end.set()
        self.fails_with: Exception | None = None

    def is_async(self, api: str) -> bool:
        return api in ("greet", "older")

    def is_of_older_file(self, api: str) -> bool:
        return api == "older"

    def check_body(self, api: str, content_type: str, body: bytes) -> None:
        signature = BodySignature(media_type="application/json", is_typed=body.startswith(b"{"))
        check_body(signature, content_type.encode(), body)

    def max_body_bytes(self, api: str) -> int:
        return LIMITS.max_body_bytes

    async def add(self, api: str, workload: Workload, key: str) -> uuid.UUID:
        if self.fails_with:
            raise self.fails_with
        self.added.append(workload)
        self.keys.append(key)
        return workload.id

    async def get(self, api: str, name: uuid.UUID, wait_s: float) -> WorkloadView | None:
        self.waited.append(wait_s)
        if wait_s:
            await asyncio.to_thread(self.may_end.wait)
        return self.views.get(name)


class JobsServer:
    """A running server of the job routes, and a client of it."""

    def __init__(self, path: Path, jobs: MemoryJobs, workers: MemoryWorkers, workloads: MemoryWorkloads) -> None:
        self.path = path
        self.workloads = workloads
        self.jobs = jobs
        self.workers = workers

    def send(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> tuple[int, dict[str, str], bytes]:
        """Send a request; return status, headers and body."""
        connection = UnixConnection(self.path)
        try:
            connection.request(method, path, body, headers or {})
            response = connection.getresponse()
            return response.status, {name.lower(): value for name, value in response.getheaders()}, response.read()
        finally:
            connection.close()

    def as_user(self, method: str, query: str = "", body: Any = None, **headers: str) -> tuple[int, Any]:
        """Send a request as the gateway forwards it; return the status and JSON or text."""
        given = {"x-cortex-api": "sum", "x-cortex-request-id": "r-1"}
        given |= {name.replace("_", "-"): value for name, value in headers.items()}
        status, answered, data = self.send(method, f"/sum{query}", body, given)
        is_json = answered["content-type"] == "application/json"
        return status, json.loads(data) if is_json else data.decode()

    def as_worker(self, action: str, body: bytes, worker: str = "sum-1", token: str | None = None) -> tuple[int, bytes]:
        """Send a request of a job worker; return status and body."""
        token = worker_token("secret", worker) if token is None else token
        status, _, data = self.send("POST", f"/worker/{worker}/{action}", body, {"authorization": f"Bearer {token}"})
        return status, data


@contextlib.contextmanager
def jobs_server() -> Iterator[JobsServer]:
    """Serve the job routes."""
    jobs, workers = MemoryJobs(), MemoryWorkers()
    workloads = MemoryWorkloads()
    logger = Logger("test")
    app = create_jobs_app(
        JobRoutes(jobs, logger),
        AsyncRoutes(workloads, workloads.check_body, logger),
        Response(status_code=404),
        WorkerRoutes(workers, lambda worker: worker_token("secret", worker), logger),
        workloads.is_async,
    )
    with serve_app(app) as path:
        yield JobsServer(path, jobs, workers, workloads)


@contextlib.contextmanager
def serve_app(app: ASGIApp) -> Iterator[Path]:
    """Serve an application on a Unix socket from a thread, and cancel what it still does at the end."""
    with tempfile.TemporaryDirectory(prefix="cortex-") as folder:
        path = Path(folder) / "jobs"
        listener = replace_listener(path)
        running: SimpleQueue[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = SimpleQueue()

        async def serve() -> None:
            # Not server.serve(), which polls for its end.
            ended = asyncio.Event()
            running.put((asyncio.get_running_loop(), ended))
            server = create_jobs_server(app)
            server.config.load()
            server.lifespan = server.config.lifespan_class(server.config)
            await server.startup(sockets=[listener])
            await server.on_tick(0)
            await ended.wait()
            for each in server.servers:
                each.close()

        thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
        thread.start()
        loop, ended = running.get()
        try:
            yield path
        finally:
            loop.call_soon_threadsafe(ended.set)
            thread.join(10)
