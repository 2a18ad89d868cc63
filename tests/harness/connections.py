"""HTTP over unix sockets."""

from __future__ import annotations

import socket
from http.client import HTTPConnection
from pathlib import Path

from harness.wait import PATIENCE_S


class UnixConnection(HTTPConnection):
    """An HTTP client of a unix socket."""

    def __init__(self, path: str | Path, timeout_s: float = PATIENCE_S) -> None:
        super().__init__("replica", timeout=timeout_s)
        self._path = str(path)

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)
