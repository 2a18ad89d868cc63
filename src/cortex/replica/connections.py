"""A worker's end of the channel: connections come from the supervisor, and it learns which of them closed."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable

from cortex.replica.app import App
from cortex.replica.channel import Channel
from cortex.replica.gateway_clock import GatewayClock
from cortex.replica.http import READ_BYTES, Connection
from cortex.replica.shared_state import MAX_CONNECTIONS, Cells
from cortex.replica.spec import Limits

#: The supervisor reads at once unless very many connections close together.
_TELL_AGAIN_S = 0.05


class Connections:
    """Takes the supervisor's messages on the event loop."""

    def __init__(
        self,
        app: App,
        cells: Cells,
        loop: asyncio.AbstractEventLoop,
        channel: Channel,
        on_catalogue: Callable[[str], None],
        on_lost: Callable[[], None],
    ) -> None:
        """`on_lost` is called once nothing will come from the supervisor any more."""
        self._app = app
        self._on_catalogue = on_catalogue
        self._on_lost = on_lost
        self._failures = 0
        self._cells = cells
        self._loop = loop
        self._channel = channel
        self._buffer = memoryview(bytearray(READ_BYTES))
        self._untold: list[tuple[str, int]] = []
        self._clocks: dict[str, GatewayClock] = {}  #: by the address of the gateway

    def on_message(self, stop: Callable[[], None]) -> None:
        """Read every message that waits; `stop` is called when the supervisor asks for it."""
        while True:
            try:
                received = self._channel.receive()
            except BlockingIOError:
                return
            if received is None:
                self._failures += 1
                if self._failures == 1:
                    continue  # a supervisor that died over a message of ours; connections may still lie behind that
                self._loop.remove_reader(self._channel.fileno())
                self._on_lost()
                return
            message, fd = received
            if message["kind"] == "connection" and fd is not None:
                self._add(fd, message["index"], message.get("again", False))
            elif message["kind"] == "configure":
                self._app.configure(Limits(message["timeout_s"], message["max_body_bytes"]))
            elif message["kind"] == "catalogue":
                self._on_catalogue(message["path"])
            elif message["kind"] == "suspects":
                self._app.suspect(message["groups"])
            elif message["kind"] == "retire":
                self._app.retire(self._released)
            elif message["kind"] == "condemn":
                self._app.condemn()
            elif message["kind"] == "stop":
                stop()
                return

    def take_waiting(self, listener: socket.socket | None) -> None:
        """Serve what waits at the socket of a supervisor that is dead, and have the gateway be refused there."""
        if listener is None:
            return
        with contextlib.suppress(OSError):  # none waits any more
            listener.shutdown(socket.SHUT_RDWR)
            for number in range(MAX_CONNECTIONS):
                # The supervisor gave out rows from the other end. It is gone: nobody reads them any more.
                self._add(listener.accept()[0].detach(), MAX_CONNECTIONS - 1 - number, again=False)
        listener.close()

    def _add(self, fd: int, index: int, again: bool) -> None:
        sock = socket.socket(fileno=fd)
        sock.setblocking(False)
        connection = Connection(sock, index, self._app, self._cells, self._loop, self._buffer, self._closed)
        connection.clock = self._clock_of(sock)
        self._app.add(connection)
        if again:
            connection.read_again()

    def _clock_of(self, sock: socket.socket) -> GatewayClock | None:
        """Return the clock of the gateway at the other end; None if it is ours."""
        if sock.family == socket.AF_UNIX:
            return None
        try:
            host = sock.getpeername()[0]
        except OSError:  # it is gone
            return None
        return self._clocks.setdefault(host, GatewayClock())

    def _closed(self, connection: Connection) -> None:
        self._tell([("closed", connection.index)])

    def _released(self, connection: Connection) -> None:
        self._tell([("released", connection.index)])

    def _tell(self, news: list[tuple[str, int]]) -> None:
        """Tell the supervisor, which keeps a descriptor of each connection for as long as it is not told."""
        if self._failures > 1:
            return  # it is gone
        untold = [(kind, index) for kind, index in news if not self._channel.send(kind, index=index)]
        if untold and not self._untold:
            self._loop.call_later(_TELL_AGAIN_S, self._tell_again)
        self._untold += untold

    def _tell_again(self) -> None:
        news, self._untold = self._untold, []
        self._tell(news)
