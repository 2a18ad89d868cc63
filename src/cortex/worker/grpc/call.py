"""One call of an rpc: read its messages, run the user's method on a thread or the event loop, write its messages.

    GrpcConnection ── wake ──> Call ── ThreadRequests, AsyncRequests ──> user's method
           ^                                                                  │
           └──────────────── write_message, end_messages <────────────────────┘

The deadline of the client, `grpc-timeout`, is for the whole call. The timeout of the API begins when the request is
complete; if anything is streamed, it restarts with each part. Calls on threads can't be cancelled: if they exceed the
timeout of the API, the supervisor answers for them and ends the process; all else is enforced here.

    begin ──> READING ──> RUNNING ──> ended
                 │           └──> ABANDONED ──> ended
                 └──> ended

    state       fields                  event                                               next
    READING                             the message is complete; at once if they stream     RUNNING
                                        a malformed message, a deadline, the process ends   ended, with a status
                                        the client disconnects                              ended
    RUNNING     _is_running             the method returns or raises                        ended, with its status
                                        a malformed message, the deadline of the client,
                                        context.cancel(), the process ends                  ABANDONED, with a status
                                        the timeout of the API, `async def`                 ABANDONED, with a status
                                        the timeout of the API, on a thread                 ended by the supervisor
                                        the client disconnects                              ABANDONED
    ABANDONED   _is_running, is_over    the method returns or raises                        ended

In ABANDONED, a task is cancelled (with `on_disconnect: finish` not for a disconnect), and the iterator of the request
raises an exception. A call on a thread continues: its connection is closed, but its row in shared memory stays
until it has ended, so that the supervisor still enforces its deadline.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterable, Iterable, Iterator
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

import grpc

from cortex.errors import type_name
from cortex.payloads.content_encoding import content_coding, decode_body
from cortex.payloads.content_type import charset_of, to_utf8
from cortex.payloads.validation import BadBody
from cortex.predictor.binding import result_kind
from cortex.predictor.protobuf import BoundRpc
from cortex.predictor.tracebacks import format_user_traceback
from cortex.predictor.user_forks import end_if_forked, ending_forks, process_id
from cortex.worker.grpc.connection import GrpcConnection
from cortex.worker.grpc.context import Context
from cortex.worker.grpc.messages import json_messages, message_of, not_a_message, parse_json, parse_message, to_json
from cortex.worker.grpc.streams import AsyncRequests, ThreadRequests
from cortex.worker.grpc.wire import (
    HTTP_STATUSES,
    MessageReader,
    RpcError,
    metadata_of,
    timeout_ns,
)
from cortex.worker.http.background_tasks import contain_exit
from cortex.worker.http.cancellation import log_late_cleanup
from cortex.worker.http.responses import NO_HEADERS, ValidHeaders
from cortex.worker.monitoring.request_log import write_log

if TYPE_CHECKING:
    from cortex.worker.grpc.grpc_server import GrpcServer

#: User code waits while more bytes of its messages than this wait for the gateway.
MAX_UNSENT_BYTES = 256 * 1024
_JSON = b"application/json"
_NEVER_NS = 1 << 62
#: Interval at which the deadline of a stream on a thread is checked once it has passed.
_CHECK_NS = 250_000_000


class Call:
    """The state of one call. Event-loop thread only, except where noted."""

    def __init__(self, server: GrpcServer, connection: GrpcConnection, rpc: BoundRpc) -> None:
        self.code: grpc.StatusCode | None = None  #: None until the call has ended
        self.status = 0  #: the HTTP status that belongs to `code`
        self.rpc = rpc
        self.arrived_ns = connection.arrived_ns
        self.is_over = False  #: the client has its response, or has disconnected
        self.task: asyncio.Task[None] | None = None
        self._server = server
        self._pid = process_id()
        self._connection = connection
        self._request_id = connection.request_id.decode("latin-1")
        self._is_grpc = connection.is_grpc
        self._streams = rpc.request_streams or rpc.response_streams
        self._span = connection.span
        all_headers = connection.headers if self._span is None else self._span.propagate(connection.headers)
        headers = dict(all_headers)
        own_ns = timeout_ns(headers.get(b"grpc-timeout", b""))
        self._client_deadline_ns = None if own_ns is None else self.arrived_ns + own_ns
        self._deadline_ns = self.arrived_ns + server.timeout_ns
        client = headers.get(b"x-forwarded-for", b"").decode("latin-1")
        peer = f"{'ipv6' if ':' in client else 'ipv4'}:{client}"
        self.context = Context(self, metadata_of(all_headers), peer, self._client_deadline_ns)
        self._reader = MessageReader(headers.get(b"grpc-encoding", b""), server.limits.max_body_bytes)
        self._body = bytearray()  #: of a call in JSON
        self._coding = ""  #: of this body
        self._refusal: BadBody | None = None  #: why it can't be read
        self._message: bytes | None = None  #: the only one of a request that is not streamed
        self._requests: ThreadRequests | AsyncRequests | None = None
        self._is_read = False
        self._is_running = False
        self._started_ns = 0
        self._was_closed = False
        self._timer: asyncio.TimerHandle | None = None
        self._lock = threading.Lock()
        self._unsent = 0
        self._results: Iterator[Any] | None = None  #: what a method on a thread yields
        self._thread: int | None = None  #: that runs the method
        self._is_suspended = False  #: it goes on once the client has read what was sent
        self._waits_for_message = False  #: the method is on a thread, and waits for the client

    # Start.

    def begin(self) -> None:
        """Read the request, and call the user's method as soon as it has what it takes."""
        self._check_later(time.monotonic_ns())
        if not self._is_grpc:
            try:
                charset_of(self._connection.content_type or b"")
                self._coding = content_coding(self._connection.codings)
            except BadBody as error:
                self._refuse(error)
                return
        if self.rpc.request_streams:
            if self.rpc.is_async:
                self._requests = AsyncRequests(self._parse, self._on_room)
            else:
                self._requests = ThreadRequests(self._parse, self._on_room, self._on_wait)
            self._start(self._requests)

    def _start(self, request: Any) -> None:
        # Not before: the slot of a request that is being read can be lent to another one.
        self._connection.begin(self._shared_deadline_ns())
        self._started_ns = self._connection.started_ns = time.monotonic_ns()
        self._is_running = True
        if self.rpc.is_async:
            self.task = self._server.loop.create_task(self._run(request))
        elif self._server.runner.inline:  # never, if the service has streams
            self._complete(*self._server.runner.call_inline(self._call, request))
        else:
            self._submit(request)

    # Of the connection.

    def wake(self) -> None:
        """Read what has arrived of the request; or, if the connection has another call or none, end this one."""
        if self._connection.call is self:
            if self._streams or not self._is_running:
                self._extend()
            try:
                self._read()
            except BadBody as error:
                self._refuse(error)
            except RpcError as error:
                self._end(error.code, error.message)
        elif not self.is_over:
            self._set_over(grpc.StatusCode.CANCELLED)
            self._was_closed = True
            self._connection.count_disconnect()
            was_cut_off = self._connection.open  # it has read nothing for too long
            cancels = was_cut_off or self._server.connections.cancels_calls
            self._stop(grpc.RpcError("the client has disconnected"), cancels)

    def receive_data(self, data: bytes) -> None:
        """Refuse bytes of other protocols: calls are never upgraded."""
        raise AssertionError("a call was upgraded")

    def _read(self) -> None:
        connection = self._connection
        if self._is_read or self.is_over or (self._requests is not None and self._requests.is_full()):
            return
        if connection.has_body:
            data = connection.take_body()
            limit = self._server.limits.max_body_bytes
            if self._is_grpc:
                for message in self._reader.feed(data):
                    self._deliver(message)
            elif len(self._body) + len(data) > limit:
                raise BadBody(f"the request body is larger than {limit} bytes", HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
            else:
                self._body += data
        if connection.is_complete and not self.is_over:
            self._is_read = True
            if self._coding and self._body:
                decode = partial(decode_body, bytes(self._body), self._coding, self._server.limits.max_body_bytes)
                self._server.loop.run_in_executor(None, decode).add_done_callback(self._on_decoded)
            else:
                self._end_request()

    def _on_decoded(self, decoded: asyncio.Future[bytes]) -> None:
        if self.is_over:
            return
        try:
            self._body[:] = decoded.result()
            self._end_request()
        except BadBody as error:
            self._refuse(error)
        except RpcError as error:
            self._end(error.code, error.message)

    def _deliver(self, message: bytes) -> None:
        if self._requests is not None:
            self._requests.add(message)
        elif self._message is None:
            self._message = message
        else:
            raise RpcError(grpc.StatusCode.INTERNAL, f"{self.rpc.name} takes one message, but the request has several")

    def _end_request(self) -> None:
        if not self._reader.is_empty:
            raise RpcError(grpc.StatusCode.INTERNAL, "the last message of the request is incomplete")
        if not self._is_grpc:
            body = to_utf8(bytes(self._body), self._connection.content_type or b"")
            for part in json_messages(body, self.rpc.name, self.rpc.request_streams):
                self._deliver(part)
        if self._requests is not None:
            self._requests.end()
        elif self._message is None:
            raise RpcError(grpc.StatusCode.INTERNAL, f"{self.rpc.name} takes one message, but the request has none")
        else:
            self._start(self._message)

    def _on_room(self) -> None:
        """Read further messages. On any thread."""
        self._server.loop.call_soon_threadsafe(self.wake)

    def _on_wait(self, waits: bool) -> None:
        """Note whether the method waits for a message, which is no user code. On its thread."""
        self._waits_for_message = waits
        self._extend()

    # Deadlines and the end.

    def _shared_deadline_ns(self) -> int:
        """Return when the supervisor ends the call: at once for calls on threads, else if the event loop is blocked."""
        if self._waits_for_message:
            return _NEVER_NS
        return self._deadline_ns + (self._server.grace_ns if self.rpc.is_async else 0)

    def _extend(self) -> None:
        """Restart the timeout of the API, because a part of the request or of the response has moved."""
        self._deadline_ns = time.monotonic_ns() + self._server.timeout_ns
        if self._connection.open and not self.is_over:
            self._connection.extend(self._shared_deadline_ns())

    def _check_later(self, now_ns: int) -> None:
        ends = [self._client_deadline_ns] if self._client_deadline_ns is not None else []
        if self._is_ended_here:
            ends.append(self._deadline_ns)
        elif self._streams:
            ends.append(max(self._deadline_ns, now_ns + _CHECK_NS))
        if ends:
            self._timer = self._server.loop.call_later(max(0, min(ends) - now_ns) / 1e9, self._check)

    def _check(self) -> None:
        self._timer = None
        now_ns = time.monotonic_ns()
        client_ns = self._client_deadline_ns
        if self.is_over:
            return
        if client_ns is not None and now_ns >= client_ns:
            self._end(grpc.StatusCode.DEADLINE_EXCEEDED, "the deadline of the client has passed")
        elif now_ns >= self._deadline_ns and self._is_ended_here:
            if self._is_suspended:
                self._connection.cut_off_slow_client(self._server.limits.timeout_s)  # which ends the call
            else:
                self._end(grpc.StatusCode.DEADLINE_EXCEEDED, f"timed out after {self._server.limits.timeout_s:g} s")
        else:
            self._check_later(now_ns)

    @property
    def _is_ended_here(self) -> bool:
        """Return whether no user code runs that only the supervisor could end."""
        return self.rpc.is_async or not self._is_running or self._waits_for_message or self._is_suspended

    def interrupt(self) -> None:
        """End the call, because its process ends."""
        self._end(grpc.StatusCode.UNAVAILABLE, "the service restarts")

    def cancel(self) -> None:
        """End the call for user code. On any thread."""
        self._server.loop.call_soon_threadsafe(self._end, grpc.StatusCode.CANCELLED, "the service cancelled the call")

    def _end(self, code: grpc.StatusCode, message: str) -> None:
        """End the call before the user's method has returned."""
        if self.is_over:
            return
        self._set_over(code)
        if self._is_running and not self.rpc.is_async:
            # User code goes on: respond, and close the connection.
            if self._is_grpc:
                self._connection.abandon_messages(code, message)
            else:
                self._connection.abandon_json(self._http_status(code), code.name, message)
        else:
            self._respond(code, message, None)
        self._was_closed = self._connection.is_cut_off
        self._stop(RpcError(code, message))

    def _refuse(self, error: BadBody) -> None:
        """End the call, whose request in JSON can't be read."""
        self._refusal = error
        is_large = error.status == HTTPStatus.REQUEST_ENTITY_TOO_LARGE
        self._end(grpc.StatusCode.RESOURCE_EXHAUSTED if is_large else grpc.StatusCode.INVALID_ARGUMENT, str(error))

    def _stop(self, error: Exception, only_if: bool = True) -> None:
        """Interrupt user code: its iterator raises `error`, and its task is cancelled if `only_if`."""
        if self._requests is not None:
            self._requests.end(error)
        if self.task is not None and only_if:
            self._cancel()
        if not self._is_running:
            self._finish()

    def _cancel(self) -> None:
        """Cancel the task of the call, and once more if its clean-up is late."""

        def cancel_again() -> None:
            log_late_cleanup(self._request_id, self._server.limits.timeout_s)
            self._cancel()

        assert self.task is not None
        self.task.cancel()
        if self._was_closed:
            self._connection.extend(time.monotonic_ns() + self._server.timeout_ns + self._server.grace_ns)
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._server.loop.call_later(self._server.limits.timeout_s, cancel_again)

    def _set_over(self, code: grpc.StatusCode) -> None:
        self.is_over, self.code, self.status = True, code, self._http_status(code)
        for callback in self.context.end():
            self._server.loop.run_in_executor(None, ending_forks(callback))

    def _finish(self) -> None:
        """Forget the call, whose user code has ended."""
        if self._timer is not None:
            self._timer.cancel()
        if self._was_closed:
            self._connection.call_over()
        self._server.remove(self, self._started_ns)

    # The user's method.

    def _submit(self, request: Any) -> None:
        """Run the method on a thread, or continue it on its own."""
        self._server.runner.submit(partial(self._run_on_thread, request), self._thread)

    def _run_on_thread(self, request: Any) -> None:
        self._thread = threading.get_ident()
        failure, last = self._call(request)
        if failure is None and self._results is not None:
            self._server.runner.wake(lambda: self._continue(request))
        else:
            self._server.runner.wake(lambda: self._complete(failure, last))

    def _call(self, request: Any) -> tuple[BaseException | None, bytes | None]:
        """Call a method that is not `async def`; return what it raised, and its message unless it streams.

        If the client is slow, a stream keeps its results, and the next call goes on with them.
        """
        connection = self._connection
        connection.enter(self.rpc.name)
        last: bytes | None = None
        failure: BaseException | None = None
        try:
            if self._results is None:
                result = self.rpc.call(self._parse(request) if isinstance(request, bytes) else request, self.context)
                if not self.rpc.response_streams:
                    last = None if result is None else self._encode(result)
                elif isinstance(result, Iterable):
                    self._results = iter(result)
                else:
                    raise self._not_a_stream(result)
            if self._results is not None:
                self._send_all(self._results)
            end_if_forked(self._pid)
        except BaseException as error:  # the edge of the user's code
            end_if_forked(self._pid)
            failure = error
        finally:
            connection.leave()
        return failure, last

    def _send_all(self, results: Iterator[Any]) -> None:
        """Send what the user's method yields, to its end or until the client is slow. On its thread."""
        is_full = False
        try:
            while not (self.is_over or is_full):
                try:
                    data = self._encode(next(results))
                except StopIteration:
                    break
                end_if_forked(self._pid)
                with self._lock:
                    self._unsent += len(data)
                    is_full = self._unsent > MAX_UNSENT_BYTES
                self._server.runner.wake(lambda data=data: self._send_from_thread(data))  # type: ignore[misc]
        finally:
            if not is_full:
                self._results = None
                if callable(close := getattr(results, "close", None)):
                    close()

    def _send_from_thread(self, data: bytes) -> None:
        self._send(data)
        if self._connection.unsent_bytes <= MAX_UNSENT_BYTES:
            with self._lock:
                self._unsent -= len(data)

    def _continue(self, request: Any) -> None:
        """Continue a method that yields faster than the event loop has sent; after a slow client, if it is one."""
        with self._lock:
            self._unsent = 0
        if self._connection.unsent_bytes > MAX_UNSENT_BYTES:
            self._is_suspended = True
            self._server.loop.create_task(self._continue_later(request))
        else:
            self._submit(request)

    async def _continue_later(self, request: Any) -> None:
        """Continue once the client has read what was sent, or the call has ended."""
        self._connection.wait_for_client(True)
        await self._connection.flushed()
        self._is_suspended = False
        self._deadline_ns = time.monotonic_ns() + self._server.timeout_ns
        self._connection.extend(self._deadline_ns)
        self._connection.wait_for_client(False)
        self._submit(request)

    async def _run(self, request: Any) -> None:
        connection = self._connection
        connection.enter(self.rpc.name)
        last: bytes | None = None
        failure: BaseException | None = None
        try:
            result = self.rpc.call(self._parse(request) if isinstance(request, bytes) else request, self.context)
            if result_kind(result) == "async":
                result = await contain_exit(result)
            if not self.rpc.response_streams:
                last = None if result is None else self._encode(result)
            elif isinstance(result, AsyncIterable):
                await contain_exit(self._send_each(result))
            else:
                raise self._not_a_stream(result)
        except BaseException as error:  # the edge of the user's code
            end_if_forked(self._pid)
            failure = error
        self._complete(failure, last)

    async def _send_each(self, results: AsyncIterable[Any]) -> None:
        try:
            async for result in results:
                end_if_forked(self._pid)
                data = self._encode(result)
                self._send(data)
                if self._connection.unsent_bytes > MAX_UNSENT_BYTES:
                    self._is_suspended = True
                    self._connection.wait_for_client(True)
                    await self._connection.flushed()
                    self._is_suspended = False
                    self._extend()
                    self._connection.wait_for_client(False)
        finally:
            if isinstance(results, AsyncGenerator):
                await results.aclose()

    def _complete(self, failure: BaseException | None, last: bytes | None) -> None:
        """End the call with what the user's method returned or raised."""
        if not self.is_over:
            self._connection.returned_ns = time.monotonic_ns()
            code, message = self._outcome(failure)
            if code is grpc.StatusCode.OK and last is None and not self.rpc.response_streams:
                code, message = grpc.StatusCode.INTERNAL, self._log(not_a_message(self.rpc, None))
            self._set_over(code)
            self._respond(code, message, last if code is grpc.StatusCode.OK else None)
            self._was_closed = self._connection.is_cut_off
        self._finish()

    def _outcome(self, failure: BaseException | None) -> tuple[grpc.StatusCode, str]:
        set_code = self.context.code()
        if failure is None or self.context.aborted:
            return set_code or grpc.StatusCode.OK, self.context.details()
        if isinstance(failure, RpcError):
            return failure.code, failure.message
        message = self._log(failure)
        if set_code not in (None, grpc.StatusCode.OK):
            return set_code, self.context.details() or message
        return grpc.StatusCode.INTERNAL, message

    def _log(self, failure: BaseException) -> str:
        """Log why the user's method failed; return the message for the client, without what may be secret."""
        if self._span is not None and not self._span.is_over:
            self._span.fail(failure)
        write_log(f"request {self._request_id} failed:\n{format_user_traceback(failure, begins_in_project=True)}")
        return f"internal server error: {type_name(failure)} in {self.rpc.name}{self._server.logs_hint()}"

    # Messages.

    def _parse(self, data: bytes) -> Any:
        """Return the message in the bytes of a request. On any thread. Raises: RpcError."""
        return parse_message(self.rpc, data) if self._is_grpc else parse_json(self.rpc, data)

    def _encode(self, result: Any) -> bytes:
        """Return the bytes of a message that the user's method returned. On any thread. Raises: TypeError."""
        message = message_of(self.rpc, result)
        data: bytes = message.SerializeToString() if self._is_grpc else to_json(self.rpc, message)
        return data

    def _not_a_stream(self, result: Any) -> TypeError:
        return TypeError(f"{self.rpc.name} streams its response, but returned {type_name(result)}: yield messages")

    # Writing.

    def send_head(self, headers: ValidHeaders) -> None:
        """Write the head of the response now. On any thread."""
        self._server.runner.wake(lambda: self._write_head(headers))

    def _write_head(self, headers: ValidHeaders) -> None:
        if self._is_grpc and not self.is_over:
            self._connection.begin_messages(headers)

    def _send(self, data: bytes) -> None:
        if self.is_over:
            return
        if self._is_grpc:
            self._connection.write_message(data, self.context.head)
        else:
            self._connection.begin_lines()
            self._connection.stream(data + b"\n")
        self._extend()

    def _respond(self, code: grpc.StatusCode, message: str, last: bytes | None) -> None:
        connection = self._connection
        if self._is_grpc:
            connection.end_messages(code, message, self.context.head, self.context.trailing, last)
        elif code is not grpc.StatusCode.OK:
            if connection.has_head:
                connection.abort()
            else:
                headers = ValidHeaders(self._refusal.headers) if self._refusal is not None else NO_HEADERS
                connection.respond_error(self._http_status(code), message, headers, {"code": code.name})
        elif self.rpc.response_streams:
            connection.begin_lines()
            connection.end_stream()
        else:
            connection.respond(200, _JSON, (last or b"{}") + b"\n")

    def _http_status(self, code: grpc.StatusCode) -> int:
        return self._refusal.status if self._refusal is not None else HTTP_STATUSES[code]
