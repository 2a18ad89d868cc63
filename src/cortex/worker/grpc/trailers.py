"""The end of a response to a gRPC call; without grpcio, because supervisors write it for processes that died."""

from __future__ import annotations

from collections.abc import Iterable

from cortex.worker.http.responses import Header

CONTENT_TYPE = b"application/grpc"
#: The gRPC status of a supervisor's response by its HTTP status: UNAVAILABLE, DEADLINE_EXCEEDED.
_STATUSES = {503: 14, 504: 4}
_REASONS = {503: b"Service Unavailable", 504: b"Gateway Timeout"}


def trailers(code: int, message: str, headers: Iterable[Header] = ()) -> bytes:
    """Return the last chunk of a response, with the status of the call."""
    lines = [b"grpc-status: %d\r\n" % code]
    if message:
        lines.append(b"grpc-message: %b\r\n" % percent_encoded(message))
    lines += [b"%b: %b\r\n" % header for header in headers]
    return b"0\r\n%b\r\n" % b"".join(lines)


def supervisor_status(status: int) -> int:
    """Return the HTTP status by which a supervisor's response is counted: 503, for UNAVAILABLE, unless it is 504."""
    return status if status in _STATUSES else 503


def supervisor_trailers(status: int, message: str) -> bytes:
    """Return the end of a response that has begun, for an error with this HTTP status."""
    return trailers(_STATUSES[supervisor_status(status)], message)


def supervisor_response(status: int, message: str) -> bytes:
    """Return a complete response that closes its connection, for an error with this HTTP status."""
    status = supervisor_status(status)
    head = b"HTTP/1.1 %d %b\r\ncontent-type: %b\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n"
    return head % (status, _REASONS[status], CONTENT_TYPE) + supervisor_trailers(status, message)


def percent_encoded(text: str) -> bytes:
    """Return a text as the header `grpc-message` has it: all but printable ASCII, and `%`, as `%XX`."""
    data = text.encode(errors="replace")
    return b"".join(bytes((c,)) if 0x20 <= c <= 0x7E and c != 0x25 else b"%%%02X" % c for c in data)
