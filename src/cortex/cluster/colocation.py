"""Tells whether the unix sockets of a node lead to its replicas from here, because it is this machine."""

from __future__ import annotations

import ipaddress
import json
import os
import socket
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cortex.cluster.node.start import RESERVE_SOCKET
from cortex.home import Home
from cortex.processes.identity import Identity

_CREDENTIALS = struct.Struct("3i")


def sockets_here(host: str, told: Mapping[str, Any]) -> Path | None:
    """Return the folder with the sockets of the node at `host`, of which its agent said `told`; None if not from here.

    Who listens at the agent's own socket there must be that agent, as our user, and its address one of ours. In
    containers that share a network, folders or both with us not all of that is true.
    """
    try:
        folder = Home(Path(told["home"])).sockets_dir
        agent = Identity.from_json(json.loads(told["identity"]))
        is_here = _is_own_address(host) and _listens(agent, folder / RESERVE_SOCKET)
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None
    return folder if is_here else None


def _is_own_address(host: str) -> bool:
    address = ipaddress.ip_address(host)
    if address.is_unspecified:
        return False
    with socket.socket(socket.AF_INET6 if address.version == 6 else socket.AF_INET) as sock:
        try:
            sock.bind((host, 0))
        except OSError:
            return False
    return True


def _listens(process: Identity, path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.setblocking(False)  # one with a full backlog is not waited for
        sock.connect(str(path))
        found = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, user, _ = _CREDENTIALS.unpack(found)
    return user == os.geteuid() and pid > 0 and Identity.of(pid).is_same(process)
