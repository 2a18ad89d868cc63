"""Messages between a supervisor and its workers: small JSON datagrams, with connections as file descriptors."""

from __future__ import annotations

import json
import socket
from collections.abc import Sequence
from typing import Any

_MAX_MESSAGE_BYTES = 128 * 1024
_MAX_TRACEBACK_CHARS = 32 * 1024


class Channel:
    """One end of a socket pair. Messages are never merged or split."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock

    @classmethod
    def of(cls, fd: int) -> Channel:
        """Create an end from its file descriptor, which it then owns."""
        return cls(socket.socket(fileno=fd))

    @classmethod
    def pair(cls) -> tuple[Channel, Channel]:
        """Create both ends."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in (ours, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * _MAX_MESSAGE_BYTES)
        return cls(ours), cls(theirs)

    def send(self, kind: str, fd: int | None = None, fds: Sequence[int] = (), **fields: Any) -> bool:
        """Send a message, optionally with one or several file descriptors; return False if that failed."""
        data = json.dumps({"kind": kind, **fields}).encode()
        try:
            if fd is None and not fds:
                self.sock.send(data)
            else:
                socket.send_fds(self.sock, [data], [*fds] if fd is None else [fd])
        except OSError:
            return False
        return True

    def send_failure(self, message: str, traceback: str, exception: str = "") -> None:
        """Report why user code could not be started; `exception` is the class that it raised."""
        self.send(
            "failed",
            message=replace_surrogates(message[-4096:]),
            traceback=replace_surrogates(traceback[-_MAX_TRACEBACK_CHARS:]),
            exception=replace_surrogates(exception[:256]),
        )

    def receive(self) -> tuple[dict[str, Any], int | None] | None:
        """Receive a message; None if the peer has closed. Raises: BlockingIOError if a non-blocking socket has none."""
        received = self.receive_fds(1)
        return None if received is None else (received[0], next(iter(received[1]), None))

    def receive_fds(self, count: int) -> tuple[dict[str, Any], list[int]] | None:
        """Receive a message with up to `count` file descriptors; the rest as `receive`."""
        try:
            data, fds, _, _ = socket.recv_fds(self.sock, _MAX_MESSAGE_BYTES, count)
        except BlockingIOError:
            raise
        except OSError:
            return None
        if not data:
            return None
        return json.loads(data), fds

    def fileno(self) -> int:
        """Return the file descriptor, for selectors."""
        return self.sock.fileno()

    def close(self) -> None:
        """Close this end."""
        self.sock.close()


def replace_surrogates(text: str) -> str:
    """Return text that can be encoded as UTF-8: lone surrogates become question marks."""
    return text.encode(errors="replace").decode()
