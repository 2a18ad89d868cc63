"""A realtime request: its deadline, a slot for it, the call, the answer. It must not know how bytes travel."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial

from cortex.predictor.loader import BoundMethod, BoundPredictor
from cortex.replica.asgi import open_response
from cortex.replica.background_tasks import AfterCalls
from cortex.replica.batcher import ASYNC_GRACE_NS, Batcher
from cortex.replica.batches import BatchCaller, batched_method, for_one
from cortex.replica.calls import Answered, Caller, Failed, Outcome, Tracks, Unfinished
from cortex.replica.errors import error_body
from cortex.replica.http import Connection
from cortex.replica.metric_file import MetricFile
from cortex.replica.payload import JSON, encode_json
from cortex.replica.recorder import BatchRecorder, Recorder
from cortex.replica.request_log import REQUEST
from cortex.replica.response_head import Header
from cortex.replica.runner import Runner
from cortex.replica.shared_state import ConnectionState
from cortex.replica.spec import Limits, ReplicaSpec
from cortex.replica.streams import Stream

_NS_PER_S = 1_000_000_000


class App:
    """Answers the requests of one process; all of it runs on the event loop's thread but `_call_on_thread`."""

    def __init__(
        self,
        spec: ReplicaSpec,
        predictor: BoundPredictor,
        runner: Runner,
        loop: asyncio.AbstractEventLoop,
        slots: int,
        file: MetricFile | None,
        tracker: Tracks | None = None,
    ) -> None:
        self.configure(spec.limits)
        self._predictor = predictor
        self._methods = predictor.methods
        self._caller = Caller(spec.api, predictor, tracker)
        self._runner = runner
        self._loop = loop
        self._slots = slots
        self._recorder = Recorder(file)
        self.answered = 0  #: requests whose connections were ready for another
        self._running = 0
        self._queue: deque[tuple[Connection, BoundMethod, int]] = deque()
        #: Those that were served longest ago first: they are the first to be read when a slot is free again.
        self._connections: dict[Connection, None] = {}
        self._paused = False
        self._condemned = False
        self._release_to: Callable[[Connection], None] | None = None
        self._after = AfterCalls(loop, spec.threads)
        self._batched = batched_method(spec, predictor)
        if self._batched is not None:
            self._alone = for_one(self._batched)
            caller = BatchCaller(self._caller, self._batched, lambda: self._timeout_s)
            self._batcher = Batcher(spec, caller, runner, loop, BatchRecorder(file), self)

    def configure(self, limits: Limits) -> None:
        """Take other limits, from the next request on."""
        self.max_body_bytes = limits.max_body_bytes
        self._timeout_s = limits.timeout_s
        self._timeout_ns = int(limits.timeout_s * _NS_PER_S)

    @property
    def timeout_s(self) -> float:
        """How long a request may take."""
        return self._timeout_s

    # Connections.

    @property
    def has_requests(self) -> bool:
        """Tell whether a request is inside any connection."""
        return any(not connection.is_idle for connection in self._connections)

    def add(self, connection: Connection) -> None:
        """Serve a connection."""
        self._connections[connection] = None
        if self._release_to is not None:
            self._let_go(connection)
        elif not self._paused:
            connection.resume()

    def gone(self, connection: Connection) -> None:
        """Forget a connection; an `async def` call for it is cancelled, what waits for its turn never gets one."""
        self._connections.pop(connection, None)
        if connection.task is not None:
            connection.task.cancel()

    def idle(self, connection: Connection) -> None:
        """Learn that the connection is ready for its next request."""
        self.answered += 1
        if self._release_to is not None:
            self._let_go(connection)
        elif self._paused:
            connection.pause()

    def retire(self, release_to: Callable[[Connection], None]) -> None:
        """Finish the requests inside and take no other: each connection without one goes to `release_to`."""
        self._release_to = release_to
        for connection in [connection for connection in self._connections if connection.is_idle]:
            self._let_go(connection)

    def _let_go(self, connection: Connection) -> None:
        assert self._release_to is not None
        connection.release()
        self._release_to(connection)

    def suspect(self, groups: Mapping[str, int]) -> None:
        """Learn which requests were in batches that killed a process before this one."""
        if self._batched is not None:
            self._batcher.suspect(groups)

    def condemn(self) -> None:
        """Take no new request: another call is stuck, and this process ends once the rest is done."""
        self._condemned = True
        self._set_paused(True)

    def shutdown(self) -> None:
        """Finish what was to be done after answers."""
        self._after.shutdown()

    def _set_paused(self, paused: bool) -> None:
        """Leave requests in their sockets while every slot is taken: no request dies with another's process."""
        paused = paused or self._condemned
        if paused == self._paused:
            return
        self._paused = paused
        for connection in self._connections:
            if not paused:
                connection.resume()
            elif connection.is_idle:
                connection.pause()

    # A request comes.

    def handle(self, connection: Connection) -> None:
        """Run the request now, or queue it while every slot is taken."""
        now_ns = time.monotonic_ns()
        connection.arrived_ns = arrived_ns = now_ns - self._waited_ns(connection, now_ns)
        verb = connection.method
        method = self._methods.get(verb)
        if method is None or connection.asks_for_info:
            self._answer_without_method(connection, verb)
            return
        deadline_ns = arrived_ns + self._timeout_ns
        if method is self._batched:
            if self._batcher.may_call_alone(now_ns):
                connection.batched_ns = now_ns
                self._start(connection, self._alone, deadline_ns, now_ns)
                self._batcher.called_alone(now_ns)
                return
            connection.begin(deadline_ns)
            connection.set_state(ConnectionState.QUEUED)
            self._batcher.add(connection, deadline_ns, now_ns)
        elif self._running < self._slots:
            self._start(connection, method, deadline_ns, now_ns)
        else:
            connection.begin(deadline_ns)
            connection.set_state(ConnectionState.QUEUED)
            self._queue.append((connection, method, deadline_ns))

    def too_large(self, connection: Connection) -> None:
        """Refuse a body that exceeds the limit."""
        self._fail(connection, 413, f"the request body is larger than {self.max_body_bytes} bytes")

    def malformed(self, connection: Connection) -> None:
        """Refuse what is not HTTP."""
        self._fail(connection, 400, "the request is not valid HTTP")

    def _answer_without_method(self, connection: Connection, verb: str) -> None:
        if verb == "GET":
            self._answer(connection, 200, JSON, encode_json(self._predictor.describe()))
        elif verb == "HEAD":
            self._answer(connection, 200, JSON, b"")
        else:
            allowed = ", ".join(self._methods)
            message = f"{verb} is not supported by this API; it answers {allowed}"
            body = error_body(message, connection.request_id.decode("latin-1"))
            self._answer(connection, 405, JSON, body, ((b"allow", allowed.encode()),))

    def _waited_ns(self, connection: Connection, now_ns: int) -> int:
        """Return for how long the request was in the gateway, whose id begins with when it came; the time-out at most.

        That is in UNIX milliseconds, 13 digits, or in microseconds.
        """
        request_id = connection.request_id
        try:
            if request_id[13:14].isdigit():
                came_ns = int(request_id[:16]) * 1000
            else:
                came_ns = int(request_id[:13]) * 1_000_000
        except ValueError:
            return 0
        waited_ns = time.time_ns() - came_ns
        if connection.clock is not None:
            waited_ns = connection.clock.waited_ns(waited_ns, now_ns)
        return min(max(waited_ns, 0), self._timeout_ns)

    # It runs.

    def _start(self, connection: Connection, method: BoundMethod, deadline_ns: int, now_ns: int) -> None:
        if deadline_ns <= now_ns:
            self._fail(connection, 504, f"timed out after {self._timeout_s:g} s, before it could run")
            return
        self._running += 1
        if method.kind in ("async", "async_generator"):
            connection.begin(deadline_ns + ASYNC_GRACE_NS)
            connection.started_ns = now_ns
            outcome = self._caller.call(connection, method)
            self._settle(connection, outcome, deadline_ns)
        elif self._runner.inline:
            connection.begin(deadline_ns)
            connection.started_ns = started_ns = time.monotonic_ns()
            outcome = self._caller.call(connection, method)
            self._runner.record(time.monotonic_ns() - started_ns, may_switch=False)
            self._settle(connection, outcome, deadline_ns)
        else:
            connection.begin(deadline_ns)
            self._connections.pop(connection, None)
            self._connections[connection] = None
            if self._running >= self._slots:
                self._set_paused(True)
            self._runner.submit(partial(self._call_on_thread, connection, method, deadline_ns))

    def _call_on_thread(self, connection: Connection, method: BoundMethod, deadline_ns: int) -> None:
        connection.started_ns = started_ns = time.monotonic_ns()
        outcome = self._caller.call(connection, method)
        if isinstance(outcome, Unfinished) and outcome.kind == "generator":
            self._stream_on_thread(connection, outcome)
            return
        duration_ns = time.monotonic_ns() - started_ns
        self._runner.wake(partial(self._settle_from_thread, connection, outcome, deadline_ns, duration_ns))

    def _settle_from_thread(self, connection: Connection, outcome: Outcome, deadline_ns: int, duration_ns: int) -> None:
        self._settle(connection, outcome, deadline_ns)
        self._runner.record(duration_ns, may_switch=self._running == 0)

    def _settle(self, connection: Connection, outcome: Outcome, deadline_ns: int) -> None:
        """Answer, or run what is left to run."""
        if isinstance(outcome, Answered) and outcome.encoded.response is None:
            encoded = outcome.encoded
            self._answer(connection, encoded.status, encoded.media_type, encoded.body, encoded.headers)
            if outcome.after is not None:
                self._after.run(outcome.after)
            self._release(connection)
        elif isinstance(outcome, Failed):
            self._fail(connection, outcome.status, outcome.message)
            self._release(connection)
        elif isinstance(outcome, Unfinished) and outcome.kind == "generator":
            # Each step may block: it belongs on a thread, whatever the method looked like.
            self._runner.require_threads()
            self._runner.submit(partial(self._stream_on_thread, connection, outcome))
        else:
            connection.task = self._loop.create_task(self._finish(connection, outcome, deadline_ns))

    def settle_batched(self, connection: Connection, outcome: Outcome) -> None:
        """Answer a request whose call was that of a whole batch."""
        self._running += 1
        self._settle(connection, outcome, 0)

    def may_switch(self) -> bool:
        """Tell whether nothing but batches is running."""
        return self._running == 0

    def _stream_on_thread(self, connection: Connection, outcome: Unfinished) -> None:
        REQUEST.set(connection.request_id)
        self._stream(connection).run(outcome.value, self._caller.log)
        self._runner.wake(partial(self._release, connection))

    async def _finish(self, connection: Connection, outcome: Outcome, deadline_ns: int) -> None:
        try:
            if isinstance(outcome, Unfinished) and outcome.kind == "async":
                outcome = await self._await(connection, outcome, deadline_ns)
            if isinstance(outcome, Unfinished):
                await self._stream(connection).run_async(outcome.value, self._caller.log)
            elif isinstance(outcome, Failed):
                self._fail(connection, outcome.status, outcome.message)
            else:
                await self._send(connection, outcome)
        except asyncio.CancelledError:
            pass  # the client is gone
        finally:
            connection.task = None
            self._release(connection)

    async def _await(self, connection: Connection, unfinished: Unfinished, deadline_ns: int) -> Outcome:
        try:
            async with asyncio.timeout((deadline_ns - time.monotonic_ns()) / _NS_PER_S) as limit:
                result = await unfinished.value
        except TimeoutError as error:
            if limit.expired():
                return Failed(504, f"timed out after {self._timeout_s:g} s")
            return self._caller.failed(connection, unfinished.method.name, error)
        except asyncio.CancelledError as error:
            if not connection.open:
                raise
            # Nobody hung up: the user's own code cancelled something that it waited for, or itself.
            return self._caller.failed(connection, unfinished.method.name, error)
        except BaseException as error:  # the edge of the user's code
            return self._caller.failed(connection, unfinished.method.name, error)
        return self._caller.finished(connection, unfinished, result)

    async def _send(self, connection: Connection, answered: Answered) -> None:
        encoded = answered.encoded
        if encoded.response is None:
            self._answer(connection, encoded.status, encoded.media_type, encoded.body, encoded.headers)
        else:
            try:
                opened = await open_response(encoded.response, connection.headers, connection.method)
            except Exception as error:  # the edge of the user's code: a file that is gone, a stream that raises
                failed = self._caller.failed(connection, type(encoded.response).__name__, error)
                self._fail(connection, failed.status, failed.message)
                return
            await self._stream(connection, opened.status, b"", opened.headers).run_async(
                opened.chunks, self._caller.log
            )
            self._after.run(lambda: opened.done)
        if answered.after is not None:
            self._after.run(answered.after)

    def _stream(
        self,
        connection: Connection,
        status: int = 200,
        media_type: bytes | None = None,
        headers: tuple[Header, ...] = (),
    ) -> Stream:
        timeout_ns = self._timeout_ns
        return Stream(connection, self._runner, self._loop, self._recorder, timeout_ns, status, media_type, headers)

    # It is over.

    def _release(self, connection: Connection) -> None:
        connection.call_over()
        self._running -= 1
        while self._queue and self._running < self._slots:
            waiting, method, deadline_ns = self._queue.popleft()
            if waiting.open:
                self._start(waiting, method, deadline_ns, time.monotonic_ns())
        if self._paused and self._running < self._slots:
            self._set_paused(False)

    def _fail(self, connection: Connection, status: int, message: str) -> None:
        self._answer(connection, status, JSON, error_body(message, connection.request_id.decode("latin-1")))

    def _answer(
        self,
        connection: Connection,
        status: int,
        media_type: bytes | None,
        body: bytes,
        headers: tuple[Header, ...] = (),
    ) -> None:
        if connection.open:
            connection.answer(status, media_type, body, headers, self._recorder.finish(connection, status))
