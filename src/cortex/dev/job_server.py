"""The routes of jobs and workloads, for the process of a BatchAPI, TaskAPI or AsyncAPI in `cortex dev`.

The routes and the forms of their responses are those of the operator (`operator/http/job_routes.py`,
`operator/http/async_routes.py`). Jobs run on the main thread, one after the other; the event loop runs on another.
"""

from __future__ import annotations

import asyncio
import json
import math
import socket
import sys
import uuid
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import Any
from urllib.parse import parse_qs

from cortex.dev.local.jobs import AsyncApi, JobsApi, LocalJob
from cortex.errors import (
    CortexError,
    InputError,
    MethodNotAllowedError,
    NotFoundError,
    UnknownWorkloadError,
    UnsupportedMediaTypeError,
)
from cortex.jobs.http.view import JobView, job_json, submitted_json
from cortex.jobs.intake.request_body import as_input_error, check_charset, text_in_utf8
from cortex.jobs.spec import Workload
from cortex.lifecycle import WorkloadStatus
from cortex.operator.http.async_routes import MAX_WAIT_S, workload_json
from cortex.payloads.content_encoding import content_coding, decode_body
from cortex.payloads.validation import BadBody
from cortex.terminal import print_line
from cortex.worker.http.connection import Connection, ConnectionPool
from cortex.worker.monitoring.metrics import RequestRecorder
from cortex.worker.requests.payload import JSON, encode_json
from cortex.worker.shared_state import MAX_CONNECTIONS, SharedConnectionState
from cortex.worker.spec import ReplicaSpec

_SHOWN_CHARACTERS = 500


class JobServer:
    """Serves requests on the event loop, and runs jobs on the thread that calls `run`."""

    def __init__(self, spec: ReplicaSpec, api: JobsApi | AsyncApi, loop: asyncio.AbstractEventLoop) -> None:
        self._api = api
        self._loop = loop
        self._connections = 0
        self._pool = ConnectionPool(
            loop, SharedConnectionState(), RequestRecorder(None), self._handle, spec.max_body_bytes
        )
        self._queue: SimpleQueue[LocalJob | Workload | None] = SimpleQueue()
        self._jobs: dict[str, LocalJob] = {}

    def add(self, connection: socket.socket, on_close: Callable[[Connection], None]) -> None:
        """Serve a connection. Event-loop thread only."""
        self._connections += 1
        self._pool.add(connection, self._connections % MAX_CONNECTIONS, on_close)

    def run(self) -> None:
        """Run jobs until `stop`."""
        while (work := self._queue.get()) is not None:
            if isinstance(work, LocalJob) and isinstance(self._api, JobsApi):
                self._api.run(work)
                self._print(work)
            elif isinstance(work, Workload) and isinstance(self._api, AsyncApi):
                view = self._api.run(work)
                shown = view.value.decode(errors="replace")[:_SHOWN_CHARACTERS]
                print_line(f"workload {view.id} {view.status.value}: {shown}", sys.stderr)

    def stop(self) -> None:
        """Make `run` return after the job that runs. On any thread."""
        self._queue.put(None)

    def _print(self, job: LocalJob) -> None:
        record, counts = job.record, job.record.counts
        reason = f": {record.message}" if record.message else ""
        lines = [f"job {record.id} {record.status.message}{reason}"]
        if not record.origin.is_task:
            lines[0] += f" ({counts.succeeded} of {counts.batches} batches succeeded)"
        for number, result in enumerate(job.results[:10]):
            if result is not None:
                what = "result" if record.origin.is_task else f"result of batch {number}"
                lines.append(f"  {what}: {json.dumps(result)[:_SHOWN_CHARACTERS]}")
        print_line("\n".join(lines), sys.stderr)

    # Requests, on the event loop.

    def _handle(self, connection: Connection) -> None:
        connection.task = self._loop.create_task(self._respond(connection))

    async def _respond(self, connection: Connection) -> None:
        try:
            answer = await self._answer(connection)
            connection.respond(200, JSON, encode_json(answer))
        except CortexError as error:
            accepted = error.accepted.encode() if isinstance(error, UnsupportedMediaTypeError) else b""
            headers = ((b"accept-encoding", accepted),) if accepted else ()
            connection.respond_error(error.http_status, str(error), headers)
        finally:
            connection.task = None

    async def _answer(self, connection: Connection) -> Any:
        name = connection.path_below.decode("latin-1").strip("/")
        query = connection.url.partition(b"?")[2].decode("latin-1")
        parameters = {key: values[-1] for key, values in parse_qs(query, keep_blank_values=True).items()}
        method = connection.method
        if method == "POST" and not name:
            return await self._submit(connection)
        if method not in ("GET", "HEAD"):
            raise MethodNotAllowedError.of(method, "POST, GET")
        if isinstance(self._api, AsyncApi):
            return await self._workload(self._api, name, parameters.get("wait", "0"))
        return self._job(name or parameters.get("jobID", ""))

    async def _submit(self, connection: Connection) -> Any:
        content_type = (connection.content_type or b"").decode("latin-1")
        body = await asyncio.to_thread(self._decoded_body, connection)
        if isinstance(self._api, AsyncApi):
            if not content_type:
                raise InputError("the header Content-Type is missing; say what the body is, as application/json")
            check_charset(content_type)
            workload = self._api.submit(content_type, body)
            self._queue.put(workload)
            return {"id": str(workload.id)}
        # The user sends curl, and browsers send the submissions of any page that the user visits.
        is_trusted = all(name != b"origin" for name, _ in connection.headers)
        job = await asyncio.to_thread(self._api.submit, text_in_utf8(body, content_type), is_trusted=is_trusted)
        self._jobs[job.record.id] = job
        self._queue.put(job)
        return submitted_json(job.record)

    def _decoded_body(self, connection: Connection) -> bytes:
        """Return the body of a request, decompressed. Raises: InputError, TooLargeError, UnsupportedMediaTypeError."""
        body = connection.body
        try:
            coding = content_coding(connection.codings) if body else ""
            return decode_body(body, coding, self._pool.max_body_bytes) if coding else body
        except BadBody as error:
            raise as_input_error(error) from None

    def _job(self, name: str) -> Any:
        job = self._jobs.get(name)
        if job is None:
            raise NotFoundError(f"there is no job {name[:100]}" if name else "write <endpoint>/<job id>")
        found = job_json(JobView(job.record, ""))
        failures = [{"batch": each.seq, "error": each.error} for each in job.failures]
        return {**found, "results": job.results, "failures": failures}

    async def _workload(self, api: AsyncApi, name: str, wait: str) -> Any:
        try:
            parsed, wait_s = uuid.UUID(name), float(wait)
        except ValueError:
            raise UnknownWorkloadError(name[:100]) from None
        if not 0 <= wait_s < math.inf:
            raise InputError(f"wait: must be a number of seconds (got {wait[:50]}); write wait=30")
        found = await asyncio.to_thread(partial(api.get, parsed, min(wait_s, MAX_WAIT_S)))
        if found is None:
            raise UnknownWorkloadError(name)
        assert isinstance(found.status, WorkloadStatus)
        return workload_json(found)
