"""Connections to the server of a command, one for each request.

None is kept for a second request. Servers close idle connections when they like, and a request that meets the close
would be lost, or run twice if it were repeated. Some serve one connection at a time, which others would wait for.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cortex.worker.commands.command_call import CommandCall
    from cortex.worker.commands.command_process import CommandProcess

#: Address of a server: the path of a unix socket, or host and port.
Address = str | tuple[str, int]

#: Interval of attempts to connect while the server accepts no connection.
_RETRY_S = 0.02
#: Shortest interval of searches for the address at which the server listens now.
_SEARCH_S = 0.1


class Upstream:
    """The server of the command, and the address at which it listens. Event-loop thread only."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, process: CommandProcess, address: Address, buffer: memoryview
    ) -> None:
        self.loop = loop
        self.address: Address | None = address  #: None while it listens nowhere
        self.buffer = buffer
        self._process = process
        self._search_at = 0.0

    def is_of_command(self, address: Address) -> bool:
        """Return whether a connection that was just made to an address is one to the command; else search again."""
        is_same = self._process.still_listens_at(address)
        if not is_same:
            self.lose(address)
        return is_same

    def lose(self, address: Address) -> None:
        """Search for the address again, unless another one has been found meanwhile."""
        if self.address == address:
            self.address = None

    def find_address(self) -> Address | None:
        """Return the address, after a search if it is not known."""
        if self.address is None and self.loop.time() >= self._search_at:
            self._search_at = self.loop.time() + _SEARCH_S
            self.address = self._process.find_address()
        return self.address

    def connect(self, receiver: CommandCall) -> UpstreamConnection:
        """Return a new connection for a request."""
        connection = UpstreamConnection(self, receiver)
        connection.connect()
        return connection


class UpstreamConnection:
    """One connection to the server."""

    __slots__ = (
        "_address",
        "_backlog",
        "_fd",
        "_is_open",
        "_is_reading",
        "_loop",
        "_receiver",
        "_upstream",
        "error",
        "is_connected",
        "sock",
    )

    _address: Address
    sock: socket.socket  #: once there is an address

    def __init__(self, upstream: Upstream, receiver: CommandCall) -> None:
        self.error = ""  #: of the last attempt to connect
        self._receiver = receiver
        self._upstream = upstream
        self._loop = upstream.loop
        self._fd = -1
        self._backlog: deque[memoryview] = deque()
        self._is_open = True
        self.is_connected = False  #: the server has accepted the connection
        self._is_reading = False

    @property
    def unsent_bytes(self) -> int:
        """Return the number of bytes that the server has not taken yet."""
        return sum(map(len, self._backlog))

    def connect(self) -> None:
        """Connect; repeat it while the server refuses, or is found at no address. The receiver limits the time."""
        if not self._is_open:
            return
        address = self._upstream.find_address()
        if address is None:
            self.error = "it listens nowhere"
            self._loop.call_later(_RETRY_S, self.connect)
            return
        self._address = address
        self.sock = _new_socket(address)
        self._fd = self.sock.fileno()
        try:
            self.sock.connect(address)
        except BlockingIOError as error:
            if isinstance(address, str):  # the server's backlog is full
                self._connect_later(error)
            else:
                self._loop.add_writer(self._fd, self._on_connected)
        except OSError as error:
            self._upstream.lose(address)
            self._connect_later(error)
        else:
            self._begin()

    def _connect_later(self, error: OSError) -> None:
        self.error = error.strerror or str(error)
        self._fd = -1
        self.sock.close()
        self._loop.call_later(_RETRY_S, self.connect)

    def _on_connected(self) -> None:
        self._loop.remove_writer(self._fd)
        if number := self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self._upstream.lose(self._address)
            self._connect_later(OSError(number, os.strerror(number)))
        else:
            self._begin()

    def _begin(self) -> None:
        if not self._upstream.is_of_command(self._address):
            self._connect_later(OSError("another program listens at its port"))
            return
        self.is_connected = True
        self.resume()
        if self._backlog:
            self._on_writable()

    def send(self, data: bytes) -> None:
        """Send data, now or once the server takes it."""
        if not self._is_open or not data:
            return
        view = memoryview(data)
        if self.is_connected and not self._backlog:
            try:
                view = view[self.sock.send(view) :]
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
                sent = self.sock.send(view)
                if sent < len(view):
                    self._backlog[0] = view[sent:]
                    raise BlockingIOError
                self._backlog.popleft()
        except (BlockingIOError, InterruptedError):
            self._loop.add_writer(self._fd, self._on_writable)
        except OSError:
            self._backlog.clear()
        self._receiver.on_sent()

    def resume(self) -> None:
        """Read what the server sends."""
        if self.is_connected and self._is_open and not self._is_reading:
            self._is_reading = True
            self._loop.add_reader(self._fd, self._on_readable)

    def pause(self) -> None:
        """Leave what the server sends in the socket."""
        if self._is_reading:
            self._is_reading = False
            self._loop.remove_reader(self._fd)

    def _on_readable(self) -> None:
        is_reset = False
        try:
            size = self.sock.recv_into(self._upstream.buffer)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            size, is_reset = 0, True
        if size:
            self._receiver.on_data(self._upstream.buffer[:size])
        else:
            self.close()
            self._receiver.on_end(is_reset)

    def close(self) -> None:
        """Close the connection; the server notices it."""
        if not self._is_open:
            return
        self._is_open = False
        self.pause()
        if self._fd >= 0:
            self._loop.remove_writer(self._fd)
            self.sock.close()
        self._backlog.clear()


def _new_socket(address: Address) -> socket.socket:
    family = socket.AF_UNIX if isinstance(address, str) else socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setblocking(False)
    if family != socket.AF_UNIX:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock
