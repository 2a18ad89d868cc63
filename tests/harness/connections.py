"""Clients of sockets: HTTP over unix sockets, and over a connection that stays open."""

from __future__ import annotations

import fcntl
import json
import socket
import sys
import termios
import threading
from http.client import HTTPConnection
from pathlib import Path

from cortex.processes.http import UnixHttpConnection
from harness.wait import PATIENCE_S


def read_until(sock: socket.socket, end: bytes) -> bytes:
    """Receive bytes until the last ones are `end`."""
    received = b""
    while not received.endswith(end):
        data = sock.recv(65536)
        assert data, received
        received += data
    return received


def unread_bytes(connection: HTTPConnection) -> int:
    """Return how much of what was sent the other end has not read (unix(7), SIOCOUTQ)."""
    assert connection.sock is not None
    return int.from_bytes(fcntl.ioctl(connection.sock, termios.TIOCOUTQ, bytes(4)), sys.byteorder)


class UnixConnection(UnixHttpConnection):
    """An HTTP client of a unix socket."""

    def __init__(self, path: str | Path, timeout_s: float = PATIENCE_S) -> None:
        super().__init__(str(path), timeout_s)


class KeptConnection(threading.Thread):
    """Sends one request after the other until a response closes the connection."""

    def __init__(self, port: int, path: str, **payload: float) -> None:
        super().__init__(daemon=True)
        self.answers: list[tuple[int, str | None]] = []
        self.failure: Exception | None = None
        self._path = path
        self._body = json.dumps(payload)
        self._connection = HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)

    def run(self) -> None:
        try:
            while not self.answers or self.answers[-1][1] != "close":
                self.send()
        except Exception as error:
            self.failure = error

    def send(self) -> tuple[int, bytes]:
        """Send one request; return the status and the body of its response."""
        self._connection.request("POST", self._path, self._body, {"content-type": "application/json"})
        response = self._connection.getresponse()
        body = response.read()
        self.answers.append((response.status, response.headers["connection"]))
        return response.status, body
