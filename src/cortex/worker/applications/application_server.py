"""The requests of a process that serves an application: calls, deadlines, errors and the end of the process.

    StreamingConnection ── handle ──> ApplicationServer ── task ──> app(scope, receive, send)
            ^                                                             │
            └──────────── HttpCall, WebSocketCall <── receive, send ──────┘

All calls share the event loop, which stays on the main thread. A request has a deadline of the API's timeout until the
first byte of its response, and after it, whenever nothing has moved in either direction for that long. The deadline in
shared memory is a little later: if it passes, the event loop is blocked, and the supervisor ends the process.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from cortex.errors import UserError, type_name
from cortex.predictor.applications import WSGI
from cortex.predictor.tracebacks import format_user_traceback
from cortex.worker.applications.application_scope import http_scope, route_template, websocket_scope
from cortex.worker.applications.http_call import HttpCall
from cortex.worker.applications.lifespan import Lifespan
from cortex.worker.applications.loop_watchdog import LoopWatchdog
from cortex.worker.applications.websocket_call import GOING_AWAY, NORMAL, RESTART, WebSocketCall
from cortex.worker.http.background_tasks import contain_exit
from cortex.worker.http.cancellation import log_late_cleanup
from cortex.worker.http.connection import CLIENT_CLOSED_REQUEST, Connection
from cortex.worker.http.streaming_connection import StreamingConnection
from cortex.worker.monitoring.request_log import REQUEST, write_log
from cortex.worker.monitoring.route_metrics import RouteRecorder
from cortex.worker.request_server import RequestServer, WorkerContext
from cortex.worker.requests.calls import logs_hint
from cortex.worker.spec import STOPPED_IN_CALL, RequestLimits

#: Time for calls to end after their connections were closed at the end of the process.
_END_S = 0.7
#: Interval at which WebSockets show that the event loop is not blocked.
_TICK_S = 5.0
#: Deadlines are moved by at least this much, and not for each part of a body.
_PROGRESS_NS = 10_000_000
_NEVER_NS = 1 << 62
_RESTARTS = "the service restarts"
#: Exceptions by which frameworks report that the client disconnected.
_DISCONNECTED = frozenset({"ClientDisconnect", "WebSocketDisconnect"})

Call = HttpCall | WebSocketCall


class ApplicationServer(RequestServer):
    """Handles the requests of one process by calls of its ASGI application. Event-loop thread only."""

    def __init__(self, context: WorkerContext, lifespan: Lifespan) -> None:
        """Create the server of the application that `lifespan` has started."""
        spec = context.spec
        self.is_wsgi = spec.type == WSGI
        super().__init__(context, StreamingConnection)
        # WSGI calls block a thread each, and can't be cancelled: the supervisor enforces their deadlines.
        self.slots, self.shares_loop = spec.threads if self.is_wsgi else spec.max_concurrency, not self.is_wsgi
        self._api = spec.api
        self._lifespan = lifespan
        self._routes = RouteRecorder(context.file)
        self._running: set[_RunningCall] = set()
        self._ticker: asyncio.TimerHandle | None = None
        self._deadline_timer: asyncio.TimerHandle | None = None
        self._next_deadline_ns = _NEVER_NS  #: when the timer fires
        self._watchdog = LoopWatchdog(self.loop, self._log_id_of, lambda: not self._running)

    def configure(self, limits: RequestLimits) -> None:
        """Set the limits of subsequent requests."""
        super().configure(limits)
        if self.is_wsgi:  # the supervisor ends late calls, and their process
            self.grace_ns = 0

    # Start.

    def handle(self, connection: Connection) -> None:
        """Call the application for the request of a connection, whose head has arrived."""
        assert isinstance(connection, StreamingConnection)
        if not self.begin(connection):
            return
        headers = connection.headers if connection.span is None else connection.span.propagate(connection.headers)
        running = _RunningCall(self, connection, connection.arrived_ns + self.timeout_ns)
        call: Call
        if connection.is_upgrade:
            scope = websocket_scope(connection.url, headers, self._lifespan.state)
            call = WebSocketCall(connection, scope, running.extend, self.limits.max_body_bytes)
            if not call.begin():
                return
            self._tick_later()
        else:
            scope = http_scope(connection.method, connection.url, headers, self._lifespan.state)
            call = HttpCall(connection, scope, running.extend, running.abandon, running.wait, self.is_wsgi)
        connection.call = call
        self._running.add(running)
        running.start(call, self._lifespan.app)
        if not self.is_wsgi:
            self._watchdog.watch()

    # End.

    def stop(self) -> None:
        """End all calls and the application, then let the event loop end."""
        self._stopping = self.loop.create_task(self._stop())

    async def _stop(self) -> None:
        for running in list(self._running):
            running.interrupt()
        if tasks := [running.task for running in self._running]:
            await asyncio.wait(tasks, timeout=_END_S)
        await self._lifespan.shutdown()
        self.loop.stop()

    def remove(self, running: _RunningCall, root_path: str, seconds: float) -> None:
        """Forget a call that has ended, and count it."""
        self._running.discard(running)
        scope = running.call.scope
        method = scope.get("method", "WEBSOCKET")
        status = running.call.status or CLIENT_CLOSED_REQUEST
        self._routes.record(method, route_template(scope, root_path), status, seconds)

    def _log_id_of(self, task: asyncio.Task[Any]) -> bytes:
        """Return the id of the request that a task belongs to; empty if it is unknown. On any thread."""
        for running in list(self._running):
            if running.task is task:
                return running.log_id
        get_context = getattr(task, "get_context", None)  # of a task that the application has started; Python 3.12
        found: bytes = get_context().get(REQUEST, b"") if get_context is not None else b""
        return found

    def logs_hint(self) -> str:
        """Return the end of the message of a failed request."""
        return logs_hint(self._api)

    # Deadlines. One timer serves all calls, because nearly all end long before theirs.

    def watch(self, deadline_ns: int) -> None:
        """Check deadlines at `deadline_ns` (monotonic) at the latest."""
        if deadline_ns < self._next_deadline_ns:
            if self._deadline_timer is not None:
                self._deadline_timer.cancel()
            self._next_deadline_ns = deadline_ns
            delay_s = max(0.0, (deadline_ns - time.monotonic_ns()) / 1e9)
            self._deadline_timer = self.loop.call_later(delay_s, self._check_deadlines)

    def _check_deadlines(self) -> None:
        self._deadline_timer = None
        self._next_deadline_ns = _NEVER_NS
        now_ns = time.monotonic_ns()
        for running in list(self._running):
            running.check(now_ns)
        self.watch(min((running.deadline_ns for running in self._running), default=_NEVER_NS))

    # WebSockets.

    def _tick_later(self) -> None:
        if self._ticker is None:
            self._ticker = self.loop.call_later(_TICK_S, self._tick)

    def _tick(self) -> None:
        """Send pings, and show the supervisor that the event loop is not blocked."""
        self._ticker = None
        now = time.monotonic()
        for running in list(self._running):
            if isinstance(running.call, WebSocketCall):
                running.tick(running.call, now)
                self._tick_later()


class _RunningCall:
    """A call of the application with its deadline."""

    def __init__(self, server: ApplicationServer, connection: StreamingConnection, deadline_ns: int) -> None:
        self.call: Call
        self.task: asyncio.Task[None]
        self._server = server
        self._connection = connection
        self.log_id = connection.log_id
        self._span = connection.span
        self._arrived_ns = connection.arrived_ns
        self.deadline_ns = deadline_ns
        self._is_interrupted = False
        self._waits = False  #: of WSGI: for the client

    def start(self, call: Call, app: Any) -> None:
        """Call the application in a task of its own."""
        self.call = call
        self._root_path = call.scope["root_path"]
        self._connection.begin(self.deadline_ns + self._server.grace_ns)
        self.task = self._server.loop.create_task(self._run(app))
        if self._server.is_wsgi:
            self.deadline_ns = _NEVER_NS
        else:
            self._server.watch(self.deadline_ns)

    def extend(self) -> None:
        """Restart the idle timeout, because data has moved."""
        deadline_ns = time.monotonic_ns() + self._silence_ns
        if 0 <= deadline_ns - self.deadline_ns < _PROGRESS_NS:
            return
        if self._waits or not self._server.is_wsgi:
            self.deadline_ns = deadline_ns
            self._server.watch(deadline_ns)  # the limit of a WebSocket may be shorter than that of its handshake
        self._extend_shared()

    def wait(self, waits: bool) -> None:
        """Note whether the application waits for the client: then the supervisor ends nothing.

        Others use the call slot meanwhile, but for WSGI, which occupies a thread.
        """
        if self._server.is_wsgi:
            self._waits = waits
            self.deadline_ns = _NEVER_NS
            if waits:
                self.extend()
            elif self.call.was_closed or not self.call.is_over:
                self._connection.extend(time.monotonic_ns() + self._server.timeout_ns)
        else:
            if not waits:
                self.extend()
            if self.call.status:
                self._connection.wait_for_client(waits)

    def tick(self, call: WebSocketCall, now: float) -> None:
        """Do what is due for a WebSocket."""
        if call.is_accepted and not call.is_over:
            call.tick(now)
            self._extend_shared()

    def interrupt(self) -> None:
        """End the call, because its process ends."""
        self._is_interrupted = True
        if isinstance(self.call, WebSocketCall):
            self.call.fail(503, _RESTARTS, RESTART)
        elif not self.call.is_over:
            if self.call.status:
                self._connection.count_aborted()
                self._connection.close()
            else:
                self.call.status = 500
                self._connection.end_with_process(STOPPED_IN_CALL)

    def abandon(self) -> None:
        """Cancel the call, whose client has disconnected, unless the API's `on_disconnect` lets it finish."""
        if self._connection.is_abandoned:
            self.cancel()

    def cancel(self) -> None:
        """Cancel the call, which nobody waits for any more."""
        self._is_interrupted = True
        if not self._server.is_wsgi:
            self.task.cancel()
            self.deadline_ns = time.monotonic_ns() + self._server.timeout_ns  # of its clean-up
            self._server.watch(self.deadline_ns)
            if self.call.was_closed:
                self._connection.extend(self.deadline_ns + self._server.grace_ns)

    @property
    def _silence_ns(self) -> int:
        is_open = isinstance(self.call, WebSocketCall) and self.call.is_accepted
        return int(self._server.limits.websocket_idle_s * 1e9) if is_open else self._server.timeout_ns

    def _extend_shared(self) -> None:
        """Move the deadline at which the supervisor considers the event loop blocked."""
        if self._connection.open and not self.call.is_over:
            if self._waits:
                self._connection.extend(_NEVER_NS)
                return
            silence_ns = min(self._silence_ns, max(self._server.timeout_ns, int(2 * _TICK_S * 1e9)))
            self._connection.extend(time.monotonic_ns() + silence_ns + self._server.grace_ns)

    # Deadline.

    def check(self, now_ns: int) -> None:
        """End the call if its deadline has passed."""
        if now_ns < self.deadline_ns:
            return
        self.deadline_ns = _NEVER_NS
        if self._is_interrupted:
            log_late_cleanup(self._id, self._server.limits.timeout_s)
            self.cancel()
        elif isinstance(self.call, HttpCall):
            self._time_out(self.call)
        elif self.call.is_accepted and not self.call.is_over:
            self.call.close(GOING_AWAY, f"no message for {self._server.limits.websocket_idle_s:g} s")
            self.deadline_ns = now_ns + self._server.timeout_ns
        else:
            self.call.fail(504, f"timed out after {self._server.limits.timeout_s:g} s")
            self.cancel()

    def _time_out(self, call: HttpCall) -> None:
        if not call.is_over:
            if call.status:
                if self._connection.unsent_bytes:
                    self._connection.cut_off_slow_client(self._server.limits.timeout_s)
                else:
                    self._connection.abort()
            else:
                call.status = 504
                self._connection.respond_error(504, f"timed out after {self._server.limits.timeout_s:g} s")
        elif not call.was_closed:
            return  # the response is complete: what runs now are background tasks
        self.cancel()

    # The call.

    async def _run(self, app: Any) -> None:
        REQUEST.set(self.log_id)
        if self._span is not None:
            self._span.enter()
        call = self.call
        try:
            await contain_exit(app(call.scope, call.receive, call.send))
        except asyncio.CancelledError as error:
            if not self._is_interrupted:  # the application cancelled itself, or something that it awaited
                self._fail(error)
        except BaseException as error:  # the edge of the user's code
            if not (call.is_over and (isinstance(error, OSError) or type(error).__name__ in _DISCONNECTED)):
                self._fail(error)
        else:
            if isinstance(call, WebSocketCall) and call.is_accepted:
                call.close(NORMAL)
            elif not call.is_over:
                problem = "the application returned before its response was complete"
                self._respond_failure(problem)
                write_log(f"request {self._id} failed: {problem}\n")
        finally:
            if call.was_closed:
                self._connection.call_over()
            if self._span is not None and not self._span.is_over:
                self._span.end("connection_closed" if call.was_closed else "")
            over_ns = call.over_ns or time.monotonic_ns()
            self._server.remove(self, self._root_path, (over_ns - self._arrived_ns) / 1e9)

    def _fail(self, error: BaseException) -> None:
        if self._span is not None and not self._span.is_over:
            self._span.fail(error)
        write_log(f"request {self._id} failed:\n{format_user_traceback(error, begins_in_project=True)}")
        if not self.call.is_over:
            what = str(error) if isinstance(error, UserError) else f"{type_name(error)} in the application"
            self._respond_failure(what)

    def _respond_failure(self, what: str) -> None:
        message = f"internal server error: {what}{self._server.logs_hint()}"
        if isinstance(self.call, WebSocketCall):
            if self.call.is_accepted:
                self._connection.count_aborted()
            self.call.fail(500, message)
        elif self.call.status:
            self._connection.abort()
        else:
            self.call.status = 500
            self._connection.respond_error(500, message)

    @property
    def _id(self) -> str:
        return self.log_id.decode("latin-1").partition(":")[0]
