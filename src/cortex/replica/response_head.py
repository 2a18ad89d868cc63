"""The head of an answer, as bytes, and names of headers."""

from __future__ import annotations

import time
from functools import lru_cache
from http import HTTPStatus

Header = tuple[bytes, bytes]

#: In it the gateway shows replicas that they talk to it. The supervisor reads it; the user's code never sees it.
SECRET_HEADER = b"x-cortex-gateway"

#: Answers of these statuses have no body, whatever their headers say.
BODILESS = frozenset({204, 304})

_STATUS_LINES = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus}

_DAYS = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")


def head(status: int, media_type: bytes | None, headers: tuple[Header, ...]) -> bytes:
    """Write the head of an answer, but for what says where its body ends."""
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
