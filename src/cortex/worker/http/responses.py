"""The bytes of responses: heads, chunks of bodies, errors, and the end of a WebSocket."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable, Mapping
from functools import lru_cache
from http import HTTPStatus
from types import MappingProxyType
from typing import Any, NewType

from cortex.errors import UserError
from cortex.payloads.openai_errors import openai_error_body

Header = tuple[bytes, bytes]
#: Headers that the gateway takes: of a head that `validate_head` has checked, and our own. mypy rejects others.
ValidHeaders = NewType("ValidHeaders", tuple[Header, ...])
NO_HEADERS = ValidHeaders(())

#: Headers that a response of user code may have. The gateway takes a few more: those that workers and it add.
MAX_RESPONSE_HEADERS = 1000
MAX_RESPONSE_HEAD_BYTES = 512 * 1024
#: Statuses whose responses have no body, whatever their headers are.
BODILESS = frozenset({204, 304})
#: Header line of a response after which the connection closes.
CLOSING = b"connection: close\r\n"
_CONNECTION_HEADERS = frozenset(
    (b"content-length", b"transfer-encoding", b"connection", b"keep-alive", b"proxy-connection", b"upgrade")
)
_HEADER_NAME = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_NOT_IN_HEADER = re.compile(rb"[\0\r\n]")
_CLOSE_REASON_BYTES = 123
NO_FIELDS: Mapping[str, Any] = MappingProxyType({})
_STATUS_LINES = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus}

_DAYS = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")


def validate_head(status: int, headers: Iterable[Header]) -> ValidHeaders:
    """Validate the head of a response; return its headers in lower case, without those the connection writes itself.

    Raises: UserError for a status or header that is not valid HTTP, which would desynchronize the gateway.
    """
    if not isinstance(status, int) or not 200 <= status <= 599:
        raise UserError(f"the response has the status {status!r}; use one from 200 to 599")
    kept = []
    for name, value in headers:
        if not isinstance(name, bytes) or not _HEADER_NAME.fullmatch(name):
            raise UserError(f"the response has a header with the name {name!r}; use letters, digits and dashes")
        if not isinstance(value, bytes) or _NOT_IN_HEADER.search(value):
            raise UserError(f"the value of the response's header {name.decode()!r} is not one line of text")
        if (name := name.lower()) not in _CONNECTION_HEADERS:
            kept.append((name, value))
    if len(kept) > MAX_RESPONSE_HEADERS:
        raise UserError(f"the response has {len(kept)} headers; the gateway passes on up to {MAX_RESPONSE_HEADERS}")
    size = sum(len(name) + len(value) for name, value in kept)
    if size > MAX_RESPONSE_HEAD_BYTES:
        limit = MAX_RESPONSE_HEAD_BYTES // 1024
        raise UserError(f"the headers of the response have {size} bytes; the gateway passes on up to {limit} KiB")
    return ValidHeaders(tuple(kept))


def framed_chunk(chunk: bytes) -> bytes:
    """Return a chunk with its size (RFC 9112, section 7.1); nothing for an empty one, which would end the body."""
    return b"%x\r\n%b\r\n" % (len(chunk), chunk) if chunk else b""


def error_body(message: str, request_id: str, fields: Mapping[str, Any] = NO_FIELDS) -> bytes:
    """Return the JSON body of an error response, `{"error", "request_id"}` and `fields`."""
    return json.dumps({"error": message, **fields, "request_id": request_id}).encode()


def error_response(status: int, message: str, request_id: str, in_openai_form: bool = False) -> bytes:
    """Return a complete error response that closes its connection."""
    body = (
        openai_error_body(status, message, request_id, NO_FIELDS) if in_openai_form else error_body(message, request_id)
    )
    retry = b"retry-after: 1\r\n" if status == 503 else b""
    return b"%bcontent-type: application/json\r\n%bcontent-length: %d\r\nconnection: close\r\n\r\n%b" % (
        _STATUS_LINES[status],
        retry,
        len(body),
        body,
    )


def close_frame(reason: str, code: int = 1011) -> bytes:
    """Return the frame with which a server closes a WebSocket, by default for an internal error (RFC 6455, 5.5.1)."""
    text = reason.encode()[:_CLOSE_REASON_BYTES].decode(errors="ignore").encode()
    return bytes((0x88, 2 + len(text))) + code.to_bytes(2, "big") + text


def response_head(status: int, media_type: bytes | None, headers: tuple[Header, ...]) -> bytes:
    """Return the head of a response without its framing headers and its final empty line."""
    plain = _plain_head(status, media_type, int(time.time()))
    return plain + b"".join(b"%b: %b\r\n" % header for header in headers) if headers else plain


@lru_cache(maxsize=16)
def _plain_head(status: int, media_type: bytes | None, second: int) -> bytes:
    line = _STATUS_LINES.get(status) or b"HTTP/1.1 %d Status\r\n" % status
    content_type = b"content-type: %b\r\n" % media_type if media_type else b""
    return line + _date(second) + content_type


def _date(second: int) -> bytes:
    # Not strftime, whose names follow the locale; not email.utils, which is slow to import.
    year, month, day, hour, minute, second, weekday, *_ = time.gmtime(second)
    date = f"{_DAYS[weekday]}, {day:02} {_MONTHS[month - 1]} {year} {hour:02}:{minute:02}:{second:02} GMT"
    return f"date: {date}\r\n".encode()
