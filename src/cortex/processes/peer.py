"""Credentials of the process at the other end of a unix socket (SO_PEERCRED, see unix(7))."""

from __future__ import annotations

import socket
import struct
from typing import NamedTuple

_CREDENTIALS = struct.Struct("3i")


class Peer(NamedTuple):
    """The process that connected, or that listens, as the kernel recorded it."""

    pid: int  #: 0 for a process of another PID namespace
    uid: int
    gid: int


def peer_of(sock: socket.socket) -> Peer | None:
    """Return the peer of a connected unix socket; None where the system does not report it. Raises: OSError."""
    if not hasattr(socket, "SO_PEERCRED"):
        return None
    return Peer(*_CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)))
