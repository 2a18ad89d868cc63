"""JSON lines: one message per line over a stream or a socket."""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping
from typing import Any

_READ_BYTES = 64 * 1024


def encode(message: Mapping[str, Any]) -> bytes:
    """Return `message` as one line."""
    return json.dumps(message).encode() + b"\n"


class LineBuffer:
    """Splits a stream of bytes into lines."""

    def __init__(self) -> None:
        self._chunks: list[bytes] = []

    def feed(self, data: bytes) -> list[bytes]:
        """Add data and return the lines that it completes, without their line breaks."""
        if b"\n" not in data:
            self._chunks.append(data)  # joined once: a long line costs no copy per piece
            return []
        *lines, rest = b"".join((*self._chunks, data)).split(b"\n")
        self._chunks = [rest] if rest else []
        return lines


def receive_line(sock: socket.socket) -> bytes:
    """Read one line from a blocking socket that sends nothing after it. Return b"" if the peer closes first.

    Raises: OSError.
    """
    line = b""
    while not line.endswith(b"\n"):
        data = sock.recv(_READ_BYTES)
        if not data:
            return b""
        line += data
    return line
