"""A connection from the gateway whose requests are gRPC calls, or calls in JSON."""

from __future__ import annotations

import grpc

from cortex.worker.grpc.trailers import CONTENT_TYPE, trailers
from cortex.worker.grpc.wire import HTTP_STATUSES, frame
from cortex.worker.http.connection import CLIENT_CLOSED_REQUEST
from cortex.worker.http.responses import (
    CLOSING,
    NO_HEADERS,
    ValidHeaders,
    error_body,
    framed_chunk,
    response_head,
)
from cortex.worker.http.streaming_connection import MAX_UNREAD_BYTES, StreamingConnection
from cortex.worker.shared_state import ConnectionState

_CHUNKED = b"transfer-encoding: chunked\r\n\r\n"


class GrpcConnection(StreamingConnection):
    """A connection that reads messages as fast as the call takes them, and ends its responses with trailers.

    A call that fails before its first message has the HTTP status that belongs to its own, which the gateway counts and
    logs. To clients of gRPC, the gateway sends 200, as the protocol demands.
    """

    __slots__ = ("has_head", "is_grpc")

    has_head: bool  #: the head of the response is written
    is_grpc: bool

    def on_body(self, data: bytes) -> None:
        """Append a part of the body; only each message has a limit, which the call enforces."""
        if self._refused or self.call is None:
            return
        self._body.append(data)
        if sum(map(len, self._body)) > MAX_UNREAD_BYTES:
            self.pause()
        self.call.wake()

    def count_disconnect(self) -> None:
        """Count a call whose client disconnected during its response; earlier, the connection counts it itself."""
        if self.has_head and self.is_grpc:
            self._last_headers(CLIENT_CLOSED_REQUEST)

    def _enter_row(self, deadline_ns: int) -> None:
        super()._enter_row(deadline_ns)
        if not self.is_grpc:
            self._shared.set_json_call(self.index)

    # Responses over gRPC.

    def begin_messages(self, headers: ValidHeaders) -> None:
        """Write the head of a response."""
        if self.open and not self.has_head:
            self.has_head = True
            self._set_state(ConnectionState.ANSWERING)
            closing = CLOSING if self._close_after else b""
            self._send(response_head(200, CONTENT_TYPE, headers) + closing + _CHUNKED)
            self._mark_whole()

    def write_message(self, message: bytes, headers: ValidHeaders = NO_HEADERS) -> None:
        """Write a message of a response, and before the first one its head."""
        self.begin_messages(headers)
        if self.open:
            self._set_state(ConnectionState.ANSWERING)
            self._send(framed_chunk(frame(message)))
            self._mark_whole()

    def end_messages(
        self,
        code: grpc.StatusCode,
        message: str,
        head: ValidHeaders = NO_HEADERS,
        trailing: ValidHeaders = NO_HEADERS,
        last: bytes | None = None,
    ) -> None:
        """Write the status of the call, and before it what is missing: the head, and the `last` message.

        `head` and `trailing` are headers. The connection is then ready for the next call.
        """
        if not self.open:
            return
        if not self.has_head:
            self._close_if_incomplete()
        timing = self._count(code)
        parts = [] if self.has_head else [_head(code, head), timing, _CHUNKED]
        if last is not None:
            framed = frame(last)
            parts += [b"%x\r\n" % len(framed), framed, b"\r\n"]
        parts.append(trailers(code.value[0], message, trailing))
        self._set_state(ConnectionState.ANSWERING)
        self._send(b"".join(parts))
        self._finish_response()

    def end_with_process(self, reason: str) -> None:
        """Answer the request, or end a response that has begun: the process ends."""
        if self.has_head and self.is_grpc:
            self.end_messages(grpc.StatusCode.UNAVAILABLE, reason)
        else:
            super().end_with_process(reason)

    def _respond_end(self, status: int, message: str, headers: ValidHeaders = NO_HEADERS) -> None:
        if (self.content_type or b"").startswith(CONTENT_TYPE):
            self.end_messages(grpc.StatusCode.UNAVAILABLE, message)
        else:
            super()._respond_end(status, message, headers)

    def abandon_messages(self, code: grpc.StatusCode, message: str) -> None:
        """Write the status of a call that goes on, and close; its row stays until `call_over`."""
        if not self.open:
            return
        self._close_after = True
        timing = self._count(code)
        head = b"" if self.has_head else _head(code, NO_HEADERS) + timing + _CHUNKED
        self._send(head + trailers(code.value[0], message))
        if self.span is not None:
            self._end_span()
        self.close()

    def _count(self, code: grpc.StatusCode) -> bytes:
        """Count the response; return its last header lines."""
        timing = self._last_headers(HTTP_STATUSES[code])
        if self.span is not None:
            self.span.set_rpc_status(code.value[0], code.name)
        return timing

    # Responses in JSON.

    def begin_lines(self) -> None:
        """Write the head of a response of several lines."""
        if self.open and not self.has_head:
            self.has_head = True
            self.start_stream(200, b"application/x-ndjson")

    def abandon_json(self, status: int, code: str, message: str) -> None:
        """Write the error of a call that goes on, unless its response has begun, and close."""
        if self.open and not self.has_head:
            self._close_after = True
            body = error_body(message, self.request_id.decode("latin-1"), {"code": code})
            head = response_head(status, b"application/json", ()) + self._last_headers(status)
            self._send(b"%bcontent-length: %d\r\n\r\n%b" % (head, len(body), body))
        else:
            self.count_aborted()
        self.close()

    def _mark_whole(self) -> None:
        """Note whether the gateway has whole chunks only: if the process dies now, trailers can end the response."""
        if self.open and not self._backlog:
            self._set_state(ConnectionState.STREAMING)

    def _on_writable(self) -> None:
        super()._on_writable()
        if self._state is ConnectionState.ANSWERING and self.call is not None and self.is_grpc:
            self._mark_whole()

    def _reset(self) -> None:
        super()._reset()
        self.has_head = False
        self.is_grpc = False


def _head(code: grpc.StatusCode, headers: ValidHeaders) -> bytes:
    return response_head(HTTP_STATUSES[code], CONTENT_TYPE, headers)
