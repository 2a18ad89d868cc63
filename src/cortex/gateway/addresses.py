"""Validation and notation of the addresses of gateway servers: a local path, or a numeric `host:port`. Pure.

Nodes report paths and addresses, and they are written into HAProxy's configuration and commands. Anything that does
not have exactly one of these forms must be rejected.
"""

from __future__ import annotations

import ipaddress
import re

from cortex.home import SPECIAL_CHARACTERS

_PATH = re.compile(rf"/[^{SPECIAL_CHARACTERS}]{{1,106}}")


def is_path(socket: str) -> bool:
    """Return whether it is an absolute path that needs no escaping in HAProxy's configuration, except for spaces."""
    return _PATH.fullmatch(socket) is not None


def is_address(socket: str) -> bool:
    """Return whether it is a numeric `host:port`, or `[host]:port` for IPv6 without a zone identifier."""
    host, _, port = socket.rpartition(":")
    try:
        is_v6 = ipaddress.ip_address(host.removeprefix("[").removesuffix("]")).version == 6
    except ValueError:
        return False
    is_bracketed = host.startswith("[") and host.endswith("]")
    is_port = port.isascii() and port.isdigit() and len(port) <= 5 and 0 < int(port) < 65536
    return is_v6 == is_bracketed and is_port and "%" not in host  # a zone identifier may be any text


def host_of(address: str) -> str:
    """Return the host of an address, without brackets."""
    return address.rpartition(":")[0].strip("[]")


def numeric(host: str) -> str | None:
    """Return a numeric host in canonical form, which `host_of` also uses; None for a name."""
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        return None


def server_address(address: str) -> str:
    """Return an address in HAProxy's notation."""
    return f"ipv6@{address}" if address.startswith("[") else f"ipv4@{address}"
