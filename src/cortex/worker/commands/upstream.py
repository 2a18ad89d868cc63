"""Connections to the server of a command, kept open between requests.

A connection has one request at a time. It is closed a moment after its last response: servers close idle connections
too, some after two seconds, and a request that meets the close would be lost. Others serve one connection at a time.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cortex.worker.commands.command_call import CommandCall

#: Address of a server: the path of a unix socket, or host and port.
Address = str | tuple[str, int]

#: An idle connection is closed after this time.
_IDLE_S = 0.5
#: Interval of attempts to connect while the server accepts no connection.
_RETRY_S = 0.02


class UpstreamPool:
    """The connections of this process to the server of its command. Event-loop thread only."""

    def __init__(self, loop: asyncio.AbstractEventLoop, address: Address, buffer: memoryview) -> None:
        self.loop = loop
        self.address = address
        self.buffer = buffer
        self._idle: deque[UpstreamConnection] = deque()  #: the least recently used first
        self._timer: asyncio.TimerHandle | None = None

    def acquire(self, receiver: CommandCall) -> UpstreamConnection:
        """Return a connection for a request: the one used last, or a new one."""
        while self._idle:
            connection = self._idle.pop()
            if connection.is_quiet():
                connection.receiver = receiver
                connection.is_reused = True
                return connection
            connection.close()
        return self.connect(receiver)

    def connect(self, receiver: CommandCall) -> UpstreamConnection:
        """Return a new connection for a request."""
        connection = UpstreamConnection(self, receiver)
        connection.connect()
        return connection

    def release(self, connection: UpstreamConnection) -> None:
        """Keep a connection after the end of its request."""
        connection.receiver = None
        connection.idle_since = self.loop.time()
        connection.resume()
        self._idle.append(connection)
        if self._timer is None:
            self._timer = self.loop.call_later(_IDLE_S, self._close_idle)

    def _close_idle(self) -> None:
        self._timer = None
        while self._idle:
            delay_s = self._idle[0].idle_since + _IDLE_S - self.loop.time()
            if delay_s > 0:
                self._timer = self.loop.call_later(delay_s, self._close_idle)
                return
            self._idle.popleft().close()

    def remove(self, connection: UpstreamConnection) -> None:
        """Forget an idle connection."""
        with contextlib.suppress(ValueError):
            self._idle.remove(connection)


class UpstreamConnection:
    """One connection to the server."""

    __slots__ = (
        "_backlog",
        "_fd",
        "_is_connected",
        "_is_open",
        "_is_reading",
        "_loop",
        "_pool",
        "_sock",
        "error",
        "idle_since",
        "is_reused",
        "receiver",
    )

    def __init__(self, pool: UpstreamPool, receiver: CommandCall) -> None:
        self.receiver: CommandCall | None = receiver  #: None: idle
        self.idle_since = 0.0
        self.is_reused = False  #: it has had an earlier request
        self.error = ""  #: of the last attempt to connect
        self._pool = pool
        self._loop = pool.loop
        self._sock = _new_socket(pool.address)
        self._fd = self._sock.fileno()
        self._backlog: deque[memoryview] = deque()
        self._is_open = True
        self._is_connected = self._is_reading = False

    @property
    def is_connected(self) -> bool:
        """Return whether the server has accepted the connection."""
        return self._is_connected

    @property
    def unsent_bytes(self) -> int:
        """Return the number of bytes that the server has not taken yet."""
        return sum(map(len, self._backlog))

    def is_quiet(self) -> bool:
        """Return whether the server has neither closed the connection nor sent anything that was not read."""
        try:
            self._sock.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return True
        except OSError:
            pass
        return False

    def connect(self) -> None:
        """Connect; repeat it while the server refuses. The receiver limits the time."""
        if not self._is_open:
            return
        try:
            self._sock.connect(self._pool.address)
        except BlockingIOError as error:
            if isinstance(self._pool.address, str):  # the server's backlog is full
                self._connect_later(error)
            else:
                self._loop.add_writer(self._fd, self._on_connected)
        except OSError as error:
            self._connect_later(error)
        else:
            self._begin()

    def _connect_later(self, error: OSError) -> None:
        self.error = error.strerror or str(error)
        self._sock.close()
        self._sock = _new_socket(self._pool.address)
        self._fd = self._sock.fileno()
        self._loop.call_later(_RETRY_S, self.connect)

    def _on_connected(self) -> None:
        self._loop.remove_writer(self._fd)
        if number := self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self._connect_later(OSError(number, os.strerror(number)))
        else:
            self._begin()

    def _begin(self) -> None:
        self._is_connected = True
        self.resume()
        if self._backlog:
            self._on_writable()

    def send(self, data: bytes) -> None:
        """Send data, now or once the server takes it."""
        if not self._is_open or not data:
            return
        view = memoryview(data)
        if self._is_connected and not self._backlog:
            try:
                view = view[self._sock.send(view) :]
            except (BlockingIOError, InterruptedError):
                pass
            except OSError:
                return  # the end is read after what the server sent before it
            if view:
                self._loop.add_writer(self._fd, self._on_writable)
        if view:
            self._backlog.append(view)

    def _on_writable(self) -> None:
        self._loop.remove_writer(self._fd)
        try:
            while self._backlog:
                view = self._backlog[0]
                sent = self._sock.send(view)
                if sent < len(view):
                    self._backlog[0] = view[sent:]
                    raise BlockingIOError
                self._backlog.popleft()
        except (BlockingIOError, InterruptedError):
            self._loop.add_writer(self._fd, self._on_writable)
        except OSError:
            self._backlog.clear()
        if self.receiver is not None:
            self.receiver.on_sent()

    def resume(self) -> None:
        """Read what the server sends."""
        if self._is_connected and self._is_open and not self._is_reading:
            self._is_reading = True
            self._loop.add_reader(self._fd, self._on_readable)

    def pause(self) -> None:
        """Leave what the server sends in the socket."""
        if self._is_reading:
            self._is_reading = False
            self._loop.remove_reader(self._fd)

    def _on_readable(self) -> None:
        try:
            size = self._sock.recv_into(self._pool.buffer)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            size = 0
        receiver = self.receiver
        if receiver is None:
            self._pool.remove(self)
            self.close()
        elif size:
            receiver.on_data(self._pool.buffer[:size])
        else:
            self.close()
            receiver.on_end()

    def close(self) -> None:
        """Close the connection; the server notices it."""
        if not self._is_open:
            return
        self._is_open = False
        self.pause()
        self._loop.remove_writer(self._fd)
        self._sock.close()
        self._backlog.clear()


def _new_socket(address: Address) -> socket.socket:
    family = socket.AF_UNIX if isinstance(address, str) else socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setblocking(False)
    if family != socket.AF_UNIX:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock
