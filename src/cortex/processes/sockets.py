"""Listening sockets, unix and TCP, the descriptors that their connections need, and the peers of unix sockets."""

from __future__ import annotations

import contextlib
import errno
import resource
import socket
import struct
import time
from pathlib import Path
from typing import NamedTuple

#: Credentials of a peer (SO_PEERCRED, see unix(7)).
_CREDENTIALS = struct.Struct("3i")
_BACKLOG = 1024
_NO_DESCRIPTOR_PAUSE_S = 0.01
#: TCP keepalive: a peer whose machine vanished is detected after about 30 s, whether or not data is in flight.
_KEEPALIVE_IDLE_S = 15
_KEEPALIVE_EVERY_S = 5
_KEEPALIVE_COUNT = 3
_UNACKNOWLEDGED_MS = 30_000


def listen(path: str) -> socket.socket:
    """Open a unix socket that only its owner may use. Raises: OSError, with the path."""
    with contextlib.suppress(FileNotFoundError):
        Path(path).unlink()
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.bind(path)
    except OSError as error:
        sock.close()
        raise OSError(error.errno, error.strerror, path) from None
    Path(path).chmod(0o600)
    sock.listen(_BACKLOG)
    sock.setblocking(False)
    return sock


def replace_listener(path: Path) -> socket.socket:
    """Open a unix socket that only its owner may use; it atomically replaces one left by an earlier process."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    part = path.with_name(f"{path.name}.part")
    part.unlink(missing_ok=True)
    listener.bind(str(part))
    part.chmod(0o600)
    listener.listen(_BACKLOG)
    part.rename(path)
    return listener


def listen_over_tcp(host: str) -> socket.socket:
    """Listen at an address of this machine, on any free port. Raises: OSError if the machine lacks the address."""
    family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        # Connections inherit all of these.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEPALIVE_IDLE_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _KEEPALIVE_EVERY_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _KEEPALIVE_COUNT)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNACKNOWLEDGED_MS)
        sock.bind(address)
        sock.listen(_BACKLOG)
    except OSError:
        sock.close()
        raise
    sock.setblocking(False)
    return sock


def address_of(listener: socket.socket) -> str:
    """Return the address of a TCP listener: `host:port`, `[host]:port` for IPv6."""
    host, port = listener.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def accept_one(listener: socket.socket) -> socket.socket | None:
    """Accept one waiting connection; return None if none waits, or if no descriptor is free for it."""
    try:
        return listener.accept()[0]
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            time.sleep(_NO_DESCRIPTOR_PAUSE_S)  # the listener stays readable: without a pause the event loop would spin
        return None


def refuse(listener: socket.socket) -> None:
    """Refuse new connections at a unix socket. Waiting ones can still be accepted."""
    listener.shutdown(socket.SHUT_RDWR)


def allow_descriptors(wanted: int) -> None:
    """Raise the soft limit on open descriptors to `wanted`, capped at the hard limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


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
