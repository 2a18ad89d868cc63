"""Where connections over TCP wait until they have shown the gateway's secret; only then are they a process's.

Heads are looked at and left in their sockets, so whoever serves the connection reads all of the first request. Nothing
of anybody else's reaches a process, nor counts as a request that is inside one.
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

from cortex.replica.errors import error_answer
from cortex.replica.response_head import SECRET_HEADER

#: How long a connection may take to send its first head.
HEAD_LIMIT_S = 10.0
#: So many may be at it; with more, the first of them is closed.
MAX_WAITING = 256
#: The gateway's heads, which it bounds, are shorter.
HEAD_MAX_BYTES = 160 * 1024
#: How long a refused connection stays open, so that the answer is read before the close is seen.
_LINGER_S = 2.0
#: A head that is in pieces after so many looks is looked at once per tick: looking costs as much as all that it has.
_QUICK_LOOKS = 8
#: From here on the kernel is asked to keep a whole head, which it would not without anybody reading. It counts with
#: what packets cost beside their contents.
_LONG_BYTES = 16 * 1024
_LONG_BUFFER_BYTES = 2 * HEAD_MAX_BYTES

_REQUEST_LINE = re.compile(rb"[A-Z-]{1,32} [!-~\x80-\xff]+ HTTP/1\.[01]\r\n")
_METHOD_START = re.compile(rb"[A-Z-]{1,32}(?: |$)")
_HEAD_END = b"\r\n\r\n"

_NOT_HTTP = error_answer(400, "the request is not valid HTTP", "")
_TOO_LONG = error_answer(400, f"the head of the request is longer than {HEAD_MAX_BYTES} bytes", "")
_NO_SECRET = error_answer(401, "replicas take requests of their gateway only", "")


class Verdict(Enum):
    """What the beginning of a connection says of it."""

    UNFINISHED = auto()
    ADMITTED = auto()
    NO_SECRET = auto()
    NOT_HTTP = auto()
    TOO_LONG = auto()


_REFUSALS = {Verdict.NO_SECRET: _NO_SECRET, Verdict.NOT_HTTP: _NOT_HTTP, Verdict.TOO_LONG: _TOO_LONG}


def judge(data: bytes, secret: bytes) -> Verdict:
    """Read the first head of a connection, or what has come of it; with an empty secret, any whole head will do."""
    end = data.find(_HEAD_END)
    if not _METHOD_START.match(data) or (b"\r\n" in data and not _REQUEST_LINE.match(data)):
        return Verdict.NOT_HTTP
    if end < 0:
        return Verdict.UNFINISHED if len(data) < HEAD_MAX_BYTES else Verdict.TOO_LONG
    if not secret:
        return Verdict.ADMITTED
    fields = (line.partition(b":") for line in data[:end].split(b"\r\n")[1:])
    shown = [value.strip(b" \t") for name, _, value in fields if name.lower() == SECRET_HEADER]
    is_right = len(shown) == 1 and hmac.compare_digest(shown[0], secret)
    return Verdict.ADMITTED if is_right else Verdict.NO_SECRET


@dataclass
class _Waiting:
    sock: socket.socket
    until: float  #: monotonic
    size: int = 0  #: of what was looked at
    looks: int = 0
    is_watched: bool = False
    is_refused: bool = False


class Entrance:
    """The new connections of one process, oldest first. `admit` gets each that is the gateway's."""

    def __init__(
        self,
        secret: str,
        admit: Callable[[socket.socket], None],
        watch: Callable[[int, Callable[[], object]], None],
        unwatch: Callable[[int], None],
        limit: int = MAX_WAITING,
    ) -> None:
        self._secret = secret.encode()
        self._admit = admit
        self._watch = watch
        self._unwatch = unwatch
        self._limit = limit
        self._waiting: dict[int, _Waiting] = {}  # by descriptor

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def is_busy(self) -> bool:
        """Tell whether a head is looked at per tick."""
        return any(not waiting.is_watched and not waiting.is_refused for waiting in self._waiting.values())

    def receive(self, sock: socket.socket) -> None:
        """Take a connection that was just accepted, and does not block."""
        if len(self._waiting) >= self._limit:
            self._drop(next(iter(self._waiting.values())))
        waiting = _Waiting(sock, time.monotonic() + HEAD_LIMIT_S)
        self._waiting[sock.fileno()] = waiting
        self._look(waiting)  # most have sent it

    def tick(self, now: float) -> None:
        """Look at what comes in pieces, and close what is late; `now` is monotonic."""
        for waiting in list(self._waiting.values()):
            if now >= waiting.until:
                self._drop(waiting)
            elif not waiting.is_watched and not waiting.is_refused:
                self._look(waiting)

    def close(self) -> None:
        """Close them all."""
        for waiting in list(self._waiting.values()):
            self._drop(waiting)

    def _look(self, waiting: _Waiting) -> None:
        sock = waiting.sock
        try:
            if waiting.size and _unread_bytes(sock) <= waiting.size:
                # Woken without news: the peer sends no more, or the kernel is short of memory.
                if _is_established(sock):
                    self._rest(waiting)
                else:
                    self._drop(waiting)
                return
            data = sock.recv(HEAD_MAX_BYTES, socket.MSG_PEEK)
            if not data:
                self._drop(waiting)
                return
            verdict = judge(data, self._secret)
            if verdict is Verdict.UNFINISHED:
                waiting.size = len(data)
                waiting.looks += 1
                self._await_more(waiting)
                return
            self._rest(waiting)
            if verdict is Verdict.ADMITTED:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
                del self._waiting[sock.fileno()]
                self._admit(sock)
            else:
                self._refuse(waiting, _REFUSALS[verdict])
        except BlockingIOError:
            self._await_more(waiting)
        except OSError:
            self._drop(waiting)

    def _await_more(self, waiting: _Waiting) -> None:
        """Have the descriptor readable once there is more than was seen: what is left unread makes it so already."""
        if waiting.size >= _LONG_BYTES:
            waiting.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, _LONG_BUFFER_BYTES)  # grows the buffer
        waiting.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, waiting.size + 1)
        if waiting.looks > _QUICK_LOOKS:
            self._rest(waiting)
        elif not waiting.is_watched:
            waiting.is_watched = True
            self._watch(waiting.sock.fileno(), lambda: self._look(waiting))

    def _rest(self, waiting: _Waiting) -> None:
        """Look no more but once per tick."""
        if waiting.is_watched:
            waiting.is_watched = False
            self._unwatch(waiting.sock.fileno())

    def _refuse(self, waiting: _Waiting, answer: bytes) -> None:
        waiting.is_refused = True
        waiting.until = time.monotonic() + _LINGER_S
        with contextlib.suppress(OSError):  # the peer is gone; it is closed when its time is over
            waiting.sock.send(answer)
            waiting.sock.shutdown(socket.SHUT_WR)

    def _drop(self, waiting: _Waiting) -> None:
        self._rest(waiting)
        del self._waiting[waiting.sock.fileno()]
        waiting.sock.close()


def _unread_bytes(sock: socket.socket) -> int:
    return int(struct.unpack("i", fcntl.ioctl(sock, termios.FIONREAD, b"\0\0\0\0"))[0])


def _is_established(sock: socket.socket) -> bool:
    """Tell whether both ends may still send."""
    return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == 1
