"""HTTP over Unix sockets, for clients that block."""

from __future__ import annotations

import socket
from http.client import HTTPConnection


class UnixHttpConnection(HTTPConnection):
    """HTTP connection to a server at a Unix socket."""

    def __init__(self, path: str, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        """Connect to the socket. Raises: OSError."""
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)
