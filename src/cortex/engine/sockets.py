"""Listening unix sockets of a supervisor, and the descriptors that their connections need."""

from __future__ import annotations

import contextlib
import errno
import resource
import socket
import time
from pathlib import Path

_BACKLOG = 1024
_NO_DESCRIPTOR_PAUSE_S = 0.01


def listen(path: str) -> socket.socket:
    """Open a unix socket that only its owner may use."""
    with contextlib.suppress(FileNotFoundError):
        Path(path).unlink()
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.bind(path)
    Path(path).chmod(0o600)
    sock.listen(_BACKLOG)
    sock.setblocking(False)
    return sock


def accept_one(listener: socket.socket) -> socket.socket | None:
    """Take one waiting connection; None if there is none, or no descriptor for it."""
    try:
        return listener.accept()[0]
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            time.sleep(_NO_DESCRIPTOR_PAUSE_S)  # it stays readable: without a pause the caller's loop would spin
        return None


def allow_descriptors(wanted: int) -> None:
    """Raise the soft limit on open descriptors to `wanted`, or to as many as the hard limit allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
