"""What listens at a port, and which processes hold it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from cortex.worker.commands.socket_table import ListeningSocket, SocketTable, holds, is_held_by

pytestmark = pytest.mark.processes

IPV4, IPV6 = "127.0.0.1", "::1"


def listen(host: str, port: int = 0) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, dualstack_ipv6=host.startswith("::") and host != IPV6)


def identity(sock: socket.socket) -> ListeningSocket:
    status = os.fstat(sock.fileno())
    return ListeningSocket(status.st_ino, status.st_uid)


@pytest.mark.parametrize("find", ["find", "_ask_kernel", "_read"])
@pytest.mark.parametrize(
    ("host", "reached"),
    [
        (IPV4, [IPV4]),
        ("0.0.0.0", [IPV4]),
        (IPV6, [IPV6]),
        ("::", [IPV4, IPV6]),
        ("::ffff:127.0.0.1", [IPV4]),
    ],
)
def test_the_socket_that_accepts_connections_to_an_address_is_found(find: str, host: str, reached: list[str]) -> None:
    table = SocketTable()
    with listen(host) as sock:
        port = sock.getsockname()[1]
        found = {address for address in (IPV4, IPV6) if getattr(table, find)(address, port) == identity(sock)}
        assert found == set(reached)
        assert not any(getattr(table, find)(address, port) for address in {IPV4, IPV6} - found)
    assert table.find(IPV4, port) is None


def test_a_connection_is_no_listening_socket() -> None:
    with listen(IPV4) as sock:
        connection = socket.create_connection(sock.getsockname())
        port = connection.getsockname()[1]
        assert SocketTable().find(IPV4, port) is None
        connection.close()


@pytest.mark.parametrize("host", [IPV4, IPV6, "0.0.0.0", "::", "unix"])
def test_the_other_end_of_a_connection_is_found(host: str, tmp_path: Path) -> None:
    if host == "unix":
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(tmp_path / "s"))
        listener.listen()
    else:
        listener = listen(host)
    with listener, socket.socket(listener.family if host != "::" else socket.AF_INET) as ours:
        ours.connect((IPV4, listener.getsockname()[1]) if host == "::" else listener.getsockname())
        theirs, _ = listener.accept()
        with theirs:
            inode = SocketTable().find_peer(ours)
            assert inode == os.fstat(theirs.fileno()).st_ino
            assert holds(os.getpid(), inode)


def test_a_socket_is_held_by_the_processes_that_have_it_open() -> None:
    with listen(IPV4) as sock:
        found = SocketTable().find(IPV4, sock.getsockname()[1])
        assert found is not None
        sleeps = [sys.executable, "-c", "input()"]
        with (
            subprocess.Popen(sleeps, stdin=subprocess.PIPE, pass_fds=[sock.fileno()]) as heir,
            subprocess.Popen(sleeps, stdin=subprocess.PIPE) as stranger,
        ):
            assert is_held_by(found, [stranger.pid, os.getpid()])
            assert is_held_by(found, [heir.pid])
            assert not is_held_by(found, [stranger.pid])
            heir.kill()
            stranger.kill()
    assert not is_held_by(found, [os.getpid()])


@pytest.mark.skipif(os.getuid() != 0, reason="only root can change its user")
@pytest.mark.parametrize(("uid", "is_held"), [(1, True), (2, False), (0, True)])
def test_a_process_of_another_user_whose_descriptors_are_secret_holds_sockets_of_that_user(
    uid: int, is_held: bool
) -> None:
    """The caller is user 3, its child user 1; user 2 is a stranger, and root is none."""
    source = f"""
import os, sys
from cortex.worker.commands.socket_table import ListeningSocket, is_held_by
reader, writer = os.pipe()
child = os.fork()
if child == 0:
    os.setgroups([])
    os.setresgid(1, 1, 1)
    os.setresuid(1, 1, 1)
    os.write(writer, b"1")
    sys.stdin.read()
    os._exit(0)
os.read(reader, 1)
os.setgroups([])
os.setresgid(3, 3, 3)
os.setresuid(3, 3, 3)
print(is_held_by(ListeningSocket(1, {uid}), [child]), flush=True)
"""
    with subprocess.Popen([sys.executable, "-c", source], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline().strip() == str(is_held).encode()
        process.stdin.close()
