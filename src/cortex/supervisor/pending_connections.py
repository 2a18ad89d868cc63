"""TCP connections that have not presented the gateway's secret yet; a process receives only those that have.

Request heads are peeked at and stay in their sockets, so that the process that serves a connection reads the whole
first request. Nothing else reaches a process or counts as one of its requests.
"""

from __future__ import annotations

import contextlib
import fcntl
import hmac
import re
import socket
import struct
import termios
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto

from cortex.worker.http.connection import SECRET_HEADER
from cortex.worker.http.responses import error_response

#: Time limit for the first request head of a connection.
HEAD_LIMIT_S = 10.0
#: Maximum number of pending connections; beyond it, the oldest is closed.
MAX_PENDING = 256
#: The gateway limits its request heads to less.
HEAD_MAX_BYTES = 160 * 1024
#: Time that a refused connection stays open, so that the client reads the response before the close.
_LINGER_S = 2.0
#: After so many peeks at an incomplete head, one peek per tick: each costs as much as all data received so far.
_QUICK_PEEKS = 8
#: From this size on the receive buffer is enlarged to hold a whole head, which the kernel does not do for unread data.
#: The buffer also accounts for the overhead of packets.
_LONG_BYTES = 16 * 1024
_LONG_BUFFER_BYTES = 2 * HEAD_MAX_BYTES

_REQUEST_LINE = re.compile(rb"[A-Z-]{1,32} [!-~\x80-\xff]+ HTTP/1\.[01]\r\n")
_METHOD_START = re.compile(rb"[A-Z-]{1,32}(?: |$)")
_HEAD_END = b"\r\n\r\n"
_ESTABLISHED = 1  # <netinet/tcp.h>

_NOT_HTTP = error_response(400, "the request is not valid HTTP", "")
_TOO_LONG = error_response(400, f"the head of the request is longer than {HEAD_MAX_BYTES} bytes", "")
_NO_SECRET = error_response(401, "replicas accept requests only from their gateway", "")


class Verdict(Enum):
    """The result of a check of the first bytes of a connection."""

    INCOMPLETE = auto()
    ADMITTED = auto()
    NO_SECRET = auto()
    NOT_HTTP = auto()
    TOO_LONG = auto()


_REFUSALS = {Verdict.NO_SECRET: _NO_SECRET, Verdict.NOT_HTTP: _NOT_HTTP, Verdict.TOO_LONG: _TOO_LONG}


def check_head(data: bytes, secret: bytes) -> Verdict:
    """Check the received part of a connection's first head; an empty secret admits any complete head."""
    end = data.find(_HEAD_END)
    if not _METHOD_START.match(data) or (b"\r\n" in data and not _REQUEST_LINE.match(data)):
        return Verdict.NOT_HTTP
    if end < 0:
        return Verdict.INCOMPLETE if len(data) < HEAD_MAX_BYTES else Verdict.TOO_LONG
    if not secret:
        return Verdict.ADMITTED
    fields = (line.partition(b":") for line in data[:end].split(b"\r\n")[1:])
    values = [value.strip(b" \t") for name, _, value in fields if name.lower() == SECRET_HEADER]
    is_right = len(values) == 1 and hmac.compare_digest(values[0], secret)
    return Verdict.ADMITTED if is_right else Verdict.NO_SECRET


@dataclass
class _Pending:
    sock: socket.socket
    until: float  #: monotonic
    size: int = 0  #: bytes seen
    peeks: int = 0
    is_watched: bool = False
    is_refused: bool = False


class PendingConnections:
    """The pending connections of one process, oldest first. `admit` receives those of the gateway."""

    def __init__(
        self,
        secret: str,
        admit: Callable[[socket.socket], None],
        watch: Callable[[int, Callable[[], object]], None],
        unwatch: Callable[[int], None],
        limit: int = MAX_PENDING,
    ) -> None:
        self._secret = secret.encode()
        self._admit = admit
        self._watch = watch
        self._unwatch = unwatch
        self._limit = limit
        self._pending: dict[int, _Pending] = {}  # by descriptor

    def __len__(self) -> int:
        return len(self._pending)

    @property
    def is_busy(self) -> bool:
        """Return whether a head is peeked at in each tick."""
        return any(not pending.is_watched and not pending.is_refused for pending in self._pending.values())

    def add(self, sock: socket.socket) -> None:
        """Add a connection that was just accepted; it must be non-blocking."""
        if len(self._pending) >= self._limit:
            self._drop(next(iter(self._pending.values())))
        pending = _Pending(sock, time.monotonic() + HEAD_LIMIT_S)
        self._pending[sock.fileno()] = pending
        self._peek(pending)  # most clients have sent the head already

    def tick(self, now: float) -> None:
        """Peek at incomplete heads and close connections that are late; `now` is monotonic."""
        for pending in list(self._pending.values()):
            if now >= pending.until:
                self._drop(pending)
            elif not pending.is_watched and not pending.is_refused:
                self._peek(pending)

    def close(self) -> None:
        """Close all connections."""
        for pending in list(self._pending.values()):
            self._drop(pending)

    def _peek(self, pending: _Pending) -> None:
        sock = pending.sock
        try:
            unread = struct.unpack("i", fcntl.ioctl(sock, termios.FIONREAD, b"\0\0\0\0"))[0] if pending.size else 0
            if pending.size and unread <= pending.size:
                # Woken without new data: the client sends no more, or the kernel is short of memory.
                if sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _ESTABLISHED:  # both ends may send
                    self._unwatch_pending(pending)
                else:
                    self._drop(pending)
                return
            data = sock.recv(HEAD_MAX_BYTES, socket.MSG_PEEK)
            if not data:
                self._drop(pending)
                return
            verdict = check_head(data, self._secret)
            if verdict is Verdict.INCOMPLETE:
                pending.size = len(data)
                pending.peeks += 1
                self._await_more(pending)
                return
            self._unwatch_pending(pending)
            if verdict is Verdict.ADMITTED:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
                del self._pending[sock.fileno()]
                self._admit(sock)
            else:
                pending.is_refused = True
                pending.until = time.monotonic() + _LINGER_S
                with contextlib.suppress(OSError):  # the client is gone; the connection is closed at its deadline
                    sock.send(_REFUSALS[verdict])
                    sock.shutdown(socket.SHUT_WR)
        except BlockingIOError:
            self._await_more(pending)
        except OSError:
            self._drop(pending)

    def _await_more(self, pending: _Pending) -> None:
        """Make the descriptor readable only once there is more data than was seen, as the seen data stays unread."""
        if pending.size >= _LONG_BYTES:
            pending.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, _LONG_BUFFER_BYTES)  # grows the buffer
        pending.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, pending.size + 1)
        if pending.peeks > _QUICK_PEEKS:
            self._unwatch_pending(pending)
        elif not pending.is_watched:
            pending.is_watched = True
            self._watch(pending.sock.fileno(), lambda: self._peek(pending))

    def _unwatch_pending(self, pending: _Pending) -> None:
        """Peek at a connection in ticks only."""
        if pending.is_watched:
            pending.is_watched = False
            self._unwatch(pending.sock.fileno())

    def _drop(self, pending: _Pending) -> None:
        self._unwatch_pending(pending)
        del self._pending[pending.sock.fileno()]
        pending.sock.close()
