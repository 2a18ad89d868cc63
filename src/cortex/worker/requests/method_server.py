"""One request in a process: its deadline, a slot for it, the call, its response.

    Connection ── handle ──> MethodServer ── call ──> Caller ──> user's method
        ^                     │ settle(outcome)
        └──── respond ────────┘

A request runs at once if a slot is free, and is queued otherwise. The call runs on a handler thread, inline on the
event loop once calls have proved to be quick (see `runner`), or as a task if the method is `async def`. APIs that batch
pass their requests to a `RequestBatcher` instead, which makes one call for several. `inference_routes`, and `routes`
for classes with routes, provide the methods of requests at paths below the endpoint; these are never batched.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from cortex.errors import type_name
from cortex.payloads.content_encoding import content_coding, decode_body
from cortex.payloads.inference_protocol import JSON_LENGTH_HEADER
from cortex.payloads.signature import ApiSignature
from cortex.payloads.validation import BadBody
from cortex.predictor.binding import BoundMethod, Kind
from cortex.predictor.loader import BoundPredictor
from cortex.predictor.user_forks import await_ending_forks
from cortex.worker.http.background_tasks import BackgroundTasks
from cortex.worker.http.connection import Connection
from cortex.worker.http.responses import ValidHeaders
from cortex.worker.monitoring.metrics import BatchRecorder
from cortex.worker.request_server import RequestServer, WorkerContext
from cortex.worker.requests.batching import BatchCaller, RequestBatcher, batched_method, for_one
from cortex.worker.requests.calls import Caller, CompletedCall, FailedCall, Outcome, UnfinishedCall
from cortex.worker.requests.inference_batching import InferenceCaller, joined_method
from cortex.worker.requests.inference_routes import INFERENCE, InferenceRoutes, inference_kinds
from cortex.worker.requests.payload import JSON, encode_json, make_headers
from cortex.worker.requests.runner import Runner
from cortex.worker.requests.streaming import ResponseStream, StreamHead, open_response

if TYPE_CHECKING:
    from cortex.worker.monitoring.tracker import PredictionTracker
    from cortex.worker.requests.routes import RouteRequests

#: Kinds of methods whose calls share the event loop.
SHARING_LOOP = frozenset({"async", "async_generator"})
#: Path below the endpoint, of APIs of 0.8 to 0.10.
_SIGNATURE_PATH = b"/signature"
#: Path below the endpoint, of the Open Inference Protocol.
_INFERENCE_PATH = b"/v2/"
_MAX_DIGITS = 19


QueuedCall = tuple[Connection, BoundMethod, int]  #: with its deadline


class MethodServer(RequestServer):
    """Handles the requests of one process, on the event-loop thread except for `_…_on_thread`."""

    def __init__(self, context: WorkerContext, predictor: BoundPredictor, runner: Runner) -> None:
        spec, file, tracker = context.spec, context.file, _open_tracker(context)
        inference = InferenceRoutes(spec, predictor.inference_models, tracker)
        self._below: InferenceRoutes | RouteRequests = inference  #: accepts requests at paths below the endpoint
        new_connection: Callable[..., Connection] = Connection
        if predictor.routes:
            from cortex.worker.requests import routes  # noqa: PLC0415 - only for classes with routes

            self._below = routes.RouteRequests(predictor.routes, inference)
            new_connection = routes.routed_connections(predictor.routes, file)
        super().__init__(context, new_connection)
        if tracker is None and spec.metrics_dir:
            self.connections.answers_folder = Path(spec.metrics_dir)
        self._predictor = predictor
        self._methods = predictor.methods
        self._caller = Caller(spec.api, predictor, tracker)
        self._runner = runner
        self.shares_loop = bool(call_kinds(predictor) & SHARING_LOOP)
        self._call_slots = max(spec.threads, spec.max_concurrency) if self.shares_loop else spec.threads
        self._running = 0  #: calls that occupy a slot
        self._suspended = 0  #: generators on threads that wait for slow clients, and occupy neither slot nor thread
        self._threads = spec.threads
        self._on_threads = 0  #: calls that are on a thread, or about to be
        self._queue: deque[QueuedCall] = deque()  #: for a slot
        self._thread_queue: deque[QueuedCall] = deque()  #: likewise, and for a thread
        self._background = BackgroundTasks(self.loop, spec.threads)
        self._batched = batched_method(spec, predictor)
        recorder, numbers = BatchRecorder(file), itertools.count(1)

        def settle(connection: Connection, outcome: Outcome) -> None:
            self._running += 1
            self._settle(connection, outcome, 0)

        def batcher(caller: Caller, method: BoundMethod) -> RequestBatcher:
            key = predictor.batch_key if method is self._batched else None
            calls = BatchCaller(caller, method, lambda: self.limits.timeout_s, numbers, key)
            return RequestBatcher(spec, calls, runner, self.loop, recorder, settle, lambda: self._running == 0)

        self._decoders: ThreadPoolExecutor | None = None
        if self._batched is not None:
            self._single = for_one(self._batched)
            self._batcher = batcher(self._caller, self._batched)
        self._tensor_batcher: RequestBatcher | None = None
        if (joined := joined_method(spec, predictor, inference)) is not None:
            self._tensor_batcher = batcher(InferenceCaller(spec.api, predictor, inference), joined)
        batches = self._batched is not None or self._tensor_batcher is not None
        # While a batch runs, the requests of the next batch have to arrive, so that its size is known in time.
        self.slots = max(self._call_slots, (spec.threads + 1) * spec.max_batch_size if batches else 0)
        if any(method.needs_headers or method.needs_query_params for method in predictor.all_methods):
            make_headers(())  # imports starlette, which would delay the first request

    def signature(self) -> ApiSignature:
        """Return the methods, and the models that are always loaded."""
        return self._predictor.signature

    def run(self) -> None:
        """Serve until `stop`, then wait for background tasks."""
        self._runner.run()
        self.shutdown()

    def stop(self) -> None:
        """Make `run` return after the calls already submitted."""
        self._runner.stop()

    def shutdown(self) -> None:
        """Wait for background tasks."""
        self._background.shutdown()
        if self._decoders is not None:
            self._decoders.shutdown()

    # Start.

    def handle(self, connection: Connection) -> None:
        """Run the complete request of a connection now, or queue it if no slot is free."""
        if connection.content_encoding is not None and connection.body:
            self._decode(connection)
            return
        now_ns = time.monotonic_ns()
        connection.arrived_ns = arrived_ns = now_ns - min(connection.gateway_wait_ns(now_ns), self.timeout_ns)
        if self._tracing is not None:
            connection.span = self._tracing.start_request(connection, now_ns)
        verb = connection.method
        method = self._methods.get(verb)
        if connection.endpoint is not None:
            if (
                self._predictor.request_handler is not None
                and verb == "GET"
                and connection.path_below == _SIGNATURE_PATH
            ):
                signature = self._predictor.request_handler.describe()
                connection.respond(200, JSON, encode_json({"signature": signature}))
                return
            method = self._below.accept(connection)
            if method is None:
                return
            if self._tensor_batcher is not None and method.signature is INFERENCE:
                self._batch(self._tensor_batcher, method, connection, arrived_ns + self.timeout_ns, now_ns)
                return
        elif method is None or connection.requests_info:
            self._respond_without_method(connection, verb)
            return
        deadline_ns = arrived_ns + self.timeout_ns
        if method is self._batched:
            self._batch(self._batcher, self._single, connection, deadline_ns, now_ns)
        elif self._running < self._call_slots and (self._on_threads < self._threads or method.kind in SHARING_LOOP):
            self._start(connection, method, deadline_ns, now_ns)
        else:
            connection.queue(deadline_ns)
            queue = self._queue if method.kind in SHARING_LOOP else self._thread_queue
            queue.append((connection, method, deadline_ns))

    def _decode(self, connection: Connection) -> None:
        """Decode the body on a thread, so that it delays no other request, then handle the request."""
        connection.arrived_ns = now_ns = time.monotonic_ns()
        json_length = None
        if connection.path_below.startswith(_INFERENCE_PATH):
            found = dict(connection.headers).get(JSON_LENGTH_HEADER, b"")
            json_length = int(found) if found.isdigit() and len(found) < _MAX_DIGITS else None
        try:
            coding = content_coding(connection.codings)
        except BadBody as error:
            connection.respond_error(error.status, str(error), ValidHeaders(error.headers))
            return
        connection.queue(now_ns - min(connection.gateway_wait_ns(now_ns), self.timeout_ns) + self.timeout_ns)
        if self._decoders is None:
            self._decoders = ThreadPoolExecutor(1, "body-decoder")
        max_bytes = self.limits.max_body_bytes
        self._decoders.submit(self._decode_on_thread, connection, connection.body, coding, max_bytes, json_length)

    def _decode_on_thread(
        self, connection: Connection, body: bytes, coding: str, max_bytes: int, json_length: int | None
    ) -> None:
        try:
            decoded: bytes | BadBody = decode_body(body, coding, max_bytes, json_length) if coding else body
        except BadBody as error:
            decoded = error
        self._runner.wake(partial(self._handle_decoded, connection, decoded))

    def _handle_decoded(self, connection: Connection, decoded: bytes | BadBody) -> None:
        if not connection.open:
            return
        if isinstance(decoded, BadBody):
            connection.respond_error(decoded.status, str(decoded), ValidHeaders(decoded.headers))
            return
        connection.set_decoded_body(decoded)
        self.handle(connection)

    def _batch(
        self, batcher: RequestBatcher, single: BoundMethod, connection: Connection, deadline_ns: int, now_ns: int
    ) -> None:
        """Call the method for this request alone at once, or queue it for a batch."""
        if batcher.may_call_single(now_ns):
            connection.batched_ns = now_ns
            self._start(connection, single, deadline_ns, now_ns)
            batcher.record_single(now_ns)
            return
        connection.queue(deadline_ns)
        batcher.add(connection, deadline_ns, now_ns)

    def _respond_without_method(self, connection: Connection, verb: str) -> None:
        if verb == "GET":
            connection.respond(200, JSON, encode_json(self._predictor.describe()))
        elif verb == "HEAD":
            connection.respond(200, JSON, b"")
        elif connection.requests_info:
            message = f"{verb} is not supported at /info; it answers GET"
            connection.respond_error(405, message, ValidHeaders(((b"allow", b"GET"),)))
        else:
            allowed = ", ".join(self._methods)
            below = "its routes" if self._predictor.routes else "the Open Inference Protocol at /v2"
            answers = allowed or f"{below} below this path"
            message = f"{verb} is not supported by this API; it answers {answers}"
            connection.respond_error(405, message, ValidHeaders(((b"allow", allowed.encode()),)))

    def _start(self, connection: Connection, method: BoundMethod, deadline_ns: int, now_ns: int) -> None:
        if deadline_ns <= now_ns:
            connection.respond_error(504, f"timed out after {self.limits.timeout_s:g} s, before it could run")
            return
        self._running += 1
        if method.kind in ("async", "async_generator"):
            connection.begin(deadline_ns + self.grace_ns)
            connection.started_ns = now_ns
            outcome = self._caller.call(connection, method)
            self._settle(connection, outcome, deadline_ns)
        elif self._runner.inline:
            connection.begin(deadline_ns)
            connection.started_ns = started_ns = time.monotonic_ns()
            outcome = self._runner.call_inline(self._caller.call, connection, method)
            self._runner.record(time.monotonic_ns() - started_ns, may_switch=False)
            self._settle(connection, outcome, deadline_ns)
        else:
            connection.begin(deadline_ns)
            self.connections.move_to_end(connection)
            self._on_threads += 1
            if self._running >= self._call_slots:
                self.connections.set_paused(True)
            self._runner.submit(partial(self._call_on_thread, connection, method, deadline_ns))

    def _call_on_thread(self, connection: Connection, method: BoundMethod, deadline_ns: int) -> None:
        connection.started_ns = started_ns = time.monotonic_ns()
        outcome = self._caller.call(connection, method)
        # The event loop sends the chunks of a generator: while the runner switches, none runs.
        if isinstance(outcome, UnfinishedCall) and outcome.kind == "generator" and not self._runner.is_switching:
            self._stream_on_thread(connection, outcome)
            return
        duration_ns = time.monotonic_ns() - started_ns
        self._runner.wake(partial(self._settle_from_thread, connection, outcome, deadline_ns, duration_ns))

    def _settle_from_thread(self, connection: Connection, outcome: Outcome, deadline_ns: int, duration_ns: int) -> None:
        self._on_threads -= 1
        self._settle(connection, outcome, deadline_ns)
        if self._thread_queue:
            self._start_queued()
        self._runner.record(duration_ns, may_switch=self._running + self._suspended == 0)

    # Respond.

    def _settle(self, connection: Connection, outcome: Outcome, deadline_ns: int) -> None:
        """Respond, or run the rest of an unfinished call."""
        if isinstance(outcome, CompletedCall) and outcome.encoded.response is None:
            encoded = outcome.encoded
            connection.respond(encoded.status, encoded.media_type, encoded.body, encoded.headers)
            if outcome.background is not None:
                self._background.run(outcome.background)
            self._release(connection)
        elif isinstance(outcome, FailedCall):
            _respond_failed(connection, outcome)
            self._release(connection)
        elif isinstance(outcome, UnfinishedCall) and outcome.kind == "generator":
            # Each step may block, so generators always run on a thread.
            self._runner.require_threads()
            self._on_threads += 1
            self._runner.submit(partial(self._stream_on_thread, connection, outcome))
        else:
            connection.task = self.loop.create_task(self._finish(connection, outcome, deadline_ns))

    def _stream_on_thread(self, connection: Connection, outcome: UnfinishedCall) -> None:
        self._continue_stream(connection, outcome, self._stream(connection, StreamHead.of_items(outcome.method)))

    def _continue_stream(self, connection: Connection, outcome: UnfinishedCall, stream: ResponseStream) -> None:
        started_ns = time.monotonic_ns()
        connection.enter(outcome.method.name)
        is_over = stream.run(outcome.value)
        duration_ns = time.monotonic_ns() - started_ns
        thread = threading.get_ident()

        def leave_thread() -> None:
            self._runner.durations.record(duration_ns)
            self._on_threads -= 1
            if is_over:
                self._release(connection)
            else:
                self._suspended += 1
                self._free_slot()
                self.loop.create_task(self._resume(connection, outcome, stream, thread))

        self._runner.wake(leave_thread)

    async def _resume(
        self, connection: Connection, outcome: UnfinishedCall, stream: ResponseStream, thread: int
    ) -> None:
        """Continue a generator on its thread once its client has read what was sent.

        It occupies neither slot nor thread until that thread is free: others may be free before.
        """
        await stream.writable()
        self._runner.require_threads()

        def occupy_again() -> None:
            self._suspended -= 1
            self._occupy_slot()
            self._on_threads += 1

        def go_on() -> None:
            self._runner.wake(occupy_again)
            self._continue_stream(connection, outcome, stream)

        self._runner.submit(go_on, thread)

    async def _finish(self, connection: Connection, outcome: Outcome, deadline_ns: int) -> None:
        started_ns = time.monotonic_ns()
        if isinstance(outcome, UnfinishedCall):
            connection.enter(outcome.method.name)  # the context may be that of another call, which ended on a thread
        try:
            if isinstance(outcome, UnfinishedCall) and outcome.kind == "async":
                outcome = await self._await(connection, outcome, deadline_ns)
            if isinstance(outcome, UnfinishedCall):
                stream = self._stream(connection, StreamHead.of_items(outcome.method))
                await stream.run_async(outcome.value, self._free_slot, self._occupy_slot)
            elif isinstance(outcome, FailedCall):
                _respond_failed(connection, outcome)
            else:
                await self._respond(connection, outcome)
        except asyncio.CancelledError:
            pass  # the client has disconnected
        finally:
            connection.task = None
            self._runner.durations.record(time.monotonic_ns() - started_ns)
            self._release(connection)

    async def _await(self, connection: Connection, unfinished: UnfinishedCall, deadline_ns: int) -> Outcome:
        try:
            async with asyncio.timeout((deadline_ns - time.monotonic_ns()) / 1e9) as limit:
                result = await await_ending_forks(unfinished.value)
        except TimeoutError as error:
            if limit.expired():
                return FailedCall(504, f"timed out after {self.limits.timeout_s:g} s")
            return self._caller.fail(connection, unfinished.method, error)
        except asyncio.CancelledError as error:
            if not connection.open:
                raise
            # The client is still connected: user code cancelled itself, or something it awaited.
            return self._caller.fail(connection, unfinished.method, error)
        except BaseException as error:  # the edge of the user's code
            return self._caller.fail(connection, unfinished.method, error)
        return self._caller.finish(connection, unfinished, result)

    async def _respond(self, connection: Connection, completed: CompletedCall) -> None:
        encoded = completed.encoded
        if encoded.response is None:
            connection.respond(encoded.status, encoded.media_type, encoded.body, encoded.headers)
        else:
            try:
                opened = await open_response(encoded.response, connection.headers, connection.method)
            except Exception as error:  # the edge of the user's code: a missing file, a stream that raises
                _respond_failed(connection, self._caller.fail(connection, type_name(encoded.response), error))
                return
            stream = self._stream(connection, StreamHead(opened.status, b"", opened.headers))
            await stream.run_async(opened.chunks, self._free_slot, self._occupy_slot)
            self._background.run(lambda: opened.done)
        if completed.background is not None:
            self._background.run(completed.background)

    def _stream(self, connection: Connection, head: StreamHead) -> ResponseStream:
        refuse_or_log = partial(self._caller.refuse_or_log, connection)
        return ResponseStream(connection, self._runner, self.timeout_ns, self.grace_ns, refuse_or_log, head)

    # End.

    def _release(self, connection: Connection) -> None:
        """Note that the call of a request is over, and free its slot."""
        connection.call_over()
        self._free_slot()

    def _occupy_slot(self) -> None:
        """Occupy a slot for a call whose client has read what was sent, even if none is free."""
        self._running += 1

    def _free_slot(self) -> None:
        """Free the slot of a call that is over, or waits for its client, and start queued requests."""
        self._running -= 1
        if self._queue or self._thread_queue:
            self._start_queued()
        if self.connections.is_paused and self._running < self._call_slots:
            self.connections.set_paused(False)

    def _start_queued(self) -> None:
        """Start requests that wait for a slot, and those that wait for a thread if one is free."""
        while self._running < self._call_slots:
            has_thread = self._on_threads < self._threads
            queue = self._thread_queue if has_thread and self._thread_queue else self._queue
            if not queue:
                return
            waiting, method, deadline_ns = queue.popleft()
            if waiting.open:
                self._start(waiting, method, deadline_ns, time.monotonic_ns())


def call_kinds(predictor: BoundPredictor) -> set[Kind]:
    """Return the kinds of all methods of a class, and of its models."""
    return {method.kind for method in predictor.all_methods} | inference_kinds(predictor.inference_models)


def _open_tracker(context: WorkerContext) -> PredictionTracker | None:
    if context.spec.tracker_type is None or context.file is None:
        return None
    from cortex.worker.monitoring.tracker import PredictionTracker  # noqa: PLC0415 - other APIs start faster

    return PredictionTracker(context.spec, context.file)


def _respond_failed(connection: Connection, failed: FailedCall) -> None:
    connection.respond_error(failed.status, failed.message, failed.headers, failed.fields)
