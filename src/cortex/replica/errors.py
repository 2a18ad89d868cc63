"""How errors are told: answers of one form, JSON `{"error", "request_id"}`, and the replica's log."""

from __future__ import annotations

import contextlib
import json
import sys

_PHRASES = {
    400: "Bad Request",
    401: "Unauthorized",
    404: "Not Found",
    405: "Method Not Allowed",
    413: "Content Too Large",
    500: "Internal Server Error",
    503: "Service Unavailable",
    504: "Gateway Timeout",
}


def error_body(message: str, request_id: str) -> bytes:
    """Return the body of an error answer."""
    return json.dumps({"error": message, "request_id": request_id}).encode()


def write_log(text: str) -> None:
    """Write to the replica's log, whatever the user's code has done to `sys.stderr`: a lost line ends no request."""
    with contextlib.suppress(Exception):
        sys.stderr.write(text)


def error_answer(status: int, message: str, request_id: str) -> bytes:
    """Return a whole HTTP/1.1 error answer that ends its connection."""
    body = error_body(message, request_id)
    retry = "retry-after: 1\r\n" if status == 503 else ""
    head = (
        f"HTTP/1.1 {status} {_PHRASES[status]}\r\ncontent-type: application/json\r\n{retry}"
        f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
    )
    return head.encode() + body
