"""The TCP sockets that listen on this machine, and the processes that hold them.

A port belongs to nobody: any user may listen where a server is about to, and connect there. What listens is identified
by the inode of its socket, which no later socket has.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

_NETLINK_SOCK_DIAG = 4
#: Request and response of sock_diag(7): `inet_diag_req_v2` and `inet_diag_msg`, both after a `nlmsghdr`.
_HEADER = struct.Struct("=IHHII")
_SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST = 20, 1
_REQUEST = struct.Struct("=BBBxI")
_PORTS, _INTERFACE = struct.Struct(">HH"), struct.Struct("=III")
_NO_COOKIE = 0xFFFFFFFF
_STATE_AT, _UID_AT = _HEADER.size + 1, _HEADER.size + 64
_OWNER = struct.Struct("=II")
_LISTEN = 10
#: The lookup is that of a connection from this port, which only root could make.
_ANY_PORT = 1
_ROOT = 0


class ListeningSocket(NamedTuple):
    """A socket that accepts the connections to an address."""

    inode: int
    uid: int  #: of the process that created it


class SocketTable:
    """The kernel's table of TCP sockets in this network namespace."""

    def __init__(self) -> None:
        self._netlink: socket.socket | None = None
        self._requests: dict[tuple[str, int], bytes] = {}
        self._buffer = bytearray(1024)
        with contextlib.suppress(OSError):  # a kernel without it
            netlink = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_NONBLOCK, _NETLINK_SOCK_DIAG)
            netlink.connect((0, 0))
            self._netlink = netlink

    def find(self, host: str, port: int) -> ListeningSocket | None:
        """Return the socket to which the kernel passes connections to a loopback address; it takes microseconds."""
        return self._ask_kernel(host, port) or self._read(host, port)

    def _ask_kernel(self, host: str, port: int) -> ListeningSocket | None:
        if self._netlink is None:
            return None
        request = self._requests.get((host, port))
        if request is None:
            request = self._requests[host, port] = _lookup_request(host, port)
        try:
            self._netlink.send(request)
            size = self._netlink.recv_into(self._buffer)
        except OSError:
            return None
        kind = _HEADER.unpack_from(self._buffer)[1]
        if kind != _SOCK_DIAG_BY_FAMILY or size < _UID_AT + _OWNER.size or self._buffer[_STATE_AT] != _LISTEN:
            return None
        uid, inode = _OWNER.unpack_from(self._buffer, _UID_AT)
        return ListeningSocket(inode, uid)

    @staticmethod
    def _read(host: str, port: int) -> ListeningSocket | None:
        """Look a socket up as the kernel does: the most specific address first."""
        is_ipv6 = ":" in host
        tables = {0: _listening("/proc/net/tcp", port), 1: _listening("/proc/net/tcp6", port)}
        mapped = "::" if is_ipv6 else f"::ffff:{host}"
        wanted = [(1, host), (1, "::")] if is_ipv6 else [(0, host), (1, mapped), (0, "0.0.0.0"), (1, "::")]
        return next((tables[table][address] for table, address in wanted if address in tables[table]), None)


def _lookup_request(host: str, port: int) -> bytes:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    address = socket.inet_pton(family, host).ljust(16, b"\0")
    interface = 0
    with contextlib.suppress(OSError):  # there is no interface of this name, but another one has the address
        interface = socket.if_nametoindex("lo")
    body = _REQUEST.pack(family, socket.IPPROTO_TCP, 0, 1 << _LISTEN) + _PORTS.pack(port, _ANY_PORT)
    body += address + address + _INTERFACE.pack(interface, _NO_COOKIE, _NO_COOKIE)
    return _HEADER.pack(_HEADER.size + len(body), _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST, 1, 0) + body


def _listening(path: str, port: int) -> dict[str, ListeningSocket]:
    """Return the listening sockets of a port by address. They come first in the table."""
    found: dict[str, ListeningSocket] = {}
    with contextlib.suppress(OSError), Path(path).open() as lines:
        next(lines)
        for line in lines:
            fields = line.split()
            if int(fields[3], 16) != _LISTEN:
                break
            address, _, number = fields[1].partition(":")
            if int(number, 16) == port:
                found[_printable(address)] = ListeningSocket(int(fields[9]), int(fields[7]))
    return found


def _printable(address: str) -> str:
    """Return an address of the table, whose words are in the byte order of the machine."""
    words = [int(address[at : at + 8], 16) for at in range(0, len(address), 8)]
    packed = struct.pack(f"={len(words)}I", *words)
    return socket.inet_ntop(socket.AF_INET if len(words) == 1 else socket.AF_INET6, packed)


def is_held_by(found: ListeningSocket, pids: Iterable[int]) -> bool:
    """Return whether one of the processes holds a socket.

    The descriptors of a process that has changed its user can't be read, except by root: such a process holds the
    sockets of its users. Root is no other user: sockets of its daemons, such as Docker's, belong to the caller, too,
    unless the caller is root itself.
    """
    name = f"socket:[{found.inode}]"
    users = {_ROOT} if os.geteuid() != _ROOT else set[int]()
    for pid in pids:
        folder = f"/proc/{pid}/fd"
        try:
            descriptors = os.listdir(folder)  # noqa: PTH208 - there may be thousands
        except PermissionError:
            users |= _users(pid)
            continue
        except OSError:
            continue  # it has ended
        for descriptor in descriptors:
            with contextlib.suppress(OSError):  # closed meanwhile
                if os.readlink(f"{folder}/{descriptor}") == name:  # noqa: PTH115 - as above
                    return True
    return found.uid in users


def _users(pid: int) -> set[int]:
    """Return the real, effective, saved and file system user of a process."""
    with contextlib.suppress(OSError, StopIteration):
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        return set(map(int, next(line for line in lines if line.startswith("Uid:")).split()[1:]))
    return set()
