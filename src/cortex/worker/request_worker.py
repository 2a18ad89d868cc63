"""The process that serves requests: load the user's code, report readiness to the supervisor, serve until stopped.

The supervisor accepts connections and passes them over the channel; the worker reports which of them it closed. The
supervisor's side is `supervisor.request_worker_slot`. If the supervisor dies, the worker answers its requests with that
reason, and ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import os
import socket
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvloop

from cortex.models.spec import Catalogue
from cortex.predictor.loader import BoundPredictor, load
from cortex.predictor.user_forks import end_forks_of_threads
from cortex.processes.orphans import live_without_parent
from cortex.processes.priority import enter_background, in_background
from cortex.worker.channel import Channel
from cortex.worker.http.connection import Connection
from cortex.worker.monitoring.trace_export import open_tracing
from cortex.worker.monitoring.user_metrics import MetricsClient, metrics_client
from cortex.worker.request_server import RequestServer, WorkerContext
from cortex.worker.requests.method_server import SHARING_LOOP, MethodServer, call_kinds
from cortex.worker.requests.readiness import check_readiness
from cortex.worker.requests.runner import CallDurations, Runner
from cortex.worker.shared_state import SharedConnectionState
from cortex.worker.spec import ReplicaSpec, RequestLimits
from cortex.worker.worker_process import (
    ModelEvents,
    ModelStart,
    enter_project,
    open_metrics,
    report_failure,
    run_exit_hooks,
    signature_text,
)

if TYPE_CHECKING:
    from cortex.models.registry import Registry
    from cortex.worker.applications.lifespan import Lifespan

#: Delay before messages that the channel could not take are sent again.
_RESEND_S = 0.05
#: A dying supervisor closes its end of the channel a moment before it stops being the parent of its workers.
_PARENT_CHECK_S = 0.001
_SUPERVISOR_DIED = "the supervisor of its replica died"
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # <malloc.h>
#: Free memory that a process keeps at the end of its heap. glibc's default is 128 kB, or twice the largest freed block:
#: then each body of a megabyte causes 250 page faults, which take as long as reading it.
_KEPT_BYTES = 16 * 1024 * 1024
#: Larger blocks are outside of the heap. glibc increases its default to this as blocks are freed.
_MAPPED_BYTES = 32 * 1024 * 1024


def run_request_worker(
    spec: ReplicaSpec,
    index: int,
    channel: Channel,
    shared_state: SharedConnectionState,
    models: ModelStart | None,
) -> int:
    """Serve as process `index` of a replica; return the exit code."""
    try:
        spec = enter_project(spec, index)
        file = open_metrics(spec, index)
        tracing = open_tracing(spec, index)
        predictor = _load(spec, channel, models, metrics_client(spec, index, file))
        loop = uvloop.new_event_loop()  # not the current loop of this thread, which belongs to user code
    except BaseException as error:  # the edge of the process: our exceptions, or those of user code beyond Exception
        report_failure(channel, error)
        return 1
    return serve(WorkerContext(spec, loop, shared_state, file, tracing), channel, predictor)


def serve(context: WorkerContext, channel: Channel, predictor: BoundPredictor) -> int:
    """Serve requests with a constructed class until stopped; return the exit code. `channel` is the supervisor's."""
    spec, loop, tracing = context.spec, context.loop, context.tracing
    try:
        if tracing is not None:
            tracing.serve_user_code()
        predictor.after_fork()
        end_forks_of_threads(loop)
        check_readiness(spec, predictor, loop, channel)
        lifespan = _start_application(predictor, loop)
    except BaseException as error:  # the edge of the process: our exceptions, or those of user code beyond Exception
        report_failure(channel, error)
        return 1
    gc.freeze()  # models stay, so no collection has to traverse them
    if spec.models is None:  # else memory of models that are not used any more has to be returned
        _keep_freed_memory()
    server = _create_server(context, predictor, lifespan)
    with recording(context, server):
        SupervisorChannel(server, channel, predictor.registry).start()
        signature = signature_text(server.signature)
        channel.send("ready", slots=server.slots, shares_loop=server.shares_loop, signature=signature)
        server.run()
    run_exit_hooks()
    if tracing is not None:
        tracing.shutdown()
    enter_background()  # freeing the memory of big models takes a while
    return 0


def _keep_freed_memory() -> None:
    """Configure the allocator to keep enough freed memory for the bodies of requests and responses."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):  # not musl
        libc.mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
        libc.mallopt(_M_MMAP_THRESHOLD, _MAPPED_BYTES)


def _load(spec: ReplicaSpec, channel: Channel, start: ModelStart | None, metrics: MetricsClient) -> BoundPredictor:
    if start is None or spec.models is None:
        return load(spec, metrics=metrics)
    from cortex.models.fetcher import AgentFetcher  # noqa: PLC0415 - APIs without models start faster
    from cortex.models.memory_budget import configure_allocator  # noqa: PLC0415

    configure_allocator()
    fetcher = AgentFetcher(spec.model_agent_socket or "", spec.api, spec.models)
    with in_background(start.is_standby):
        return load(spec, start.catalogue, fetcher, ModelEvents(channel), start.extra_versions, metrics)


def _create_server(context: WorkerContext, predictor: BoundPredictor, lifespan: Lifespan | None) -> RequestServer:
    if lifespan is not None:
        from cortex.worker.applications.application_server import (  # noqa: PLC0415 - other APIs start faster
            ApplicationServer,
        )

        return ApplicationServer(context, lifespan)
    if predictor.service is not None:
        from cortex.worker.grpc.grpc_server import GrpcServer  # noqa: PLC0415 - other APIs have no grpcio

        rpcs = predictor.service.rpcs.values()
        # The iterators of streams block the thread of their method.
        blocks = any((rpc.request_streams or rpc.response_streams) and not rpc.is_async for rpc in rpcs)
        runner = _create_runner(context, blocks, any(rpc.is_async for rpc in rpcs))
        return GrpcServer(context, predictor.service, runner)
    kinds = call_kinds(predictor)
    runner = _create_runner(context, "generator" in kinds, bool(kinds & SHARING_LOOP))
    return MethodServer(context, predictor, runner)


def _create_runner(context: WorkerContext, always_threads: bool, has_tasks: bool) -> Runner:
    spec = context.spec
    # Any call may have to load its model first, and must not delay calls that other threads could run.
    waits_for_models = spec.threads > 1 and spec.models is not None
    durations = CallDurations(context.shared_state)
    return Runner(context.loop, spec.threads, durations, always_threads or waits_for_models, has_tasks)


@contextlib.contextmanager
def recording(context: WorkerContext, server: RequestServer) -> Iterator[None]:
    """Record the requests of a server, if its API records."""
    if not context.spec.record_share:
        yield
        return
    from cortex.worker.monitoring.exchange_writer import open_exchange_writer  # noqa: PLC0415 - other APIs start faster

    exchanges = server.connections.exchanges = open_exchange_writer(context.spec, context.file, context.loop)
    yield
    if exchanges is not None:
        exchanges.close()


def _start_application(predictor: BoundPredictor, loop: asyncio.AbstractEventLoop) -> Lifespan | None:
    """Start the API's application, if it has one. Raises: UserError."""
    if predictor.application is None:
        return None
    from cortex.worker.applications.lifespan import Lifespan  # noqa: PLC0415 - other APIs start faster

    lifespan = Lifespan(predictor.application)
    loop.run_until_complete(lifespan.startup())
    return lifespan


class SupervisorChannel:
    """Receives connections and commands from the supervisor, and reports closed connections. Event-loop thread only."""

    def __init__(
        self,
        server: RequestServer,
        channel: Channel,
        models: Registry[Any] | None = None,
        on_orphaned: Callable[[], object] = partial(os._exit, 1),
    ) -> None:
        """Create the worker's end; `on_orphaned` ends the process at once, after its requests were answered."""
        self._server = server
        self._loop = server.loop
        self._channel = channel
        self._models = models
        self._on_orphaned = on_orphaned
        self._supervisor = os.getppid()
        self._failures = 0
        self._unsent: list[tuple[str, int]] = []

    def start(self) -> None:
        """Receive messages on the event loop; from now on, this process ends by itself."""
        live_without_parent()  # not before the parent is known
        self._channel.sock.setblocking(False)
        self._loop.add_reader(self._channel.fileno(), self._receive)

    def _receive(self) -> None:
        while True:
            try:
                received = self._channel.receive()
            except BlockingIOError:
                return
            if received is None:
                self._failures += 1
                if self._failures == 1:
                    continue  # the error may be that of a message we sent; connections may follow it
                self._loop.remove_reader(self._channel.fileno())
                self._end_as_orphan()
                return
            message, fd = received
            if message["kind"] == "connection" and fd is not None:
                connection = socket.socket(fileno=fd)
                self._server.connections.add(connection, message["index"], self._on_closed, message["once"])
            elif message["kind"] == "configure":
                self._server.configure(RequestLimits.parse(message))
            elif message["kind"] == "catalogue" and self._models is not None:
                self._models.update(Catalogue.from_json(Path(message["path"]).read_bytes()))
            elif message["kind"] == "retire":
                self._server.connections.retire(lambda connection: self._report([("released", connection.index)]))
            elif message["kind"] == "condemn":  # another call is stuck: the process ends once the rest is done
                self._server.connections.stop_reading()
            elif message["kind"] == "stop":
                self._loop.remove_reader(self._channel.fileno())
                self._server.stop()
                return

    def _end_as_orphan(self) -> None:
        """Answer the requests and end, once it is known that the supervisor has died.

        Otherwise user code has broken the channel, and the supervisor ends this process.
        """
        if os.getppid() == self._supervisor:
            self._loop.call_later(_PARENT_CHECK_S, self._end_as_orphan)
            return
        self._server.connections.end_all(_SUPERVISOR_DIED)
        self._on_orphaned()

    def _on_closed(self, connection: Connection) -> None:
        self._report([("closed", connection.index)])

    def _report(self, events: list[tuple[str, int]]) -> None:
        """Report to the supervisor, which keeps a descriptor of each connection until then."""
        if self._failures > 1:
            return  # the supervisor is dead
        unsent = [(kind, index) for kind, index in events if not self._channel.send(kind, index=index)]
        if unsent and not self._unsent:
            self._loop.call_later(_RESEND_S, self._report_again)
        self._unsent += unsent

    def _report_again(self) -> None:
        events, self._unsent = self._unsent, []
        self._report(events)
