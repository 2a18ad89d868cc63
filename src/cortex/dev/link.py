"""The socket pair between `cortex dev` and the process of an API: JSON lines, some of which carry a connection.

A stream, because macOS has no sockets of type SOCK_SEQPACKET, which supervisors use (`worker/channel.py`).
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections import deque
from collections.abc import Iterator
from typing import Any

from cortex.processes.jsonl import LineBuffer, encode
from cortex.worker.channel import replace_surrogates

_READ_BYTES = 64 * 1024
_MAX_DESCRIPTORS = 32
CONNECTION = "connection"  #: kind of the messages with a descriptor


class Link:
    """One end. `send` may be called on any thread, `receive` on one."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._lock = threading.Lock()

    @classmethod
    def pair(cls) -> tuple[Link, Link]:
        """Create both ends."""
        ours, theirs = socket.socketpair()
        return cls(ours), cls(theirs)

    def send(self, kind: str, **fields: Any) -> bool:
        """Send a message; return False if the peer has ended."""
        text = replace_surrogates(json.dumps({"kind": kind, **fields}, ensure_ascii=True))
        try:
            with self._lock:
                self.sock.sendall(text.encode() + b"\n")
        except OSError:
            return False
        return True

    def send_connection(self, connection: socket.socket) -> bool:
        """Send a connection, which the caller closes; return False if the peer has ended."""
        try:
            with self._lock:
                socket.send_fds(self.sock, [encode({"kind": CONNECTION})], [connection.fileno()])
        except OSError:
            return False
        return True

    def receive(self) -> Iterator[tuple[dict[str, Any], socket.socket | None]]:
        """Yield messages until the peer closes its end. Blocks."""
        lines, connections = LineBuffer(), deque[socket.socket]()
        while True:
            try:
                data, descriptors, _, _ = socket.recv_fds(self.sock, _READ_BYTES, _MAX_DESCRIPTORS)
            except OSError:
                return
            connections += (socket.socket(fileno=each) for each in descriptors)
            if not data:
                return
            for line in lines.feed(data):
                message = json.loads(line)
                yield message, connections.popleft() if message["kind"] == CONNECTION and connections else None

    def close(self) -> None:
        """Close this end."""
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)
        self.sock.close()
