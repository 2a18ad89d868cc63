"""Listening sockets of a supervisor, unix and TCP, and the descriptors that their connections need."""

from __future__ import annotations

import contextlib
import errno
import resource
import socket
import time
from pathlib import Path

_BACKLOG = 1024
_NO_DESCRIPTOR_PAUSE_S = 0.01
#: A peer whose machine vanished is noticed after about half a minute: while nothing is sent, and while something is.
_KEEPALIVE_IDLE_S = 15
_KEEPALIVE_EVERY_S = 5
_KEEPALIVE_COUNT = 3
_UNANSWERED_MS = 30_000


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


def listen_over_tcp(host: str) -> socket.socket:
    """Listen at an address of this machine, at a port that is free. Raises: OSError if it has no such address."""
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
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNANSWERED_MS)
        sock.bind(address)
        sock.listen(_BACKLOG)
    except OSError:
        sock.close()
        raise
    sock.setblocking(False)
    return sock


def address_of(listener: socket.socket) -> str:
    """Return where a socket listens over TCP: `host:port`, `[host]:port` of IPv6."""
    host, port = listener.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def accept_one(listener: socket.socket) -> socket.socket | None:
    """Take one waiting connection; None if there is none, or no descriptor for it."""
    try:
        return listener.accept()[0]
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            time.sleep(_NO_DESCRIPTOR_PAUSE_S)  # it stays readable: without a pause the caller's loop would spin
        return None


def refuse(listener: socket.socket) -> None:
    """Refuse new connections at a unix socket, whoever else has it open; what waits there can be accepted still."""
    listener.shutdown(socket.SHUT_RDWR)


def allow_descriptors(wanted: int) -> None:
    """Raise the soft limit on open descriptors to `wanted`, or to as many as the hard limit allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
