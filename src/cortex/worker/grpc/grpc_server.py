"""The gRPC calls of a process: find the rpc of a request, and serve health checks and reflection.

All connections are on the event loop. Methods that are not `async def` run on as many threads as the API has per
process, or on the event loop once they have proved to be quick, as for requests over HTTP (`requests/runner.py`).
"""

from __future__ import annotations

import asyncio
import time

import grpc

from cortex.payloads.signature import ApiSignature
from cortex.predictor.protobuf import BoundRpc, BoundService
from cortex.worker.grpc.call import Call
from cortex.worker.grpc.connection import GrpcConnection
from cortex.worker.grpc.services import built_in_rpcs
from cortex.worker.grpc.trailers import CONTENT_TYPE
from cortex.worker.grpc.wire import HTTP_STATUSES, RpcError
from cortex.worker.http.connection import Connection
from cortex.worker.monitoring.metrics import SeriesKind, series_key
from cortex.worker.monitoring.route_metrics import RouteRecorder
from cortex.worker.request_server import RequestServer, WorkerContext
from cortex.worker.requests.calls import logs_hint
from cortex.worker.requests.runner import Runner

#: Time for calls to end after their clients were answered at the end of the process.
_END_S = 0.7
_METHOD = "POST"


class GrpcServer(RequestServer):
    """Handles the requests of one process by calls of a service. Event-loop thread only."""

    def __init__(self, context: WorkerContext, service: BoundService, runner: Runner) -> None:
        super().__init__(context, GrpcConnection)
        spec = context.spec
        self.shares_loop = any(rpc.is_async for rpc in service.rpcs.values())
        self.slots = max(spec.threads, spec.max_concurrency) if self.shares_loop else spec.threads
        self.runner = runner
        self._api = spec.api
        self._service = service
        own = {f"/{service.name}/{name}": rpc for name, rpc in service.rpcs.items()}
        self._paths = built_in_rpcs(service) | own
        self._routes = RouteRecorder(context.file)
        self._file = context.file
        self._counters: dict[tuple[str, grpc.StatusCode], int | None] = {}
        for name in service.rpcs:  # Prometheus' `increase()` does not see a series begin
            self._routes.add(_METHOD, f"/{name}")
            for code in grpc.StatusCode:
                self._counter(name, code)
        self._running: set[Call] = set()

    def handle(self, connection: Connection) -> None:
        """Begin the call of a request, whose head has arrived."""
        assert isinstance(connection, GrpcConnection)
        now_ns = time.monotonic_ns()
        waited_ns = connection.gateway_wait_ns(now_ns)
        connection.arrived_ns = now_ns - min(waited_ns, self.timeout_ns)
        connection.is_grpc = (connection.content_type or b"").startswith(CONTENT_TYPE)
        path = connection.url.partition(b"?")[0].decode("latin-1")
        if self._tracing is not None:
            connection.span = self._tracing.start_request(connection, now_ns)
        try:
            if waited_ns >= self.timeout_ns:
                message = f"timed out after {self.limits.timeout_s:g} s, before it could run"
                raise RpcError(grpc.StatusCode.DEADLINE_EXCEEDED, message)
            rpc = self._find(path, connection.method)
        except RpcError as error:
            if connection.is_grpc:
                connection.end_messages(error.code, error.message)
            else:
                status = 404 if error.code is grpc.StatusCode.UNIMPLEMENTED else HTTP_STATUSES[error.code]
                connection.respond_error(status, error.message, fields={"code": error.code.name})
            return
        if connection.span is not None:
            connection.span.set_rpc(path)
        call = Call(self, connection, rpc)
        connection.call = call
        self._running.add(call)
        call.begin()

    def _find(self, path: str, method: str) -> BoundRpc:
        """Return the rpc of a path. Raises: RpcError."""
        rpc = self._paths.get(path)
        if rpc is None and path.strip("/") == self._service.name and len(self._service.rpcs) == 1:
            rpc = next(iter(self._service.rpcs.values()))  # for requests in JSON to the endpoint of the API
        if rpc is not None and method == _METHOD:
            return rpc
        known = ", ".join(f"/{self._service.name}/{name}" for name in self._service.rpcs)
        what = f"{path} is not a method of this API" if rpc is None else f"use {_METHOD}, not {method}"
        raise RpcError(grpc.StatusCode.UNIMPLEMENTED, f"{what}, which has {known}")

    # For calls.

    def remove(self, call: Call, started_ns: int) -> None:
        """Forget a call that has ended, and count it; its method began at `started_ns` (monotonic), 0 if it did not."""
        self._running.discard(call)
        now_ns = time.monotonic_ns()
        if not call.rpc.is_async:
            self.runner.record(now_ns - started_ns if started_ns else 0, may_switch=not self._running)
        assert call.code is not None
        seconds = (now_ns - call.arrived_ns) / 1e9
        self._routes.record(_METHOD, f"/{call.rpc.name}", call.status, seconds)
        counter = self._counter(call.rpc.name, call.code)
        if counter is not None and self._file is not None:
            self._file.cells[counter] += 1

    def _counter(self, rpc: str, code: grpc.StatusCode) -> int | None:
        if (rpc, code) not in self._counters and self._file is not None:
            key = series_key(SeriesKind.COUNTER, "cortex_grpc_calls_total", {"rpc": rpc, "code": code.name})
            self._counters[rpc, code] = self._file.index_of(key)
        return self._counters.get((rpc, code))

    def logs_hint(self) -> str:
        """Return the end of the message of a failed call."""
        return logs_hint(self._api)

    # End.

    def signature(self) -> ApiSignature:
        """Return the methods of the service."""
        return self._service.signature

    def run(self) -> None:
        """Serve until `stop`."""
        self.runner.run()

    def stop(self) -> None:
        """End all calls, then make `run` return."""
        self._stopping = self.loop.create_task(self._stop())

    async def _stop(self) -> None:
        for call in list(self._running):
            call.interrupt()
        if tasks := [call.task for call in self._running if call.task is not None]:
            await asyncio.wait(tasks, timeout=_END_S)
        self.runner.stop()
