"""The TCP sockets that listen on this machine, and the processes that hold them.

A port belongs to nobody: any user may listen where a server is about to, and connect there. What listens is identified
by the inode of its socket, which no later socket has.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

_NETLINK_SOCK_DIAG = 4
#: Requests and responses of sock_diag(7) follow a `nlmsghdr`.
_HEADER = struct.Struct("=IHHII")
_SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST = 20, 1
_NO_COOKIES = b"\xff" * 8
_ANY_STATE = 0xFFFFFFFF
#: `inet_diag_req_v2`, whose addresses and interface follow the ports; `inet_diag_msg`.
_INET_REQUEST, _PORTS = struct.Struct("=BBxxI"), struct.Struct(">HH")
_STATE_AT, _UID_AT, _OWNER = _HEADER.size + 1, _HEADER.size + 64, struct.Struct("=II")
#: `unix_diag_req`; the attributes after `unix_diag_msg`.
_UNIX_REQUEST, _SHOW_PEER = struct.Struct("=BBxxIII"), 4
_UNIX_ATTRIBUTES_AT, _ATTRIBUTE = _HEADER.size + 16, struct.Struct("=HHI")
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
            request = self._requests[host, port] = _inet_request((host, port), (host, _ANY_PORT), _loopback())
        try:
            self._netlink.send(request)
            size = self._netlink.recv_into(self._buffer)
        except OSError:
            return None
        if not _is_found(self._buffer[:size]) or self._buffer[_STATE_AT] != _LISTEN:
            return None
        uid, inode = _OWNER.unpack_from(self._buffer, _UID_AT)
        return ListeningSocket(inode, uid)

    def find_peer(self, sock: socket.socket) -> int:
        """Return the inode of the other end of a connection within this machine; 0 if it is not known."""
        try:
            if self._netlink is None:
                return 0
            if sock.family == socket.AF_UNIX:
                body = _UNIX_REQUEST.pack(sock.family, 0, _ANY_STATE, os.fstat(sock.fileno()).st_ino, _SHOW_PEER)
                self._netlink.send(_message(body + _NO_COOKIES))
                reply = self._netlink.recv(1024)
                at = _UNIX_ATTRIBUTES_AT  # the only one is that of the peer
                return int(_ATTRIBUTE.unpack_from(reply, at)[2]) if len(reply) >= at + _ATTRIBUTE.size else 0
        except OSError:
            return 0
        found = self._ask_owner(sock)
        return found[1] if found else 0

    def find_user(self, sock: socket.socket) -> int | None:
        """Return the user at the other end of a TCP connection within this machine; None if it is not known."""
        found = self._ask_owner(sock)
        return found[0] if found else None

    def _ask_owner(self, sock: socket.socket) -> tuple[int, int] | None:
        """Return user and inode of the other end of a TCP connection."""
        if self._netlink is None:
            return None
        try:
            self._netlink.send(_inet_request(sock.getpeername(), sock.getsockname(), 0))
            reply = self._netlink.recv(1024)
        except OSError:
            return None
        return _OWNER.unpack_from(reply, _UID_AT) if _is_found(reply) else None

    @staticmethod
    def _read(host: str, port: int) -> ListeningSocket | None:
        """Look a socket up as the kernel does: the most specific address first."""
        is_ipv6 = ":" in host
        tables = {0: _listening("/proc/net/tcp", port), 1: _listening("/proc/net/tcp6", port)}
        mapped = "::" if is_ipv6 else f"::ffff:{host}"
        wanted = [(1, host), (1, "::")] if is_ipv6 else [(0, host), (1, mapped), (0, "0.0.0.0"), (1, "::")]
        return next((tables[table][address] for table, address in wanted if address in tables[table]), None)


def _inet_request(server: tuple[str, int], client: tuple[str, int], interface: int) -> bytes:
    """Return the request for the socket that gets the packets from `client` to `server`; both are host and port."""
    family = socket.AF_INET6 if ":" in server[0] else socket.AF_INET
    addresses = (socket.inet_pton(family, each[0]).ljust(16, b"\0") for each in (server, client))
    body = _INET_REQUEST.pack(family, socket.IPPROTO_TCP, _ANY_STATE) + _PORTS.pack(server[1], client[1])
    return _message(body + b"".join(addresses) + struct.pack("=I", interface) + _NO_COOKIES)


def _message(body: bytes) -> bytes:
    return _HEADER.pack(_HEADER.size + len(body), _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST, 1, 0) + body


def _is_found(reply: bytes | bytearray) -> bool:
    """Return whether a reply describes a TCP socket."""
    return len(reply) >= _UID_AT + _OWNER.size and _HEADER.unpack_from(reply)[1] == _SOCK_DIAG_BY_FAMILY


def _loopback() -> int:
    with contextlib.suppress(OSError):  # there is no interface of this name, but another one has the address
        return socket.if_nametoindex("lo")
    return 0


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


def is_held_by(found: ListeningSocket, pids: Sequence[int]) -> bool:
    """Return whether one of the processes holds a socket.

    The descriptors of a process that has changed its user can't be read, except by root: such a process holds the
    sockets of its users. Root is no other user: sockets of its daemons, such as Docker's, belong to the caller, too,
    unless the caller is root itself.
    """
    users = {_ROOT} if os.geteuid() != _ROOT else set[int]()
    for pid in pids:
        try:
            if holds(pid, found.inode):
                return True
        except PermissionError:
            users |= _users(pid)
    return found.uid in users


def holds(pid: int, inode: int) -> bool:
    """Return whether a process holds a socket. Raises: PermissionError."""
    name, folder = f"socket:[{inode}]", f"/proc/{pid}/fd"
    try:
        descriptors = os.listdir(folder)  # noqa: PTH208 - there may be thousands
    except PermissionError:
        raise
    except OSError:
        return False  # it has ended
    for descriptor in descriptors:
        with contextlib.suppress(OSError):  # closed meanwhile
            if os.readlink(f"{folder}/{descriptor}") == name:  # noqa: PTH115 - as above
                return True
    return False


def _users(pid: int) -> set[int]:
    """Return the real, effective, saved and file system user of a process."""
    with contextlib.suppress(OSError, StopIteration):
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        return set(map(int, next(line for line in lines if line.startswith("Uid:")).split()[1:]))
    return set()
