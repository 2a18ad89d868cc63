"""TCP proxy that breaks connections when a test requires it."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from enum import Enum, auto
from typing import Self


class ProxyAction(Enum):
    """Treatment of data from a client."""

    PASS = auto()
    CUT = auto()  #: drop the data and close the connection
    CUT_ANSWER = auto()  #: forward the data and close the connection before the response


class TcpProxy:
    """Forwards bytes. `judge` chooses the action for all data from clients."""

    def __init__(self, port: int) -> None:
        self.judge: Callable[[bytes], ProxyAction] = lambda data: ProxyAction.PASS
        self._target = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._sockets: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._silent = threading.Event()

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.break_all()

    def break_all(self) -> None:
        """Close every connection; new ones are accepted."""
        with self._lock:
            broken, self._sockets = self._sockets, set()
        for each in broken:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def fall_silent(self) -> None:
        """Forward nothing and close nothing, like a broken network; new connections are still accepted."""
        self._silent.set()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        try:
            server = socket.create_connection(("127.0.0.1", self._target))
        except OSError:
            client.close()
            return
        with self._lock:
            self._sockets |= {client, server}
        answering = threading.Event()
        answering.set()
        threading.Thread(target=self._answer, args=(server, client, answering), daemon=True).start()
        with contextlib.suppress(OSError):
            while data := client.recv(65536):
                if self._silent.is_set():
                    return
                action = self.judge(data)
                if action is ProxyAction.CUT_ANSWER:
                    answering.clear()  # the thread that forwards responses closes both
                if action is ProxyAction.CUT:
                    break
                server.sendall(data)
        if not self._silent.is_set():
            _close(client, server)

    def _answer(self, server: socket.socket, client: socket.socket, answering: threading.Event) -> None:
        with contextlib.suppress(OSError):
            while data := server.recv(65536):
                if self._silent.is_set():
                    return
                if not answering.is_set():
                    break
                client.sendall(data)
        if not self._silent.is_set():
            _close(client, server)


def _close(*sockets: socket.socket) -> None:
    for each in sockets:
        with contextlib.suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)
