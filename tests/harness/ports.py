"""Ports for servers of tests, reserved also while the server is down."""

from __future__ import annotations

import random
import socket

#: Below those that the kernel gives to connections and to whoever asks for any (32768 and up), above those of Ray's
#: workers: a port of these is taken by nobody else between here and the server's start, or while it is restarted.
_PORTS = range(20000, 32000)
#: By which other processes of the tests know what is taken; until this process ends.
_claims: list[socket.socket] = []


def free_port() -> int:
    """Return a port on which nothing listens, and that no other test gets while this process lives."""
    for port in random.sample(_PORTS, len(_PORTS)):
        claim = socket.socket(socket.AF_UNIX)
        try:
            claim.bind(f"\0cortex-tests-port-{port}")
            with socket.create_server(("", port)):
                _claims.append(claim)
                return port
        except OSError:  # claimed, or listened on
            claim.close()
    raise OSError("no free port")
