"""Where a server of the gateway is: a path of this machine, or `host:port` in numbers. Does no I/O.

Paths and addresses come from nodes, too, and are written into HAProxy's configuration and commands: what is not
exactly of one of these forms must not get there.
"""

from __future__ import annotations

import ipaddress
import re

_PATH = re.compile(r"/[^\x00-\x1f\x7f-\x9f\u2028\u2029'\"\\$#,]{1,106}")


def is_path(socket: str) -> bool:
    """Tell whether it is a path that HAProxy can be given."""
    return _PATH.fullmatch(socket) is not None


def is_address(socket: str) -> bool:
    """Tell whether it is `host:port` in numbers, `[host]:port` of IPv6 without a zone."""
    host, _, port = socket.rpartition(":")
    try:
        is_v6 = ipaddress.ip_address(host.removeprefix("[").removesuffix("]")).version == 6
    except ValueError:
        return False
    is_bracketed = host.startswith("[") and host.endswith("]")
    is_port = port.isascii() and port.isdigit() and len(port) <= 5 and 0 < int(port) < 65536
    return is_v6 == is_bracketed and is_port and "%" not in host  # any text may follow that


def host_of(address: str) -> str:
    """Return the host of an address, without brackets."""
    return address.rpartition(":")[0].strip("[]")


def numeric(host: str) -> str | None:
    """Write a host in numbers as `host_of` returns it, however it was written; None of a name."""
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        return None


def server_address(address: str) -> str:
    """Write an address as HAProxy takes it."""
    return f"ipv6@{address}" if address.startswith("[") else f"ipv4@{address}"
