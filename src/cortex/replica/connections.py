"""A worker's end of the channel: connections come from the supervisor, and it learns which of them closed."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable

from cortex.replica.app import App
from cortex.replica.cells import Cells
from cortex.replica.channel import Channel
from cortex.replica.http import READ_BYTES, Connection
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
    ) -> None:
        self._app = app
        self._on_catalogue = on_catalogue
        self._cells = cells
        self._loop = loop
        self._channel = channel
        self._buffer = memoryview(bytearray(READ_BYTES))
        self._untold: list[tuple[str, int]] = []

    def on_message(self, stop: Callable[[], None]) -> None:
        """Read every message that waits; `stop` is called when the supervisor asks for it."""
        while True:
            try:
                received = self._channel.receive()
            except BlockingIOError:
                return
            if received is None:
                os._exit(1)  # the supervisor is gone, and with it whoever could name our death
            message, fd = received
            if message["kind"] == "connection" and fd is not None:
                self._add(fd, message["index"])
            elif message["kind"] == "configure":
                self._app.configure(Limits(message["timeout_s"], message["max_body_bytes"]))
            elif message["kind"] == "catalogue":
                self._on_catalogue(message["path"])
            elif message["kind"] == "retire":
                self._app.retire(self._released)
            elif message["kind"] == "condemn":
                self._app.condemn()
            elif message["kind"] == "stop":
                stop()
                return

    def _add(self, fd: int, index: int) -> None:
        sock = socket.socket(fileno=fd)
        sock.setblocking(False)
        connection = Connection(sock, index, self._app, self._cells, self._loop, self._buffer, self._closed)
        self._app.add(connection)

    def _closed(self, connection: Connection) -> None:
        self._tell([("closed", connection.index)])

    def _released(self, connection: Connection) -> None:
        self._tell([("released", connection.index)])

    def _tell(self, news: list[tuple[str, int]]) -> None:
        """Tell the supervisor, which keeps a descriptor of each connection for as long as it is not told."""
        untold = [(kind, index) for kind, index in news if not self._channel.send(kind, index=index)]
        if untold and not self._untold:
            self._loop.call_later(_TELL_AGAIN_S, self._tell_again)
        self._untold += untold

    def _tell_again(self) -> None:
        news, self._untold = self._untold, []
        self._tell(news)
